"""Any dataset of any HDF5 file: opened, checked, and read by the road that is right for it.

`open_dataset` decides the road with the reason in words, builds the chunk index of the parallel one and compares
sampled chunks with what libhdf5 reads. A damaged file can crash libhdf5, and with it this process: files that nobody
vouches for are looked at in a child process first (`hpctrain.h5.survey`), which is assumed to have been done here.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import h5py
import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError
from hpctrain.h5.chunks import ChunkSource, FileSource
from hpctrain.h5.compare import compare
from hpctrain.h5.filetype import StringEnds, end_strings, string_ends
from hpctrain.h5.index import (
    H5PY_ERRORS,
    RECOPY,
    ChunkIndex,
    filters_of,
    name_bytes,
    open_file_key,
    open_h5,
)
from hpctrain.h5.library import SHARED, native, refuse_changed
from hpctrain.h5.reader import RowReader
from hpctrain.h5.roads import (
    Bounds,
    check_library,
    index_node,
    missing_in_library,
    unfolded,
    why_not_parallel,
)

DEFAULT_BOUNDS: Final = Bounds()


@dataclass(frozen=True)
class Dataset:
    """A dataset of a file, ready to be read; picklable.

    `path` is absolute, and of the file that holds the dataset (an external link may lead to another). `shape` and
    `dtype` (byte order as in the file) are those h5py reads: the axes of an array type come last, a scalar has shape
    (), a null dataspace (0,). `reason` says why the road is not "parallel", and is "" when it is. `compared` is how
    many chunks were compared with libhdf5 at opening; 0 on the libhdf5 road, or where libhdf5 lacks a filter.
    `sources` are the other files that a virtual or external dataset has its values in.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    road: Literal["parallel", "libhdf5"]
    reason: str
    index: ChunkIndex | None
    file_key: tuple[int, int, int]
    string_ends: StringEnds = ()
    compared: int = 0
    bounds: Bounds = DEFAULT_BOUNDS
    sources: tuple[tuple[Path, tuple[int, int, int]], ...] = ()

    @property
    def num_rows(self) -> int:
        """Extent of axis 0; a scalar has one row."""
        return self.shape[0] if self.shape else 1

    def read_rows(self, start: int, stop: int, source: ChunkSource | None = None) -> npt.NDArray[Any]:
        """Rows [start, stop) in native byte order, shape (stop - start, *shape[1:]); the one row of a scalar: ().

        On the parallel road the stored bytes come from `source` (by default the file itself). Raises IndexError
        for rows that are not there; `DataError` for more than `bounds.max_read_bytes`, for data that do not decode,
        and for a file that was changed since it was opened; `StorageError` when reading fails.
        """
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"rows {start} to {stop} of {self.num_rows}")
        needed = (stop - start) * math.prod(self.shape[1:]) * self.dtype.itemsize
        what = f"{self.path}: dataset {self.name!r}: the bytes to be read are"
        self.bounds.check(what, needed, "max_read_bytes")
        if self.index is None:
            for source_path, key in self.sources:  # libhdf5 gives the fill value for what is gone
                refuse_changed(source_path, key)
            values = SHARED.read(self.path, self.name, self.file_key, start, stop)
            return values if self.dtype.hasobject else values.astype(self.dtype.newbyteorder("="), copy=False)
        if source is None:
            with FileSource() as own:
                return self._read_parallel(self.index, start, stop, own)
        return self._read_parallel(self.index, start, stop, source)

    def _read_parallel(
        self, index: ChunkIndex, start: int, stop: int, source: ChunkSource
    ) -> npt.NDArray[Any]:
        # Members of a compound may differ in byte order: their bytes are read, then converted by NumPy.
        raw = dataclasses.replace(index, dtype=np.dtype((np.void, index.dtype.itemsize)))
        out = np.empty((stop - start, *index.shape[1:]), raw.dtype)
        if out.size:
            RowReader(source).read(raw, start, out)
        values = out.view(index.dtype)
        end_strings(values, self.string_ends)
        return native(values)


