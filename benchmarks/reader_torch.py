"""Peers behind a torch `DataLoader`, with as many workers as are best for them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from benchmarks.reader_base import Batches, Side
from benchmarks.reader_data import DataSet, random_order


class RandomOrder(Sampler[int]):
    """The first samples of `random_order` of an epoch."""

    def __init__(self, num_samples: int, count: int) -> None:
        self._num_samples, self._count = num_samples, count
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        """The ids."""
        return iter(random_order(self._num_samples, self.epoch)[: self._count].tolist())

    def __len__(self) -> int:
        """How many."""
        return self._count


class LoaderSide(Side):
    """Reads by a `DataLoader`, whose workers live on from epoch to epoch."""

    def __init__(self, data: DataSet) -> None:
        super().__init__(data)
        torch.set_num_threads(1)
        self._loader: Any = None

    def options(self) -> list[str]:
        """Worker counts."""
        return [f"{workers} workers" for workers in self.data.workers]

    def use(self, option: str, samples: int) -> None:
        """Begin with new workers."""
        self.close()
        super().use(option, samples)
        workers = int(option.split()[0])
        self._loader = self.make_loader(
            {
                "num_workers": workers,
                "persistent_workers": workers > 0,
                "multiprocessing_context": "fork" if workers else None,
            }
        )

    @abstractmethod
    def make_loader(self, workers: dict[str, Any]) -> Any:
        """A loader of batches (ids, values), with these arguments of `DataLoader`."""

    def begin(self, epoch: int) -> None:
        """Called before an epoch."""

    def batches(self, epoch: int, epochs: int) -> Batches:
        """What the loader gives."""
        for number in range(epoch, epoch + epochs):
            self.begin(number)
            yield from self._loader

    def close(self) -> None:
        """End the workers."""
        self._loader = None


class MapSide(LoaderSide):
    """A map-style dataset in random order."""

    bounded = True

    @abstractmethod
    def dataset(self) -> Any:
        """A dataset that no process has opened yet."""

    @property
    def collate(self) -> Any:
        """How batches are made of samples; None: as torch does."""
        return None

    def make_loader(self, workers: dict[str, Any]) -> Any:
        """With a sampler of our own, to know which samples come in part of an epoch."""
        self._order = RandomOrder(self.data.num_samples, self.samples)
        return DataLoader(
            self.dataset(), self.data.batch, sampler=self._order, collate_fn=self.collate, **workers
        )

    def begin(self, epoch: int) -> None:
        """Another order."""
        self._order.epoch = epoch


def files_below(folder: Path) -> list[Path]:
    """All files of a folder, at any depth."""
    return [path for path in folder.rglob("*") if path.is_file()]
