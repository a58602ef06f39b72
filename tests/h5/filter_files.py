"""Chunks as h5py and hdf5plugin store them, for the tests of filters."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import h5py
import hdf5plugin  # noqa: F401  # registers its filters
import numpy as np

from hpctrain.h5.filters import Filter, FilterPipeline


@dataclass(frozen=True)
class StoredChunk:
    """One chunk of a file, and what libhdf5 reads from it (values beyond the edges of the dataset are not in it)."""

    filters: tuple[Filter, ...]
    mask: int
    stored: bytes
    shape: tuple[int, ...]
    values: np.ndarray

    def decode(self) -> np.ndarray:
        """The same values, decoded here."""
        out = np.empty(self.shape, self.values.dtype)
        FilterPipeline(self.filters).decode(self.stored, self.mask, out)
        return out[tuple(slice(0, extent) for extent in self.values.shape)]


def chunks_of(values: np.ndarray, chunks: tuple[int, ...], **options: Any) -> list[StoredChunk]:
    """Write a dataset with libhdf5 and read it back both ways; `options` are those of `create_dataset`."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file.create_dataset("x", data=values, chunks=chunks, **options)
    with h5py.File(buffer, "r") as file:
        return stored_chunks(file["x"])


def stored_chunks(dataset: h5py.Dataset) -> list[StoredChunk]:
    """All chunks of a dataset."""
    whole = dataset[...]
    found = []
    for number in range(dataset.id.get_num_chunks()):
        corner = dataset.id.get_chunk_info(number).chunk_offset
        mask, stored = dataset.id.read_direct_chunk(corner)
        part = tuple(slice(at, at + extent) for at, extent in zip(corner, dataset.chunks, strict=True))
        found.append(StoredChunk(filters_of(dataset), mask, stored, dataset.chunks, whole[part]))
    return found


def filters_of(dataset: h5py.Dataset) -> tuple[Filter, ...]:
    """The filters of a dataset, in stored order."""
    plist = dataset.id.get_create_plist()
    items = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    return tuple(Filter(item[0], tuple(item[2])) for item in items)


def one_chunk(values: np.ndarray, **options: Any) -> StoredChunk:
    """`values` as a single chunk."""
    (chunk,) = chunks_of(values, values.shape, **options)
    return chunk


def bits(values: np.ndarray) -> bytes:
    """The bytes of an array: NaNs compare, and so do signs of zero."""
    return np.ascontiguousarray(values).tobytes()


def smooth(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Values that compress, of any numeric type."""
    steps = np.random.default_rng(seed).integers(0, 5, int(np.prod(shape)))
    return (np.cumsum(steps) % 120).astype(dtype).reshape(shape)


def noise(num_bytes: int, seed: int = 0) -> np.ndarray:
    """Bytes that do not compress."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
