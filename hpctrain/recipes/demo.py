"""The promise, shown: the same run twice, once with a rank killed in mid-epoch, and the two digests compared.

Every step is the command that a user would type, run as a process of its own; the kill is a SIGKILL from outside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpctrain.config import RunConfig, StagingPlace, dump_run, load_run
from hpctrain.errors import HpctrainError
from hpctrain.observe.events import read_events
from hpctrain.recipes import recipe_path

Say = Callable[[str], None]

NUM_RANKS = 2
KILL_AFTER = 0.4
"""Share of the run's steps after which a rank is killed."""
_POLL_S = 0.02
_DEADLINE_S = 900.0

_CHANCE = {"accuracy": 1 / 10, "top5_seen": 5 / 1721, "top5_unseen": 5 / 190}
"""What guessing would score: 10 digits; 5 of 1,721 or of 190 texts."""


class DemoFailed(HpctrainError, RuntimeError):
    """The demo did not show what it promises; the message says what to look at."""


@dataclasses.dataclass(frozen=True)
class DemoReport:
    """What the demo shows at its end."""

    recipe: str
    reason: str
    packed_bytes: int
    raw_bytes: int
    samples: int
    killed: dict[str, Any]
    plain: dict[str, Any]
    kill_step: int
    run_dirs: tuple[Path, Path]

    @property
    def equal(self) -> bool:
        """Whether a run that was really killed ended with the weights of one that was not."""
        restarts = self.killed["restarts"] >= 1 and self.plain["restarts"] == 0
        return restarts and all(
            self.killed[key] == self.plain[key]
            for key in ("weights_digest", "state_digest", "samples_digest")
        )

    def rows(self) -> list[tuple[str, str]]:
        """The report as (name, value) lines."""
        metrics = [
            (f"test {name}", f"{value:.3f} (chance {_CHANCE[name]:.3f})")
            for name, value in self.plain["metrics"].items()
            if name in _CHANCE
        ]
        return [
            ("data set", f"{self.recipe}, {self.samples:,} training samples ({self.reason})"),
            (
                "packed",
                f"{self.packed_bytes:,} of {self.raw_bytes:,} bytes ({self.packed_bytes / self.raw_bytes:.2f})",
            ),
            ("samples/s", f"{self.plain['samples_per_s']:,.0f} on {self.plain['ranks']} ranks"),
            *metrics,
            (
                "killed",
                f"rank {NUM_RANKS - 1} by SIGKILL after step {self.kill_step} of {self.plain['steps']}",
            ),
            (
                "restarts",
                f"{self.killed['restarts']} (killed run), {self.plain['restarts']} (undisturbed run)",
            ),
            ("weights, killed run", self.killed["weights_digest"]),
            (
                "weights, undisturbed",
                f"{self.plain['weights_digest']}  {'equal' if self.equal else 'NOT EQUAL'}",
            ),
            ("run directories", " and ".join(str(path) for path in self.run_dirs)),
        ]


def fetch_data(folder: Path, wanted: str | None, say: Say) -> tuple[str, str]:
    """Fetch the data of a recipe into `folder`/RECIPE/raw; returns the recipe, and why it was chosen.

    Unless one is asked for: emoji where npm is there and can fetch its pictures, else digits.
    """
    if wanted is not None:
        recipe_path(wanted)  # refuses a recipe that there is not, before anything is made
        _fetch(folder, wanted, say)
        return wanted, "as asked"
    if shutil.which("npm") is None:
        _fetch(folder, "digits", say)
        return "digits", "npm is not on PATH, so not emoji"
    try:
        _fetch(folder, "emoji", say)
        return "emoji", "npm is there to fetch the pictures"
    except DemoFailed as error:
        say(f"demo: {error}; showing digits instead")
        _fetch(folder, "digits", say)
        return "digits", "npm could not fetch the pictures of emoji"


def run_demo(folder: Path, wanted: str | None, say: Say) -> DemoReport:
    """Fetch, pack, train with a kill, train without, compare. Interrupted, it can simply be run again.

    Raises `DemoFailed` where a command fails or nothing could be killed.
    """
    recipe, reason = fetch_data(folder, wanted, say)
    say(f"demo: recipe {recipe} ({reason}), in {folder}")
    folder = folder / recipe
    description = _describe(folder, recipe)
    config = load_run(description)
    _pack(folder, recipe, say)
    runs = folder / "run-killed", folder / "run-undisturbed"
    for run_dir in runs:
        _remove(run_dir)
    _remove(folder / "node-ssd")  # staging is shown from nothing
    say("training, and killing a rank in mid-epoch:")
    kill_step = _train_and_kill(description, config, runs[0], say)
    say("training once more, undisturbed:")
    _hpctrain(["run", str(description), "-n", str(NUM_RANKS), "--dir", str(runs[1])], say)
    killed, plain = (json.loads((run / "result.json").read_bytes()) for run in runs)
    manifest = json.loads((folder / "packed" / "train" / "dataset.json").read_bytes())
    sizes = (int(manifest["stored_bytes"]), int(manifest["raw_bytes"]), int(manifest["num_samples"]))
    return DemoReport(recipe, reason, *sizes, killed, plain, kill_step, runs)


