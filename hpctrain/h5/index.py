"""Where the chunks of an HDF5 dataset lie in its file: read once, then no libhdf5 is needed to read data."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import xxhash

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.filters import Buffer, Filter, FilterPipeline

DIGESTS_GROUP = "_digests"
"""Group of a shard that holds, per dataset, the xxh3_64 of every stored chunk."""


@dataclass(frozen=True)
class ChunkIndex:
    """The chunks of one dataset in one file, in row-major order of the chunk grid.

    `path` is absolute; `offsets` (bytes from the start of the file), `sizes` (stored bytes), `masks` (filter
    masks) and `digests` (xxh3_64 of the stored bytes) have shape (num_chunks,). `dtype` is as in the file,
    byte order included.
    """

    path: Path
    dataset: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_shape: tuple[int, ...]
    pipeline: FilterPipeline
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    masks: npt.NDArray[np.uint32]
    digests: npt.NDArray[np.uint64]

    @property
    def num_chunks(self) -> int:
        """Chunks in the grid, the partial ones at the edges included."""
        return len(self.offsets)

    def decode(self, chunk: int, stored: Buffer) -> npt.NDArray[Any]:
        """Decode the stored bytes of a chunk to its full, padded shape, in native byte order.

        Raises `DataError` with file, dataset and chunk when the bytes do not decode.
        """
        out = np.empty(self.chunk_shape, self.dtype)
        try:
            self.pipeline.decode(stored, int(self.masks[chunk]), out)
        except DataError as error:
            raise DataError(f"{self.describe(chunk)}: {error}; {REPACK}") from error
        return out if self.dtype.isnative else out.astype(self.dtype.newbyteorder("="))

    def describe(self, chunk: int) -> str:
        """File, dataset, chunk and place in the file, for messages."""
        return (
            f"{self.path}: dataset {self.dataset!r}, chunk {chunk} of {self.num_chunks} "
            f"(byte {self.offsets[chunk]}, {self.sizes[chunk]} bytes stored)"
        )


REPACK = "copy the file anew from a good copy of the packed set, or pack the source again"


def digest_of(stored: Buffer) -> int:
    """xxh3_64 of stored bytes: the digest kept beside the data."""
    return xxhash.xxh3_64_intdigest(stored)


def read_index(path: Path, dataset: str, digests: npt.NDArray[np.uint64] | None = None) -> ChunkIndex:
    """Index one dataset of an HDF5 file.

    Without `digests`, those of the packed set are read (`/_digests/DATASET`). Raises `DataError` for a file
    that is not HDF5 or is truncated, for a dataset that is absent, not chunked or not wholly written, and for
    filters not decoded here; `StorageError` when the file cannot be read.
    """
    with open_h5(path) as file:
        return index_dataset(file, path, dataset, digests)


def open_h5(path: Path) -> h5py.File:
    """Open for reading without a lock (many shared filesystems have none); errors as for `read_index`."""
    try:
        os.stat(path)
        return h5py.File(path, "r", locking=False)
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file; {REPACK}") from error
    except OSError as error:
        if error.errno:
            raise StorageError(f"{path}: cannot be opened: {os.strerror(error.errno)}") from error
        raise DataError(f"{path}: not a whole HDF5 file: {error}; {REPACK}") from error


def index_dataset(
    file: h5py.File, path: Path, dataset: str, digests: npt.NDArray[np.uint64] | None = None
) -> ChunkIndex:
    """`read_index` for a file that is open already; `path` is where it lies."""
    try:
        return _index_dataset(file, path.absolute(), dataset, digests)
    except DataError:
        raise
    # What h5py raises for metadata that libhdf5 cannot make sense of.
    except (LookupError, OSError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{path}: dataset {dataset!r} cannot be indexed: {error}; {REPACK}") from error


def _index_dataset(
    file: h5py.File, path: Path, dataset: str, digests: npt.NDArray[np.uint64] | None
) -> ChunkIndex:
    node = file[dataset]
    file_bytes = path.stat().st_size
    if not isinstance(node, h5py.Dataset) or node.chunks is None:
        raise DataError(f"{path}: {dataset!r} is not a chunked dataset; pack the file with `hpctrain pack`")
    if digests is None:
        digests = np.asarray(file[f"{DIGESTS_GROUP}/{dataset}"][...], np.uint64)
    offsets, sizes, masks = _chunk_table(node, path, file_bytes)
    pipeline = _pipeline_of(node, path)
    index = ChunkIndex(
        path, dataset, node.shape, node.dtype, node.chunks, pipeline, offsets, sizes, masks, digests
    )
    _check_index(index, os.stat(path).st_size)
    return index


def _pipeline_of(node: h5py.Dataset, path: Path) -> FilterPipeline:
    plist = node.id.get_create_plist()
    found = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    try:
        return FilterPipeline(tuple(Filter(int(item[0]), tuple(int(v) for v in item[2])) for item in found))
    except DataError as error:
        raise DataError(f"{path}: dataset {node.name!r}: {error}") from error


def _chunk_table(
    node: h5py.Dataset, path: Path, file_bytes: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """Offsets (-1: never written), sizes and masks of all chunks of the grid."""
    grid = [-(-extent // chunk) for extent, chunk in zip(node.shape, node.chunks, strict=True)]
    if math.prod(grid) > file_bytes:  # a damaged shape; each chunk takes a byte at least
        raise DataError(
            f"{path}: dataset {node.name!r} has {math.prod(grid)} chunks in {file_bytes} bytes; {REPACK}"
        )
    offsets = np.full(math.prod(grid), -1, np.int64)
    sizes = np.zeros(len(offsets), np.int64)
    masks = np.zeros(len(offsets), np.uint32)

    def take(info: Any) -> None:
        number = 0
        for start, chunk, extent in zip(info.chunk_offset, node.chunks, grid, strict=True):
            number = number * extent + start // chunk
        offsets[number], sizes[number], masks[number] = info.byte_offset, info.size, info.filter_mask

    if len(offsets):
        node.id.chunk_iter(take)
    return offsets, sizes, masks


def _check_index(index: ChunkIndex, file_bytes: int) -> None:
    """Refuse an index that points outside the file, or that has holes."""
    if len(index.digests) != index.num_chunks:
        raise DataError(
            f"{index.path}: dataset {index.dataset!r} has {index.num_chunks} chunks but "
            f"{len(index.digests)} digests; {REPACK}"
        )
    missing = np.flatnonzero(index.offsets < 0)
    if len(missing):
        raise DataError(
            f"{index.path}: dataset {index.dataset!r}: chunk {missing[0]} of {index.num_chunks} "
            f"was never written; {REPACK}"
        )
    beyond = np.flatnonzero((index.offsets > file_bytes) | (index.sizes > file_bytes - index.offsets))
    if len(beyond):
        raise DataError(
            f"{index.describe(int(beyond[0]))} reaches past the end of the file ({file_bytes} bytes): "
            f"it is truncated; {REPACK}"
        )
