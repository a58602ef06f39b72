"""Real training of the `digits` recipe, as a user runs it: `hpctrain run RUN.toml -n RANKS`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from benchmarks.environment import ROOT
from benchmarks.harness import Say, Values
from hpctrain.config import RunConfig, dump_run, parse_run
from hpctrain.errors import HangError, HpctrainError
from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.launch.local import start_process
from hpctrain.observe.events import read_events
from hpctrain.recipes import recipe_path
from hpctrain.recipes.digits_data import prepare_digits

_DEADLINE_S: Final = 300.0
_ENDING_S: Final = 20.0
_NEVER_S: Final = 1e9
_LOG_LINES: Final = 15


class BenchmarkFailed(HpctrainError, RuntimeError):
    """A training run did not end as a measurement needs it."""


@dataclass(frozen=True)
class Training:
    """What is trained, and how much of it.

    Attributes:
        ranks: MPI ranks.
        epochs: passes over the 4,000 training pictures (fewer with `max_samples`).
        width: channels of the first layer.
        max_samples: training pictures at most.
    """

    ranks: int = 2
    epochs: int = 4
    width: int = 32
    max_samples: int = 4000


@dataclass(frozen=True)
class Storage:
    """How the pictures are stored; `dtype` uint8 is how they come, floats are the pictures divided by 255."""

    codec: str = "blosc-lz4"
    chunk_samples: int | None = None
    dtype: Literal["uint8", "float32", "float16"] = "uint8"


class DigitsTraining:
    """Runs of the recipe in `folder`; packed sets are made once each."""

    def __init__(self, folder: Path, training: Training, say: Say) -> None:
        self._folder, self._training = folder, training
        self._raw = folder / "digits-raw"
        self._packed: dict[Storage, Path] = {}
        self.numerics: dict[str, Any] | None = None
        """What the ranks computed on, as the last run recorded it."""
        self.num_samples = min(training.max_samples, prepare_digits(self._raw, say).train_samples)

    def run(self, storage: Storage, precision: Mapping[str, str], seed: int) -> Values:
        """Train once and evaluate.

        Gives `samples_per_s` without the first step (where libraries and pools warm up), `loss` of the last step,
        the metrics of the recipe, `wall_s` of the whole command, and `seconds_PHASE` of rank 0. Raises
        `BenchmarkFailed` when the run fails or was restarted, `HangError` when it does not end.
        """
        config = self._config(self.packed(storage), precision, seed)
        description, run_dir = self._folder / "run.toml", self._folder / "run"
        description.write_text(dump_run(config), encoding="utf-8")
        shutil.rmtree(run_dir, ignore_errors=True)
        begun_s = time.perf_counter()
        run_hpctrain(
            ["run", str(description), "-n", str(self._training.ranks), "--dir", str(run_dir)], self._folder
        )
        wall_s = time.perf_counter() - begun_s
        result = json.loads((run_dir / "result.json").read_bytes())
        if result["restarts"]:
            raise BenchmarkFailed(
                f"a training run was restarted {result['restarts']} times, so its times mean nothing; see why with "
                f"`hpctrain run {recipe_path('digits')}` on this machine"
            )
        self.numerics = result["numerics"]
        events = read_events(run_dir / "attempts" / "a0001" / "events" / "rank-0.jsonl")
        global_batch = config.lanes.num_lanes * config.lanes.lane_batch
        return {**values_of(result, events, self.num_samples, global_batch), "wall_s": wall_s}

    def packed(self, storage: Storage) -> Path:
        """Folder with the packed sets `train` and `test`."""
        if storage not in self._packed:
            folder = self._folder / f"digits-{len(self._packed)}"
            folder.mkdir()
            for part in ("train", "test"):
                pack_arrays(self._arrays(part, storage.dtype), folder / part, _options(storage))
            self._packed[storage] = folder
        return self._packed[storage]

    def _arrays(self, part: str, dtype: str) -> dict[str, Any]:
        kept = self._training.max_samples if part == "train" else None
        arrays = {
            name: np.load(self._raw / part / f"{name}.npy", allow_pickle=False)[:kept]
            for name in ("image", "label")
        }
        if dtype != "uint8":
            arrays["image"] = arrays["image"].astype(np.float32) / np.float32(255)
        return arrays

    def _config(self, packed: Path, precision: Mapping[str, str], seed: int) -> RunConfig:
        """The recipe's description with other data and precision, and nothing saved before the end."""
        raw = tomllib.loads(recipe_path("digits").read_text(encoding="utf-8"))
        raw["task"]["options"]["width"] = self._training.width
        raw["data"] |= {"train": str(packed / "train"), "evaluate": str(packed / "test")}
        raw["train"] |= {"epochs": self._training.epochs, "seed": seed}
        raw["precision"] = {**raw.get("precision", {}), **precision}
        raw["checkpoint"] = {"interval_steps": 0, "interval_s": _NEVER_S}
        return parse_run(raw, source="digits, for a benchmark")


def _options(storage: Storage) -> PackOptions:
    store = None if storage.dtype == "uint8" else storage.dtype
    return PackOptions(codec=storage.codec, chunk_samples=storage.chunk_samples, store=store)


def values_of(
    result: Mapping[str, Any], events: list[dict[str, Any]], num_samples: int, global_batch: int
) -> Values:
    """The figures of a finished run, from its `result.json` and the events of rank 0.

    Rates are over the times of the events, which are the wall clock's (`time.time`): a clock that is set during the run
    falsifies its round, and `result.json` has no seconds of single steps, by which the first could be left out.
    """
    steps = [event for event in events if event["kind"] == "step"]
    values = {f"seconds_{phase}": float(seconds) for phase, seconds in result["seconds"].items()}
    values |= {name: float(value) for name, value in result["metrics"].items()}
    if steps:
        values["loss"] = float(steps[-1]["loss"])
    if len(steps) > 1:
        first, last = (
            samples_until(event["step"], num_samples, global_batch) for event in (steps[0], steps[-1])
        )
        values["samples_per_s"] = (last - first) / (steps[-1]["t"] - steps[0]["t"])
    return values


def samples_until(step: int, num_samples: int, global_batch: int) -> int:
    """Samples used in the first `step` steps: the last step of an epoch may be short."""
    epochs, rest = divmod(step, -(-num_samples // global_batch))
    return epochs * num_samples + min(rest * global_batch, num_samples)


def run_hpctrain(arguments: list[str], folder: Path) -> None:
    """Run the command line to its end, its words in `folder`.

    Raises `BenchmarkFailed` with its last words when it fails, `HangError` when it does not end. An interruption ends
    it, and is passed on.
    """
    log = folder / "hpctrain.log"
    log.unlink(missing_ok=True)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {key: value for key, value in os.environ.items() if key != "HPCTRAIN_FAULTS"}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    process = start_process([sys.executable, "-m", "hpctrain.cli", *arguments], environment, log)
    try:
        code = process.wait(_DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise HangError(
            f"`hpctrain {' '.join(arguments)}` ran for more than {_DEADLINE_S:g} s; {_tail(log)}"
        ) from error
    finally:
        _end(process)
    if code != 0:
        raise BenchmarkFailed(f"`hpctrain {' '.join(arguments)}` ended with {code}; {_tail(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the supervisor if it still runs: a second SIGINT makes it kill its ranks at once."""
    for number, wait_s in ((signal.SIGINT, 0.5), (signal.SIGINT, _ENDING_S), (signal.SIGKILL, _ENDING_S)):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    return "its last words:\n" + "\n".join(lines)
