"""Packs several sets with the processes of one mpirun, and ends as told: `python -m tests.mpi.packs FOLDER END`.

END: `error` (on the last process alone, while the others write), `deaf` (on the last, while rank 0 does what cannot be
interrupted), or `wait` (in the middle of a slow pack, for a signal). Only before the first are the sets packed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.comm import packing
from hpctrain.comm.packing import packing_team
from hpctrain.errors import DataError, HpctrainError
from hpctrain.h5.mapped import MappedSource
from hpctrain.h5.pack import PackOptions, Watch, pack
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import ArraySource, Columns, Source
from hpctrain.h5.team import Team

NUM_SAMPLES = 700


class Damaged(ArraySource):
    def read(self, start: int, stop: int) -> Columns:
        for number in range(start, stop):
            if number % 97 == 5:
                raise DataError(f"file-{number}: does not decode")
        return super().read(start, stop)


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    wave = rng.normal(1e3, 1, (NUM_SAMPLES, 30)).astype(np.float32)
    label = rng.integers(-1, 3, NUM_SAMPLES)
    wave[11, 3] = np.nan
    wave[600:650], label[600:650] = wave[:50], label[:50]  # duplicates that other processes judge
    text = Ragged.from_text("so " * (i % 50 % 7) for i in range(NUM_SAMPLES))
    return {"wave": wave, "label": label, "text": text}


def half(sample: dict[str, Any]) -> dict[str, Any] | None:
    row = np.arange(sample["text"].size + 1, dtype=np.int32)
    return None if sample["label"] == 2 else {**sample, "row": row, "sum": sample["wave"].sum()}


def packs() -> Iterator[tuple[str, Source, PackOptions]]:
    """Each set: more shards than processes, and fewer."""
    every = dict.fromkeys(("undecodable", "nonfinite", "duplicates", "labels"), "drop") | {
        "empty_text": "keep"
    }
    small = {"chunk_samples": 8, "shard_mib": 0.01}
    yield "plain", ArraySource(arrays()), PackOptions(**small)
    yield "clean", Damaged(arrays()), PackOptions(**small, clean=every)
    yield "mapped", MappedSource(ArraySource(arrays()), half, "tests:half"), PackOptions(**small)
    yield "one shard", ArraySource(arrays()), PackOptions(chunk_samples=50, store="float16", keep_bits=4)


def main(folder: Path, end: str) -> None:
    with packing_team(int(os.environ["OMPI_COMM_WORLD_SIZE"])) as team:
        if end != "error":
            deaf(team) if end == "deaf" else wait(folder, team)
        for name, source, options in packs():
            told: list[tuple[int, ...]] = []
            watch = Watch(packing=lambda *call, told=told: told.append(call))
            report = pack(source, folder / name, options, watch, team)
            assert report == team.share(report)
            assert told == [] or team.rank == 0 or told[-1][0] < report.num_samples
        auto = pack(ArraySource(arrays()), folder / "auto", PackOptions(codec="auto"), team=team)
        assert auto.choice is not None
        fail(folder, team)


def fail(folder: Path, team: Team) -> None:
    """The last process meets a bad chunk at once; the others would pack for minutes."""

    class Slow(ArraySource):
        def read(self, start: int, stop: int) -> Columns:
            if team.rank == team.size - 1:
                raise DataError("the message of the last process")
            time.sleep(0.5)
            return super().read(start, stop)

    pack(Slow({"x": np.zeros(999)}), folder / "bad", PackOptions(chunk_samples=1, shard_mib=1e-6), team=team)


def deaf(team: Team) -> None:
    """The last process fails; rank 0 is told, but does not hear it before all deadlines are over."""
    packing._ENDING_S, packing._LEAVING_S = 1.0, 1.9
    if team.rank == team.size - 1:
        raise DataError("the last process cannot read it")
    time.sleep(20)


def wait(folder: Path, team: Team) -> None:
    """Packs slowly until somebody stops it."""

    def slow(done: int, total: int, raw_bytes: int) -> None:
        if done > 10:
            (folder / "slow").touch()
        time.sleep(0.05)

    options = PackOptions(chunk_samples=1, shard_mib=1e-4)
    pack(ArraySource({"x": np.zeros(100_000)}), folder / "interrupted", options, Watch(slow), team)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except HpctrainError as error:
        print(f"shown: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