def _describe(folder: Path, recipe: str) -> Path:
    """The recipe's run description beside the data, with staging switched on."""
    config = load_run(recipe_path(recipe))
    data = config.data.model_copy(update={"train": Path("packed/train"), "evaluate": Path("packed/test")})
    place = StagingPlace(path=folder.resolve() / "node-ssd")
    staging = config.staging.model_copy(update={"dirs": (place,)})
    description = folder / "run.toml"
    description.write_text(
        dump_run(config.model_copy(update={"data": data, "staging": staging})), encoding="utf-8"
    )
    return description


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _fetch(folder: Path, recipe: str, say: Say) -> None:
    (folder / recipe).mkdir(parents=True, exist_ok=True)
    _hpctrain(["data", recipe, str(folder / recipe / "raw")], say)


def _pack(folder: Path, recipe: str, say: Say) -> None:
    raw, packed = folder / "raw", folder / "packed"
    for part in ("train", "test"):
        if not (packed / part).exists():
            packed.mkdir(exist_ok=True)
            size = ["--size", "32"] if recipe == "emoji" else []
            _hpctrain(["pack", str(raw / part), str(packed / part), *size], say)


def _train_and_kill(description: Path, config: RunConfig, run_dir: Path, say: Say) -> int:
    arguments = ["run", str(description), "-n", str(NUM_RANKS), "--dir", str(run_dir)]
    say(f"$ hpctrain {' '.join(arguments)}")
    process = subprocess.Popen(_command(arguments), env=_environment())
    try:
        kill_step = _kill_in_mid_epoch(process, run_dir / "attempts" / "a0001", config.train.epochs, say)
        code = _wait(process)
    finally:
        if process.poll() is None:
            process.terminate()  # it passes the request on to its ranks
            _wait(process)
    if code != 0:
        raise DemoFailed(
            f"the run that lost a rank ended with {code} instead of coming back; see {run_dir}/attempts"
        )
    return kill_step


def _kill_in_mid_epoch(process: subprocess.Popen[bytes], attempt: Path, epochs: int, say: Say) -> int:
    """SIGKILL the last rank once the run is under way; returns the step that was seen last."""
    deadline_s = time.monotonic() + _DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline_s:
        steps = [
            event for event in read_events(attempt / "events" / "rank-0.jsonl") if event["kind"] == "step"
        ]
        if steps and _is_mid_epoch(steps[-1], epochs):
            pid = json.loads((attempt / "ranks" / f"{NUM_RANKS - 1}.pid.json").read_bytes())["pid"]
            with contextlib.suppress(
                ProcessLookupError
            ):  # it has just finished: no restart, and the demo says so
                os.kill(pid, signal.SIGKILL)
            step = int(steps[-1]["step"])
            say(
                f"demo: killed rank {NUM_RANKS - 1} (process {pid}) after step {step} of {steps[-1]['steps_total']}"
            )
            return step
        time.sleep(_POLL_S)
    raise DemoFailed(f"the run ended before a rank could be killed; see {attempt}/logs")


def _is_mid_epoch(event: dict[str, Any], epochs: int) -> bool:
    steps_per_epoch = event["steps_total"] // epochs
    late_enough = event["step"] >= KILL_AFTER * event["steps_total"]
    return bool(late_enough and 0 < event["step"] % steps_per_epoch < steps_per_epoch - 1)


def _hpctrain(arguments: Sequence[str], say: Say) -> None:
    say(f"$ hpctrain {' '.join(arguments)}")
    code = _wait(subprocess.Popen(_command(arguments), env=_environment()))
    if code != 0:
        raise DemoFailed(f"`hpctrain {' '.join(arguments)}` ended with {code}; its message is above")


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise DemoFailed(
            f"the command above took more than {_DEADLINE_S:g} s and was ended; run the demo again"
        ) from None


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "hpctrain.cli", *arguments]


def _environment() -> dict[str, str]:
    """The environment without fault rules, and with this package importable where it is not installed."""
    package_parent = str(Path(__file__).parents[2])
    environment = {key: value for key, value in os.environ.items() if key != "HPCTRAIN_FAULTS"}
    paths = [package_parent, *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}
