"""hidefix: whole reads of a gzip + shuffle file, by its own threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.reader_base import Batches, Side
from benchmarks.reader_data import DataSet


def sides(data: DataSet) -> dict[str, Callable[[], Side]]:
    """The user's file of fields."""
    if not data.user_file(shuffle=True).exists():
        return {}
    return {f"hidefix, {data.name}": lambda: WholeSide(data)}


class WholeSide(Side):
    """The whole dataset in one array; the index is made once."""

    def __init__(self, data: DataSet) -> None:
        import hidefix

        super().__init__(data)
        self._path = data.user_file(shuffle=True)
        self._rows = hidefix.Index(str(self._path)).dataset(data.name, None)

    def files(self) -> list[Path]:
        """The one file."""
        return [self._path]

    def batches(self, epoch: int, epochs: int) -> Batches:
        """One batch is everything."""
        everything = tuple(slice(0, extent) for extent in (self.data.num_samples, *self.data.sample_shape))
        for _ in range(epochs):
            yield np.arange(self.data.num_samples), self._rows[everything]

    def close(self) -> None:
        """Nothing is left open."""
