"""Comparing what the parallel road reads with what libhdf5 reads: sampled chunks, bit for bit."""

from __future__ import annotations

import math
from typing import Final

import h5py
import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError
from hpctrain.h5.chunks import ChunkSource
from hpctrain.h5.filetype import StringEnds, end_strings
from hpctrain.h5.index import H5PY_ERRORS, ChunkIndex

_MAX_HOLE_BYTES: Final = 64 << 20


def sampled_chunks(index: ChunkIndex, count: int) -> list[int]:
    """Up to `count` chunks, evenly spaced over those that were written, and the first that was not; always the same.

    The first and the last are among them, so that a partial chunk at an edge is, where there is one. A large chunk
    that was not written is left out: it would take its memory for nothing.
    """
    hole_bytes = math.prod(index.chunk_shape) * index.dtype.itemsize
    written = np.flatnonzero(index.offsets >= 0)
    places = np.unique(
        np.linspace(0, max(len(written) - 1, 0), min(count, len(written))).round().astype(np.int64)
    )
    missing = np.flatnonzero(index.offsets < 0)[: min(count, hole_bytes <= _MAX_HOLE_BYTES)]
    return sorted({*written[places].tolist(), *missing.tolist()})


def compare(node: h5py.Dataset, index: ChunkIndex, ends: StringEnds, source: ChunkSource, count: int) -> int:
    """Compare `count` sampled chunks; returns how many were.

    Raises `DataError`, with both values, where the roads differ; where one of them cannot read the chunk; and what
    `source` raises.
    """
    chunks = sampled_chunks(index, count)
    for chunk in chunks:
        ours = np.empty(index.chunk_shape, index.dtype)
        index.decode_into(chunk, source.read(index, chunk), ours)
        end_strings(ours, ends)
        region = index.region(chunk)
        mine = ours[tuple(slice(0, part.stop - part.start) for part in region)]
        _compare_values(index, chunk, mine, _library_values(node, index, chunk, region[: len(node.shape)]))
    return len(chunks)


def _library_values(
    node: h5py.Dataset, index: ChunkIndex, chunk: int, region: tuple[slice, ...]
) -> npt.NDArray[np.void]:
    try:
        return np.asarray(node[region], index.dtype)
    except H5PY_ERRORS as error:
        raise DataError(
            f"{index.describe(chunk)}: libhdf5 {h5py.version.hdf5_version} cannot read it ({error}), hpctrain can; "
            "verify_chunks = 0 takes it without the comparison"
        ) from error


def _compare_values(
    index: ChunkIndex, chunk: int, ours: npt.NDArray[np.void], theirs: npt.NDArray[np.void]
) -> None:
    mine, other = _element_bytes(ours), _element_bytes(theirs)
    if mine.shape == other.shape and np.array_equal(mine, other):
        return
    where = 0 if mine.shape != other.shape else int(np.argmax(np.any(mine != other, axis=1)))
    place = tuple(int(i) for i in np.unravel_index(where, ours.shape))
    raise DataError(
        f"{index.describe(chunk)}: element {place} of the chunk is {ours[place]!r} as hpctrain reads it (filters "
        f"{[item.id for item in index.pipeline.filters]}) and {theirs[place]!r} as libhdf5 "
        f"{h5py.version.hdf5_version} does; please report it, and read the file with h5py and pack it until then"
    )


def _element_bytes(values: npt.NDArray[np.void]) -> npt.NDArray[np.uint8]:
    """The bytes of the elements, shape (elements, bytes), without the padding between members of compounds."""
    packed = values.astype(_packed(values.dtype), order="C")
    return packed.reshape(-1).view(np.uint8).reshape(packed.size, packed.dtype.itemsize)


def _packed(dtype: np.dtype[np.void]) -> np.dtype[np.void]:
    if dtype.subdtype:
        return np.dtype((_packed(dtype.base), dtype.shape))
    if dtype.names is None or dtype.fields is None:
        return dtype
    return np.dtype([(name, _packed(dtype.fields[name][0])) for name in dtype.names])
