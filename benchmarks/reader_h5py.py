"""h5py: random samples of a user's gzip file, and the Blosc file behind a torch `DataLoader`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401 - importing it is what makes h5py read Blosc
import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.reader_base import Batches, Side
from benchmarks.reader_data import DataSet, random_order
from benchmarks.reader_torch import MapSide

CODEC = "blosc-lz4"


def sides(data: DataSet) -> dict[str, Callable[[], Side]]:
    """The loaders for both sets; the user's files of fields."""
    found: dict[str, Callable[[], Side]] = {
        f"h5py DataLoader, {data.name}": lambda: SampleSide(data),
        f"h5py DataLoader by batches, {data.name}": lambda: BatchSide(data),
    }
    for shuffle in (False, True):
        if data.user_file(shuffle).exists():
            name = f"h5py random, gzip{' with shuffle' if shuffle else ''}, {data.name}"
            found[name] = lambda shuffle=shuffle: RandomSide(data, shuffle)  # type: ignore[misc]
    return found


class RandomSide(Side):
    """Single samples in random order, in this process."""

    bounded = True

    def __init__(self, data: DataSet, shuffle: bool) -> None:
        super().__init__(data)
        self._path = data.user_file(shuffle)
        self._file = h5py.File(self._path, "r")

    def files(self) -> list[Path]:
        """The one file."""
        return [self._path]

    def batches(self, epoch: int, epochs: int) -> Batches:
        """One sample each."""
        rows = self._file[self.data.name]
        for number in range(epoch, epoch + epochs):
            for sample in random_order(self.data.num_samples, number)[: self.samples].tolist():
                yield np.array([sample]), rows[sample][None]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Samples(Dataset[tuple[int, torch.Tensor]]):
    """As people write it: the file is opened in each worker, a sample is a row."""

    def __init__(self, data: DataSet) -> None:
        self._path, self._name, self._num_samples = data.shard(CODEC), data.name, data.num_samples
        self._rows: Any = None
        self._owner = 0

    def rows(self) -> Any:
        """The dataset, opened once in every process."""
        if self._rows is None or self._owner != os.getpid():
            self._rows, self._owner = h5py.File(self._path, "r")[self._name], os.getpid()
        return self._rows

    def __len__(self) -> int:
        """All samples."""
        return self._num_samples

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        """One sample."""
        return number, torch.from_numpy(self.rows()[number])


class BatchedSamples(Samples):
    """The kinder way: a whole batch in one ascending selection."""

    def __getitems__(self, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch."""
        ids = np.sort(np.asarray(numbers))
        return torch.from_numpy(ids), torch.from_numpy(self.rows()[ids])


class SampleSide(MapSide):
    """`Samples` behind a `DataLoader`."""

    def dataset(self) -> Samples:
        """See there."""
        return Samples(self.data)

    def files(self) -> list[Path]:
        """The shard."""
        return [self.data.shard(CODEC)]


class BatchSide(SampleSide):
    """`BatchedSamples` behind a `DataLoader`."""

    def dataset(self) -> BatchedSamples:
        """See there."""
        return BatchedSamples(self.data)

    @property
    def collate(self) -> Any:
        """The batch is one already."""
        return _as_it_is


def _as_it_is(batch: Any) -> Any:
    return batch
