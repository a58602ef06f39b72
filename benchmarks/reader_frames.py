"""Samples as single Blosc-LZ4 frames, for peers that keep one value per sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import h5py
import hdf5plugin  # noqa: F401 - importing it is what makes h5py read Blosc
import numpy as np
from numcodecs import blosc

from benchmarks.reader_data import Array, DataSet

CODEC: Final = "blosc-lz4"
_LEVEL: Final = 5
_ROWS: Final = 1024


def rows(data: DataSet, count: int = _ROWS) -> Iterator[Array]:
    """All samples, `count` at a time, through libhdf5 from the packed set."""
    with h5py.File(data.shard(CODEC), "r") as file:
        for start in range(0, data.num_samples, count):
            yield file[data.name][start : start + count]


def frames(data: DataSet) -> Iterator[bytes]:
    """All samples, each encoded."""
    for part in rows(data):
        for row in part:
            yield blosc.compress(row, b"lz4", _LEVEL, blosc.SHUFFLE, 0)


def decoded(data: DataSet, frame: bytes) -> Array:
    """One sample."""
    values = np.empty(data.sample_shape, data.dtype)
    blosc.decompress(frame, values)
    return values
