"""First batches with and without staging, each in a process of its own (`staging_first`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.environment import ROOT
from benchmarks.harness import Values
from benchmarks.reading import forget
from benchmarks.staging_sets import files_of
from benchmarks.training import BenchmarkFailed
from hpctrain.config import dump_run, parse_run

HOW: Final = ("staging", "direct")
_BATCH: Final = 64
_WINDOW_CHUNKS: Final = 4
_DEADLINE_S: Final = 180.0


class FirstBatch:
    """Measurements on one packed set; scratch space is below `folder`."""

    def __init__(self, packed: Path, folder: Path) -> None:
        self._packed, self._folder = packed, folder

    def settings(self, where: str, packed: Path | None = None) -> dict[str, Callable[[int], Values]]:
        """With staging and without, by name; `packed`: where the same set is read from in the place of the first."""
        return {f"{how}, {where}": partial(self._measure, packed or self._packed, how) for how in HOW}

    def _measure(self, packed: Path, how: str, _: int) -> Values:
        """From nothing: no mirror, and no page of the shared files in the kernel's cache."""
        ssd = self._folder / "ssd"
        ssd.mkdir()
        try:
            description = self._folder / "run.toml"
            description.write_text(_describe(packed, ssd if how == "staging" else None), encoding="utf-8")
            for path in files_of(packed):
                forget(path)
            return _run(description)
        finally:
            shutil.rmtree(ssd)


def _describe(packed: Path, ssd: Path | None) -> str:
    raw = {
        "name": "first",
        "task": {"name": "benchmarks.staging_task:Touch"},
        "data": {"train": str(packed), "window_chunks": _WINDOW_CHUNKS},
        "lanes": {"num_lanes": 1, "lane_batch": _BATCH},
        "train": {"epochs": 1},
        "staging": {} if ssd is None else {"dir": str(ssd)},
    }
    return dump_run(parse_run(raw, source="the first batch, for a benchmark"))


def _run(description: Path) -> Values:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.staging_first", str(description)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        raise BenchmarkFailed(f"the first batch of {description} did not come: {last}\n{done.stderr[-1500:]}")
    found: Values = json.loads(done.stdout)
    if found["warnings"]:
        raise BenchmarkFailed(f"staging for {description} was not undisturbed: {done.stderr[-1500:]}")
    return found
