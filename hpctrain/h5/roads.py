"""Which road a dataset is read by, and the index that the parallel one needs.

The parallel road reads stored bytes by pread and decodes them outside libhdf5, in threads. It is taken where every
byte is understood: layout, type and filters. Everything else goes by libhdf5 (`hpctrain.h5.library`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt
from h5py import h5d, h5z

from hpctrain.errors import DataError
from hpctrain.h5.chunk_table import raw_partial_edges, read_chunk_table
from hpctrain.h5.elsewhere import FileKeys, check_sources
from hpctrain.h5.filetype import why_inexact, without_metadata
from hpctrain.h5.filters import Filter, FilterPipeline, filter_name, why_not
from hpctrain.h5.index import RECOPY, ChunkIndex, check_extent, grid_of, open_file_key

PIECE_BYTES: Final = 1 << 20  # of a contiguous dataset, where the caller does not say how many rows
_ALL_SKIPPED: Final = 0xFFFFFFFF
_KEYS: Final = {"max_bytes": "data.max_gib", "max_chunk_bytes": "data.max_chunk_mib"}


@dataclass(frozen=True)
class Bounds:
    """What a file may ask for before it is refused; a user who trusts the file raises them."""

    max_bytes: int = 4 << 40
    """Raw bytes of a dataset (its shape times the size of an element): more is not opened."""
    max_read_bytes: int = 8 << 30
    """Raw bytes that one read may return."""
    max_chunk_bytes: int = 1 << 30
    """Raw bytes of one chunk: every thread that decodes holds one."""
    max_chunks: int = 1 << 26
    """Chunks of one dataset: the index takes 20 bytes for each."""

    def check(self, what: str, found: int, argument: str) -> None:
        """Raise `DataError` when `found` is more than the bound of that name allows."""
        bound = getattr(self, argument)
        if found > bound:
            key = f" ({_KEYS[argument]} in a run description)" if argument in _KEYS else ""
            raise DataError(
                f"{what} {found}, but {argument} = {bound}{key}; raise it if the file is to be trusted"
            )


def why_not_parallel(node: h5py.Dataset, filters: tuple[Filter, ...]) -> str:
    """Why the parallel road cannot be taken, in words; "" when it can."""
    plist = node.id.get_create_plist()
    layout = plist.get_layout()
    if node.shape is None:
        return "the dataset has no values (null dataspace)"
    if node.shape == ():
        return "a single value without rows"
    if layout == h5d.COMPACT:
        return "compact layout: the values lie inside the object header"
    if layout == h5d.VIRTUAL:
        return "virtual dataset: the values lie in other datasets"
    if plist.get_external_count():
        return "external storage: the values lie in other files"
    if layout not in (h5d.CONTIGUOUS, h5d.CHUNKED):
        return f"layout {layout} is not known here"
    return why_inexact(node.id.get_type(), node.dtype) or why_not(filters) or _why_not_edges(node, filters)


def _why_not_edges(node: h5py.Dataset, filters: tuple[Filter, ...]) -> str:
    if not (node.chunks and filters and np.any(np.mod(node.shape, node.chunks))):
        return ""
    if raw_partial_edges(node) is not None:
        return ""
    return "this libhdf5 cannot be asked whether the chunks at the edges are stored without their filters"


def check_library(node: h5py.Dataset, where: str, filters: tuple[Filter, ...]) -> FileKeys:
    """The other files that libhdf5 will take values from.

    Raises `DataError` for what libhdf5 cannot read, or would read as something else in silence.
    """
    sources = check_sources(node)
    for item in missing_in_library(filters):
        reason = why_not((item,)) or f"filter {item.id} ({filter_name(item.id)}) is needed"
        raise DataError(f"{where}: {reason}; libhdf5 does not have it here")
    return sources


def missing_in_library(filters: tuple[Filter, ...]) -> tuple[Filter, ...]:
    """The filters that libhdf5 does not have, not even with those of hdf5plugin."""
    if not all(h5z.filter_avail(item.id) for item in filters):
        import hdf5plugin  # noqa: F401  # its import registers the filters with libhdf5
    return tuple(item for item in filters if not h5z.filter_avail(item.id))


def unfolded(node: h5py.Dataset) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and element type as h5py reads them: the axes of an array type come last."""
    try:
        dtype = node.dtype
    except TypeError as error:
        raise DataError(
            f"{node.file.filename}: dataset {node.name!r}: its HDF5 type cannot be read: {error}; "
            "convert it with the program that wrote it"
        ) from error
    base = dtype.base if dtype.hasobject else without_metadata(dtype.base)
    return (*(node.shape if node.shape is not None else (0,)), *dtype.shape), base


def index_node(
    node: h5py.Dataset, path: Path, filters: tuple[Filter, ...], bounds: Bounds, rows_per_chunk: int | None
) -> ChunkIndex:
    """The index of a dataset that goes the parallel road.

    Raises `DataError` for what is over a bound, lies outside the file, or was never written and has no fill value.
    """
    if node.chunks is not None:
        index = _index_chunked(node, path, filters, bounds)
    else:
        index = _index_contiguous(node, path, rows_per_chunk)
        _check_chunk(node, path, "bytes", math.prod(index.chunk_shape) * index.dtype.itemsize, bounds)
    check_extent(index, path.stat().st_size)
    return index


