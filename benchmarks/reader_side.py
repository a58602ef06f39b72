"""One side of a comparison, in a process of its own: `python -m benchmarks.reader_side FAMILY FOLDER...`.

Sides do not disturb each other that way: each has its own imports, threads, worker processes and caches, opens its
data once, and measures when it is told to. Orders come as lines of JSON on standard input and are answered one by one
on standard output; what libraries print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TextIO

import psutil

from benchmarks import reading
from benchmarks.harness import Values
from benchmarks.reader_base import GB, Batches, Side, Stopwatch, device_bytes
from benchmarks.reader_data import DataSet, digest

FAMILIES: Final = {
    "codec": "benchmarks.reader_codec",
    "hpctrain": "benchmarks.reader_ours",
    "h5py": "benchmarks.reader_h5py",
    "hidefix": "benchmarks.reader_hidefix",
    "mosaicml": "benchmarks.reader_mosaicml",
    "webdataset": "benchmarks.reader_webdataset",
    "zarr": "benchmarks.reader_zarr",
}
"""The module of each family; its `sides(data)` names the sides it has for a set, with what opens each."""
MODULES: Final = {
    "hidefix": "hidefix",
    "mosaicml": "streaming",
    "webdataset": "webdataset",
    "zarr": "zarr",
}
"""What the families of the peers import."""
_COLD_SHARE: Final = 0.9  # as in `reading`


class Server:
    """The sides of one family, opened when first named, and the orders they are given."""

    def __init__(self, family: str, folders: list[Path]) -> None:
        sides = importlib.import_module(FAMILIES[family]).sides
        self._openers: dict[str, Callable[[], Side]] = {}
        for folder in folders:
            self._openers |= sides(DataSet.load(folder))
        self._sides: dict[str, Side] = {}

    def side(self, name: str) -> Side:
        """A side by name."""
        if name not in self._sides:
            self._sides[name] = self._openers[name]()
        return self._sides[name]

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out one order; its other entries are the arguments."""
        if order["do"] == "names":
            return {"names": list(self._openers)}
        arguments = {key: value for key, value in order.items() if key not in ("do", "side")}
        return ACTIONS[order["do"]](self.side(order["side"]), **arguments)

    def close(self) -> None:
        """Close all sides."""
        for side in self._sides.values():
            side.close()


def opened(side: Side) -> dict[str, Any]:
    """Nothing more: it is open."""
    return {"options": side.options()}


def choose(side: Side, seconds: float) -> dict[str, Any]:
    """Try every option, take the fastest, and read as much of an epoch as takes about `seconds` where that can be."""
    tried = {option: side.trial(option, seconds) for option in side.options()}
    best = max(tried, key=tried.__getitem__)
    data, samples_per_s = side.data, tried[best] * GB / side.data.sample_bytes
    wanted = max(1, round(samples_per_s * seconds / data.batch)) * data.batch
    samples = min(wanted, data.num_samples) if side.bounded else data.num_samples
    side.use(best, samples)
    side.epoch_s = samples / samples_per_s
    return {"option": best, "samples": samples, "tried": tried}


def check(side: Side) -> dict[str, Any]:
    """The digest of epoch 0, for `reader_data.Reference`."""
    kinds = set()

    def seen() -> Batches:
        for ids, values in side.batches(0, 1):
            kinds.add(str(values.dtype).removeprefix("torch."))
            yield ids, values

    total, count = digest(seen())
    return {"digest": total, "count": count, "dtypes": sorted(kinds)}


def measure(side: Side, epoch: int, seconds: float, cold: bool) -> Values:
    """The rate of as many epochs as take about `seconds`; cold: of one, after the kernel forgot the files.

    Gives nothing where no bytes came from a device though they were to.
    """
    if cold:
        return _measure_cold(side, epoch)
    epochs = max(1, round(seconds / side.epoch_s))
    found = side.read(epoch, epochs)
    side.epoch_s = found["seconds"] / epochs
    return found


def _measure_cold(side: Side, epoch: int) -> Values:
    stored = sum(reading.forget(path) for path in side.files()) * side.samples / side.data.num_samples
    before = device_bytes()
    watch = Stopwatch()
    num_bytes = sum(values.nbytes for _, values in side.batches(epoch, 1))
    found = watch.values(num_bytes)
    after = device_bytes()
    if not stored or before is None or after is None or after - before < _COLD_SHARE * stored:
        return {}
    return found


def memory(side: Side, epochs: int) -> dict[str, Any]:
    """Resident bytes of this process after each of so many epochs of one run."""
    process, seen = psutil.Process(), 0
    resident: list[int] = []
    for ids, _ in side.batches(0, epochs):
        seen += len(ids)
        if seen >= (len(resident) + 1) * side.samples:
            resident.append(process.memory_info().rss)
    return {"resident_bytes": resident}


ACTIONS: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "open": opened,
    "choose": choose,
    "check": check,
    "measure": measure,
    "memory": memory,
}
"""What can be asked of a side, by name."""


def serve(orders: TextIO, answers: TextIO, server: Server) -> None:
    """Answer orders until there are no more; an error is an answer too."""
    for line in orders:
        try:
            answer = server.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is told to the one who asked
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """As the module says."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    server = Server(sys.argv[1], [Path(folder) for folder in sys.argv[2:]])
    try:
        serve(sys.stdin, answers, server)
    finally:
        server.close()


if __name__ == "__main__":
    main()
