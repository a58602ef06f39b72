"""All kills: the kinds side by side, each in a process of its own that forks its trials (`staging_kills`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.environment import ROOT
from benchmarks.report import Table, number
from benchmarks.staging_bars import Bar, Judged
from benchmarks.staging_kills import Trial
from benchmarks.summary import Summary

KINDS: Final = ("stager", "backup", "restore", "pack")
_SAID: Final = 10
_WORDS: Final = 400
_ENDING_S: Final = 10.0


@dataclass
class Killed:
    """What came of one kind: its trials, and why there are not more of them."""

    kind: str
    asked: int
    seed: int
    trials: list[Trial] = field(default_factory=list)
    reason: str = ""

    @property
    def right(self) -> int:
        """Trials without a problem."""
        return sum(not trial.problem for trial in self.trials)

    def judged(self) -> Judged:
        """All must be right."""
        bar = Bar("kills at random writes, all right", self.kind, self.asked, "at least", every=True)
        return Judged(bar, (float(self.right),) if self.trials else (), self.reason)


def kill_all(kills: int, seed: int, folder: Path, say: Callable[[str], None]) -> list[Killed]:
    """`kills` trials, shared out among the kinds; an interruption ends them all, and is passed on."""
    share, rest = divmod(kills, len(KINDS))
    found = [Killed(kind, share + (number < rest), seed) for number, kind in enumerate(KINDS)]
    for item in found:
        item.reason = "" if item.asked else "left out by --kills"
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(found)) as pool:
        running = [(item, stack.enter_context(_worker(item, folder))) for item in found if item.asked]
        list(pool.map(lambda pair: _follow(pair[0], pair[1], folder, say), running))
    return found


@contextlib.contextmanager
def _worker(item: Killed, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    place = folder / item.kind
    place.mkdir()
    arguments = [item.kind, str(item.asked), str(item.seed), str(place)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (folder / f"{item.kind}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.staging_kills", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(_ENDING_S)
        if process.stdout is not None:
            process.stdout.close()


def _follow(item: Killed, process: subprocess.Popen[bytes], folder: Path, say: Callable[[str], None]) -> None:
    """Take what a worker says, until it ends."""
    assert process.stdout is not None
    for line in process.stdout:
        trial = Trial(**json.loads(line))
        item.trials.append(trial)
        if trial.problem:
            say(f"kills: {item.kind}, {trial.variant}, write {trial.nth}: {trial.problem[:_WORDS]}")
        elif len(item.trials) % _SAID == 0 or len(item.trials) == item.asked:
            say(f"kills: {item.kind}: {item.right} of {len(item.trials)} right so far, seed {item.seed}")
    if process.wait() != 0:
        words = (folder / f"{item.kind}.log").read_text(encoding="utf-8", errors="replace").strip()
        item.reason = f"it ended with {process.returncode}: ...{words[-_WORDS:]}"
        say(f"kills: {item.kind}: {item.reason}")


def kills_table(killed: list[Killed]) -> Table:
    """One row for each kind and variant."""
    rows = []
    for item in killed:
        for variant in dict.fromkeys(trial.variant for trial in item.trials):
            of = [trial for trial in item.trials if trial.variant == variant]
            seconds = number(Summary.of([trial.seconds for trial in of]).median)
            right = sum(not trial.problem for trial in of)
            rows.append((f"{item.kind}, {variant}", str(len(of)), str(right), str(of[0].passages), seconds))
    note = (
        "Writes: fault points that an undisturbed run of the command passes; the kill comes before one of them, drawn "
        "at random. Seconds: of a trial, with all that is compared."
    )
    return Table("Kills", ("what was killed", "kills", "right", "writes", "s"), rows, note)
