"""Kills at random writes, of one kind of program: `python -m benchmarks.staging_kills KIND COUNT SEED FOLDER`.

Each trial makes a state of its own, runs the real command with a fault that kills it (SIGKILL) at a write drawn at
random from all that it passes, looks whether anything wrong is to be seen, runs the command again, and looks whether
the result is right. What the kernel holds of files survives SIGKILL: this is the death of a process, no power cut.

Every command, and every look, is a process forked from this one, which reads no data itself and starts no threads: so a
trial costs no start of Python. One line of JSON a trial goes to standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

from hpctrain.resilience import faults

DEADLINE_S: Final = 120.0
_POLL_S: Final = 0.002


class Kind(Protocol):
    """A program that is killed, in several variants. All but `point` and `variants` run in processes of their own."""

    point: str
    """Of faults."""
    variants: tuple[str, ...]
    counted: ClassVar[dict[str, str]] = {}
    """Variants whose writes another process makes, and the variant that makes as many itself."""

    def make(self, folder: Path) -> None:
        """Write what all trials begin with."""

    def prepare(self, variant: str, fixture: Path, folder: Path) -> None:
        """The state before the command, in an empty folder."""

    def run(self, variant: str, fixture: Path, folder: Path) -> str | None:
        """The command; raises `SystemExit` as a command line does. Says so where a process beside it was killed."""

    def seen(self, variant: str, fixture: Path, folder: Path) -> str:
        """What is wrong after a kill; nothing: empty."""

    def result(self, variant: str, fixture: Path, folder: Path) -> str:
        """What is wrong after a run to the end; nothing: empty."""


@dataclass(frozen=True)
class Trial:
    """One kill, at the `nth` of `passages` writes; `problem` is empty where all was right."""

    kind: str
    variant: str
    nth: int
    passages: int
    problem: str
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """How a forked process ended: the number of the signal that ended it, its exit code, and what it said."""

    signal: int
    code: int
    words: str


def forked(action: Callable[[], Any], rules: str = "", deadline_s: float = DEADLINE_S) -> Outcome:
    """Run `action` in a forked process with these rules of faults; what it returns is said as text.

    One that does not end in time is killed, with what descends from it, and says so with code -1.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.setsid()
        os._exit(_child(action, rules, writing))
    os.close(writing)
    status, deadline = 0, time.monotonic() + deadline_s
    with open(reading, "rb") as pipe:
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return Outcome(0, -1, f"did not end within {deadline_s:g} s")
            time.sleep(_POLL_S)
        status = ended[1]
        with contextlib.suppress(ProcessLookupError):  # helpers that outlived it would keep the pipe open
            os.killpg(pid, signal.SIGKILL)
        words = pipe.read().decode("utf-8", "replace")
    code = os.waitstatus_to_exitcode(status)
    return Outcome(max(0, -code), max(0, code), words)


def _child(action: Callable[[], Any], rules: str, pipe: int) -> int:
    """In the forked process: what it says goes to `pipe`, what it prints to nowhere."""
    silent = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(silent, number)
    os.environ[faults.VARIABLE] = rules
    faults.configure(rank=0, attempt=0)
    code = 0
    try:
        words = str(action() or "")
    except SystemExit as error:
        code, words = error.code if isinstance(error.code, int) else 1, ""
    except BaseException:  # noqa: BLE001 - whatever it is, the trial is told
        code, words = 1, traceback.format_exc()
    os.write(pipe, words.encode()[:32768])
    return code


class Trials:
    """All trials of one kind, below `folder`; what is random comes from `seed`."""

    def __init__(self, name: str, kind: Kind, folder: Path, seed: int) -> None:
        self._name, self._kind, self._folder = name, kind, folder
        self._random = random.Random(f"{name} {seed}")
        self._fixture = folder / "fixture"
        self._fixture.mkdir()
        self._passages: dict[str, int] = {}
        self._checked(lambda: kind.make(self._fixture), "making what the trials begin with")

    def trial(self, number: int) -> Trial:
        """The `number`-th; variants take turns. Raises `RuntimeError` where a command fails that is not killed."""
        kind, variant = self._kind, self._kind.variants[number % len(self._kind.variants)]
        passages = self._count(variant)
        nth = self._random.randint(1, passages)
        begun_s, place = time.monotonic(), self._folder / f"trial-{number}"
        place.mkdir()
        self._checked(lambda: kind.prepare(variant, self._fixture, place), f"preparing {variant}")
        problem = self._killed(variant, place, nth)
        shutil.rmtree(place)
        return Trial(self._name, variant, nth, passages, problem, round(time.monotonic() - begun_s, 3))

    def _killed(self, variant: str, place: Path, nth: int) -> str:
        kind, fixture = self._kind, self._fixture
        killed = forked(lambda: kind.run(variant, fixture, place), f"kill@{kind.point}:rank=0,nth={nth}")
        if killed.code or (killed.signal not in (0, signal.SIGKILL)):
            return f"with a kill at write {nth} it ended with {killed}"
        if not killed.signal and not killed.words:
            return f"it was not killed at write {nth}"
        looked = forked(lambda: kind.seen(variant, fixture, place))
        if looked.code or looked.signal or looked.words:
            return f"after the kill: {looked.words or looked}"
        again = forked(lambda: kind.run(variant, fixture, place))
        if again.code or again.signal:
            return f"run again: {again}"
        found = forked(lambda: kind.result(variant, fixture, place))
        return f"after running again: {found.words or found}" if found != Outcome(0, 0, "") else ""

    def _count(self, variant: str) -> int:
        """Writes that the command passes when nothing happens; its result must be right."""
        variant = self._kind.counted.get(variant, variant)
        if variant not in self._passages:
            kind, fixture, place = self._kind, self._fixture, self._folder / f"count-{variant}"
            place.mkdir()
            self._checked(lambda: kind.prepare(variant, fixture, place), f"preparing {variant}")
            said = self._checked(lambda: _passages(kind, variant, fixture, place), f"running {variant}")
            wrong = self._checked(lambda: kind.result(variant, fixture, place), f"looking at {variant}")
            shutil.rmtree(place)
            if wrong or not int(said):
                raise RuntimeError(
                    f"{self._name}, {variant}: {wrong or f'it passes no point {kind.point}'}, without any kill"
                )
            self._passages[variant] = int(said)
        return self._passages[variant]

    def _checked(self, action: Callable[[], Any], doing: str) -> str:
        done = forked(action)
        if done.code or done.signal:
            raise RuntimeError(f"{self._name}: {doing} failed without any kill: {done}")
        return done.words


def _passages(kind: Kind, variant: str, fixture: Path, place: Path) -> str:
    """Run the command with a fault that does nothing, and count how often it comes up."""
    os.environ[faults.VARIABLE] = f"sleep@{kind.point}:rank=0,s=0"
    faults.configure(rank=0, attempt=0)
    try:
        kind.run(variant, fixture, place)
    except SystemExit as error:
        if error.code:
            raise RuntimeError(f"it ended with {error.code}") from error
    return str(faults._rules[0].passages)  # nothing else knows; a public way to it would serve nobody else


def main(arguments: list[str]) -> None:
    """As the module says."""
    from benchmarks.staging_kinds import KINDS

    name, count, seed, folder = arguments[0], int(arguments[1]), int(arguments[2]), Path(arguments[3])
    folder.mkdir(parents=True, exist_ok=True)
    trials = Trials(name, KINDS[name](), folder, seed)
    for number in range(count):
        print(json.dumps(asdict(trials.trial(number))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