def open_dataset(
    path: Path,
    name: str,
    *,
    verify_chunks: int = 4,
    max_bytes: int = DEFAULT_BOUNDS.max_bytes,
    max_read_bytes: int = DEFAULT_BOUNDS.max_read_bytes,
    max_chunk_bytes: int = DEFAULT_BOUNDS.max_chunk_bytes,
    max_chunks: int = DEFAULT_BOUNDS.max_chunks,
    rows_per_chunk: int | None = None,
) -> Dataset:
    """Open one dataset of an HDF5 file and decide how it is read.

    `verify_chunks` sampled chunks are compared bit for bit with what libhdf5 reads (0: none); the bounds are those
    of `Bounds`; a contiguous dataset is cut into virtual chunks of `rows_per_chunk` rows (None: of about 1 MiB).
    Raises `DataError`, naming file, object and cause, for what cannot be read, is damaged or is over a bound;
    `StorageError` when the file cannot be opened or read.
    """
    path = Path(path)
    bounds = Bounds(max_bytes, max_read_bytes, max_chunk_bytes, max_chunks)
    with open_h5(path, RECOPY) as file:
        try:
            node = _find(file, path, name)
            return _open_node(node, _home(node, path), bounds, verify_chunks, rows_per_chunk)
        except DataError:
            raise
        except H5PY_ERRORS as error:
            raise DataError(f"{path}: dataset {name!r} cannot be opened: {error}; {RECOPY}") from error


def _open_node(
    node: h5py.Dataset, path: Path, bounds: Bounds, verify_chunks: int, rows_per_chunk: int | None
) -> Dataset:
    where = f"{path}: dataset {node.name!r}"
    file_key = open_file_key(node)  # before anything is read: what changes from now on is found by it
    filters = filters_of(node)
    shape, dtype = unfolded(node)
    bounds.check(f"{where}: the bytes of its values are", math.prod(shape) * dtype.itemsize, "max_bytes")
    reason = why_not_parallel(node, filters)
    if reason:
        chunk_bytes = math.prod(node.chunks or (1,)) * node.id.get_type().get_size()
        bounds.check(f"{where}: the bytes of one chunk are", chunk_bytes, "max_chunk_bytes")
        sources = tuple(check_library(node, where, filters).items())
        return Dataset(
            path, node.name, shape, dtype, "libhdf5", reason, None, file_key, bounds=bounds, sources=sources
        )
    ends = string_ends(node.id.get_type(), node.dtype)
    index = index_node(node, path, filters, bounds, rows_per_chunk)
    compared = 0
    if verify_chunks and not missing_in_library(filters):
        with FileSource() as source:
            compared = compare(node, index, ends, source, verify_chunks)
    return Dataset(path, node.name, shape, dtype, "parallel", "", index, file_key, ends, compared, bounds)


def _find(file: h5py.File, path: Path, name: str) -> h5py.Dataset:
    try:
        node = file[name_bytes(name)]
    except H5PY_ERRORS as error:
        raise DataError(f"{path}: {name!r} cannot be opened: {_dangling(file, name) or error}") from error
    if not isinstance(node, h5py.Dataset):
        raise DataError(
            f"{path}: {name!r} is not a dataset; `hpctrain inspect {path}` lists those of the file"
        )
    return node


def _dangling(file: h5py.File, name: str) -> str:
    """Where a path passes through an external link, what that link says; "" where there is none."""
    parts = name.strip("/").split("/")
    for i in range(1, len(parts) + 1):
        try:
            link = file.get("/".join(parts[:i]), getlink=True)
        except H5PY_ERRORS:
            return ""
        if isinstance(link, h5py.ExternalLink):
            return (
                f"it is a link to {link.path!r} in {link.filename!r}, which is not there or cannot be opened; "
                "put that file beside this one"
            )
    return ""


def _home(node: h5py.Dataset, path: Path) -> Path:
    """The file that holds the dataset."""
    found = Path(node.file.filename)
    return (path if found == path else found).absolute()