def _check_chunk(node: h5py.Dataset, path: Path, what: str, chunk_bytes: int, bounds: Bounds) -> None:
    bounds.check(
        f"{path}: dataset {node.name!r}: the {what} of one chunk are", chunk_bytes, "max_chunk_bytes"
    )


def _index_chunked(node: h5py.Dataset, path: Path, filters: tuple[Filter, ...], bounds: Bounds) -> ChunkIndex:
    shape, dtype = unfolded(node)
    grid = grid_of(node.shape, node.chunks)
    bounds.check(f"{path}: dataset {node.name!r}: its chunks are", math.prod(grid), "max_chunks")
    chunk_shape = (*node.chunks, *node.dtype.shape)
    _check_chunk(node, path, "bytes", math.prod(chunk_shape) * dtype.itemsize, bounds)
    file_key = open_file_key(node)
    offsets, sizes, masks = read_chunk_table(node, grid)
    _check_chunk(node, path, "stored bytes", int(sizes.max(initial=0)), bounds)
    holes = np.flatnonzero(offsets < 0)
    missing = np.unravel_index(holes[0], grid) if len(holes) else None
    raw_edges = bool(filters) and bool(raw_partial_edges(node))
    if raw_edges:
        masks[_partial_chunks(node, grid)] = _ALL_SKIPPED
    return ChunkIndex(
        path=path,
        dataset=node.name,
        shape=shape,
        dtype=dtype,
        chunk_shape=chunk_shape,
        pipeline=FilterPipeline(filters),
        offsets=offsets,
        sizes=sizes,
        masks=masks,
        fill=_fill(
            node, path, None if missing is None else tuple(np.multiply(missing, node.chunks).tolist())
        ),
        raw_edges=raw_edges,
        file_key=file_key,
    )


def _partial_chunks(node: h5py.Dataset, grid: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Which chunks reach over an edge of the dataset, shape (num_chunks,)."""
    partial = np.zeros(grid, np.bool_)
    for axis, (extent, step) in enumerate(zip(node.shape, node.chunks, strict=True)):
        if extent % step:
            partial[(slice(None),) * axis + (-1,)] = True
    return partial.reshape(-1)


def _index_contiguous(node: h5py.Dataset, path: Path, rows_per_chunk: int | None) -> ChunkIndex:
    shape, dtype = unfolded(node)
    stored, needed = node.id.get_storage_size(), math.prod(shape) * dtype.itemsize
    # Not asked of the address alone: that of a dataset never written is not None in a file with a user block.
    offset = node.id.get_offset() if stored else None
    if offset is not None and stored < needed:
        raise DataError(
            f"{path}: dataset {node.name!r}: {needed} bytes of values in {stored} bytes of storage; {RECOPY}"
        )
    whole = ChunkIndex(
        path=path,
        dataset=node.name,
        shape=shape,
        dtype=dtype,
        chunk_shape=shape,
        pipeline=FilterPipeline(),
        offsets=np.array([-1 if offset is None else offset], np.int64),
        sizes=np.array([needed], np.int64),
        masks=np.zeros(1, np.uint32),
        fill=_fill(node, path, (0,) * len(node.shape))
        if offset is None and needed
        else bytes(dtype.itemsize),
        contiguous=True,
        file_key=open_file_key(node),
    )
    return in_pieces(whole, rows_per_chunk)


def in_pieces(index: ChunkIndex, rows_per_chunk: int | None = None) -> ChunkIndex:
    """A contiguous dataset in virtual chunks of so many rows (by default about 1 MiB of them)."""
    num_rows, row_bytes = index.shape[0], math.prod(index.shape[1:]) * index.dtype.itemsize
    rows = rows_per_chunk or max(PIECE_BYTES // max(row_bytes, 1), 1)
    rows = max(min(rows, num_rows), 1)
    starts = np.arange(0, num_rows if row_bytes else 0, rows, dtype=np.int64)
    missing = index.num_chunks == 0 or index.offsets[0] < 0
    return replace(
        index,
        chunk_shape=(rows, *(max(extent, 1) for extent in index.shape[1:])),
        offsets=np.full(len(starts), -1, np.int64) if missing else index.offsets[0] + starts * row_bytes,
        sizes=np.zeros(len(starts), np.int64) if missing else np.minimum(rows, num_rows - starts) * row_bytes,
        masks=np.zeros(len(starts), np.uint32),
    )


def _fill(node: h5py.Dataset, path: Path, missing: tuple[int, ...] | None) -> bytes:
    """One element as in the file, what chunks never written are full of; `missing` is a place in such a chunk."""
    if missing is None:
        return b""
    plist = node.id.get_create_plist()
    if plist.fill_value_defined() == h5d.FILL_VALUE_UNDEFINED or plist.get_fill_time() == h5d.FILL_TIME_NEVER:
        raise DataError(
            f"{path}: dataset {node.name!r}: some values were never written, and the file does not say what they are "
            "then (no fill value); write them all, or copy it into a dataset that has one"
        )
    # Asked of libhdf5 by reading: its call for the fill value does not know every type.
    return np.asarray(node[tuple(slice(at, at + 1) for at in missing)]).tobytes()
