"""hpctrain: shuffled epochs into torch batches, from packed sets and from users' files; whole reads of a file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.harness import Values
from benchmarks.reader_base import Batches, Side, Stopwatch
from benchmarks.reader_data import CODECS, Array, DataSet
from hpctrain.data.loader import Loader
from hpctrain.data.plan import Plan
from hpctrain.h5.dataset import open_dataset
from hpctrain.h5.packed import PackedSet, open_packed
from hpctrain.h5.reader import FileSource, RowReader
from hpctrain.h5.userset import open_files
from hpctrain.training.batches import to_torch

PREFETCH_STEPS: Final = 0  # the default
_RAMP_STEPS: Final = 128
_ENDLESS: Final = 10**6


def sides(data: DataSet) -> dict[str, Callable[[], Side]]:
    """Every packed set, one also anew each epoch; the user's files, where the set has any, as epochs and whole."""
    found: dict[str, Callable[[], Side]] = {
        f"hpctrain {codec}, {data.name}": partial(_packed, data, codec) for codec in CODECS
    }
    found[f"hpctrain {CODECS[0]} anew, {data.name}"] = partial(_anew, data)
    for shuffle, kind in ((False, "gzip"), (True, "gzip with shuffle")):
        if data.user_file(shuffle).exists():
            found[f"hpctrain {kind}, {data.name}"] = partial(_of_user, data, shuffle)
    if data.user_file(shuffle=True).exists():
        found[f"hpctrain whole, {data.name}"] = partial(WholeSide, data)
    return found


def _packed(data: DataSet, codec: str) -> EpochSide:
    return EpochSide(data, open_packed(data.packed(codec)))


def _anew(data: DataSet) -> AnewSide:
    return AnewSide(data, open_packed(data.packed(CODECS[0])))


def _of_user(data: DataSet, shuffle: bool) -> EpochSide:
    return EpochSide(data, open_files([data.user_file(shuffle)], {data.name: data.name}))


class EpochSide(Side):
    """Shuffled epochs through the loader, one lane, decoding on all cores."""

    def __init__(self, data: DataSet, packed: PackedSet) -> None:
        super().__init__(data)
        torch.set_num_threads(1)
        self._packed = packed
        self._source = FileSource()
        self._run: Generator[tuple[Any, Any]] | None = None
        window_chunks = max(1, data.window_samples // packed.chunk_samples)
        self._plan = Plan(packed.chunk_sizes, 1, data.batch, seed=1, window_chunks=window_chunks)

    def files(self) -> list[Path]:
        """The shards."""
        return [shard.path for shard in self._packed.shards]

    def batches(self, epoch: int, epochs: int) -> Batches:
        """Tensors, as a task gets them, of a loader that begins with nothing in memory."""
        with FileSource() as source, self._loader(source) as loader:
            yield from self._tensors(loader, epoch, epoch + epochs)

    def read(self, epoch: int, epochs: int) -> Values:
        """As many batches as the epochs have, in the middle of a run that is one epoch old or more.

        What was made ahead before the clock began is then as much as what is made ahead when it ends.
        """
        if self._run is None:
            self._run = self._tensors(self._loader(self._source), 0, _ENDLESS)
            self._take(self._plan.steps_per_epoch)
        self._take(_RAMP_STEPS)
        watch = Stopwatch()
        return watch.values(self._take(epochs * self._plan.steps_per_epoch))

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.close()
        self._source.close()

    def _take(self, count: int) -> int:
        """Bytes of the next batches of the run."""
        assert self._run is not None
        return sum(values.nbytes for _, values in itertools.islice(self._run, count))

    def _loader(self, source: FileSource) -> Loader:
        cores = len(os.sched_getaffinity(0))
        return Loader(self._packed, source, self._plan, range(1), cores, PREFETCH_STEPS)

    def _tensors(self, loader: Loader, epoch: int, epochs: int) -> Generator[tuple[Any, Any]]:
        device = torch.device("cpu")
        with loader:
            for step in loader.steps(epoch, 0, epochs):
                for lane in step.lanes:
                    batch = to_torch(lane.samples, lane.fields, device)
                    yield batch["id"], batch[self.data.name]


class AnewSide(EpochSide):
    """Each epoch by a loader of its own, which begins with nothing in memory: all chunks are read and decoded again."""

    def read(self, epoch: int, epochs: int) -> Values:
        """Whole epochs, from the first thread's start to the last one's end."""
        watch = Stopwatch()
        batches = (self.batches(number, 1) for number in range(epoch, epoch + epochs))
        return watch.values(sum(values.nbytes for _, values in itertools.chain.from_iterable(batches)))


class WholeSide(Side):
    """All rows of the user's gzip + shuffle file in one array, read by as many threads as there are cores."""

    def __init__(self, data: DataSet) -> None:
        super().__init__(data)
        dataset = open_dataset(data.user_file(shuffle=True), data.name)
        if dataset.index is None:
            raise ValueError(f"{dataset.path}: read by libhdf5: {dataset.reason}")
        self._dataset, self._index = dataset, dataset.index
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))

    def files(self) -> list[Path]:
        """The one file."""
        return [self._dataset.path]

    def batches(self, epoch: int, epochs: int) -> Batches:
        """One batch is everything."""
        with FileSource() as source:
            for _ in range(epochs):
                yield np.arange(self.data.num_samples), self._everything(RowReader(source))

    def _everything(self, reader: RowReader) -> Array:
        rows: Array = np.empty(self._dataset.shape, self._dataset.dtype)
        size = self._index.chunk_shape[0]

        def read(first: int) -> None:
            reader.read(self._index, first, rows[first : first + size])

        list(self._pool.map(read, range(0, len(rows), size)))
        return rows

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
