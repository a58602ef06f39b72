"""Where the chunks of an HDF5 dataset lie in its file: read once, then no libhdf5 is needed to read data."""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt
import xxhash

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.chunk_table import read_chunk_table
from hpctrain.h5.filters import Buffer, Filter, FilterPipeline

DIGESTS_GROUP = "_digests"
"""Group of a shard that holds, per dataset, the xxh3_64 of every stored chunk."""

REPACK: Final = "copy the file anew from a good copy of the packed set, or pack the source again"
RECOPY: Final = "copy the file anew from a good copy"


@dataclass(frozen=True)
class ChunkIndex:
    """The chunks of one dataset in one file, in row-major order of the chunk grid.

    `path` is absolute; `offsets` (bytes from the start of the file; -1: never written), `sizes` (stored bytes), `masks`
    (filter masks) and `digests` (xxh3_64 of the stored bytes; None: none are kept) have shape (num_chunks,). `dtype` is
    as in the file, byte order included.

    `fill` is what chunks never written are full of: one element as in the file, which is several of `dtype` where the
    axes of an array type were put behind those of the dataset. `raw_edges`: the partial chunks at the edges were
    stored without their filters; `masks` says so too (in the file it does not). `contiguous`: the dataset is not
    chunked but one run of bytes; the chunks are pieces of it, the last one short. `file_key` is that of the file when
    it was indexed, None where digests vouch for the bytes.
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
    digests: npt.NDArray[np.uint64] | None = None
    fill: bytes = b""
    raw_edges: bool = False
    contiguous: bool = False
    file_key: tuple[int, int, int] | None = None

    @property
    def num_chunks(self) -> int:
        """Chunks in the grid, the partial ones at the edges included."""
        return len(self.offsets)

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return grid_of(self.shape, self.chunk_shape)

    def region(self, chunk: int) -> tuple[slice, ...]:
        """The part of the dataset that a chunk holds, without its padding."""
        corner = [
            int(i) * step
            for i, step in zip(np.unravel_index(chunk, self.grid), self.chunk_shape, strict=True)
        ]
        return tuple(
            slice(start, min(start + step, extent))
            for start, step, extent in zip(corner, self.chunk_shape, self.shape, strict=True)
        )

    def decode(self, chunk: int, stored: Buffer) -> npt.NDArray[Any]:
        """Decode the stored bytes of a chunk to its full, padded shape, in native byte order.

        Raises `DataError` with file, dataset and chunk when the bytes do not decode.
        """
        out = np.empty(self.chunk_shape, self.dtype)
        self.decode_into(chunk, stored, out)
        return out if self.dtype.isnative else out.astype(self.dtype.newbyteorder("="))

    def decode_into(self, chunk: int, stored: Buffer, out: npt.NDArray[Any]) -> None:
        """Decode into `out`: C-contiguous, of `chunk_shape` and the file's own `dtype`.

        A chunk that was never written (`stored` is empty) becomes the fill value. Errors as for `decode`.
        """
        if self.offsets[chunk] < 0:
            fill = np.frombuffer(self.fill, self.dtype)
            out.reshape(-1, len(fill))[...] = fill
            return
        try:
            if self.contiguous:
                self._copy_piece(chunk, stored, out)
            else:
                self.pipeline.decode(stored, int(self.masks[chunk]), out)
        except DataError as error:
            raise DataError(f"{self.describe(chunk)}: {error}; {self.mend}") from error

    def _copy_piece(self, chunk: int, stored: Buffer, out: npt.NDArray[Any]) -> None:
        if len(stored) != self.sizes[chunk]:
            raise DataError(f"{len(stored)} bytes were read")
        flat = out.reshape(-1).view(np.uint8)
        flat[: len(stored)] = np.frombuffer(stored, np.uint8)
        flat[len(stored) :] = 0

    def describe(self, chunk: int) -> str:
        """File, dataset, chunk and place in the file, for messages."""
        return (
            f"{self.path}: dataset {self.dataset!r}, chunk {chunk} of {self.num_chunks} "
            f"(byte {self.offsets[chunk]}, {self.sizes[chunk]} bytes stored)"
        )

    @property
    def mend(self) -> str:
        """What to do about damage, for messages."""
        return RECOPY if self.digests is None else REPACK


def grid_of(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Chunks along each axis."""
    return tuple(-(-extent // step) for extent, step in zip(shape, chunk_shape, strict=True))


def digest_of(stored: Buffer) -> int:
    """xxh3_64 of stored bytes: the digest kept beside the data."""
    return xxhash.xxh3_64_intdigest(stored)


def file_key_of(path: Path) -> tuple[int, int, int]:
    """Size, time of the last change (ns) and inode: they tell a file that was changed or replaced."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ino


def name_bytes(name: str) -> bytes:
    """The name of an object as it is in the file: it need not be UTF-8, and h5py encodes no surrogates."""
    return name.encode("utf-8", "surrogateescape")


def open_file_key(node: h5py.HLObject) -> tuple[int, int, int]:
    """`file_key_of` the file that an object lies in, as it was opened: its name may lead to another one by now."""
    found = os.fstat(node.file.id.get_vfd_handle())
    return found.st_size, found.st_mtime_ns, found.st_ino


def open_h5(path: Path, mend: str = REPACK) -> h5py.File:
    """Open for reading without a lock (many shared filesystems have none).

    Raises `DataError`, with the mend, for what is no HDF5 file, is truncated or still marked as open for writing;
    `StorageError` when the file cannot be read. A damaged file can crash libhdf5: files that nobody vouches for
    are looked at by a child process first (`hpctrain.h5.survey`).
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise DataError(f"{path}: not a regular file; name an HDF5 file")
        return _open_unlocked(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{path}: there is no such file; {mend}") from error
    except OSError as error:
        if error.errno:
            raise StorageError(f"{path}: cannot be opened: {os.strerror(error.errno)}") from error
        raise DataError(f"{path}: {_why_not_opened(error, mend)}") from error


def _open_unlocked(path: Path) -> h5py.File:
    kinds: list[Any] = [False, None, True, "best-effort"]
    for locking in kinds[:-1]:
        try:
            return h5py.File(path, "r", locking=locking)
        except OSError as error:
            # The program has it open already: all handles of a file in one process must be of one kind.
            if "file locking" not in str(error) or "match" not in str(error):
                raise
    return h5py.File(path, "r", locking=kinds[-1])


def _why_not_opened(error: OSError, mend: str) -> str:
    """What libhdf5 found, in words, with the mend; its own text where there are no better ones."""
    text = str(error)
    if "already open for write" in text or "already open for read/write" in text:
        return (
            "is marked as open for writing: a program writes it still, or died doing so; close that program, or clear "
            "the mark with `h5clear -s FILE` (then check the data: what was not flushed is lost)"
        )
    if "signature not found" in text:
        return "not a whole HDF5 file: it has no HDF5 signature; name an HDF5 file, or copy this one anew"
    if "truncated file" in text:
        return f"not a whole HDF5 file: it is truncated ({text}); {mend}"
    return f"not a whole HDF5 file: {text}; {mend}"


def read_index(path: Path, dataset: str, digests: npt.NDArray[np.uint64] | None = None) -> ChunkIndex:
    """Index one dataset of a packed set.

    Without `digests`, those in the file are read (`/_digests/DATASET`). Raises `DataError` for a file that is not HDF5
    or is truncated, for a dataset that is absent, not chunked or not wholly written, and for filters not
    decoded here; `StorageError` when the file cannot be read.
    """
    with open_h5(path) as file:
        return index_dataset(file, path, dataset, digests)


def index_dataset(
    file: h5py.File, path: Path, dataset: str, digests: npt.NDArray[np.uint64] | None = None
) -> ChunkIndex:
    """`read_index` for a file that is open already; `path` is where it lies."""
    try:
        return _index_dataset(file, path.absolute(), dataset, digests)
    except DataError:
        raise
    except H5PY_ERRORS as error:
        raise DataError(f"{path}: dataset {dataset!r} cannot be indexed: {error}; {REPACK}") from error


H5PY_ERRORS: Final = (LookupError, OSError, RuntimeError, ValueError, TypeError, OverflowError)
"""What h5py raises for metadata that libhdf5 cannot make sense of."""


def _index_dataset(
    file: h5py.File, path: Path, dataset: str, digests: npt.NDArray[np.uint64] | None
) -> ChunkIndex:
    node = file[dataset]
    file_bytes = path.stat().st_size
    if not isinstance(node, h5py.Dataset) or node.chunks is None:
        raise DataError(f"{path}: {dataset!r} is not a chunked dataset; pack the file with `hpctrain pack`")
    if digests is None:
        digests = np.asarray(file[f"{DIGESTS_GROUP}/{dataset}"][...], np.uint64)
    grid = grid_of(node.shape, node.chunks)
    if math.prod(grid) > file_bytes:  # a damaged shape; each chunk takes a byte at least
        raise DataError(
            f"{path}: dataset {node.name!r} has {math.prod(grid)} chunks in {file_bytes} bytes; {REPACK}"
        )
    table = read_chunk_table(node, grid)
    try:
        pipeline = FilterPipeline(filters_of(node))
    except DataError as error:
        raise DataError(f"{path}: dataset {node.name!r}: {error}") from error
    index = ChunkIndex(path, dataset, node.shape, node.dtype, node.chunks, pipeline, *table, digests)
    _check_digests(index, digests)
    check_extent(index, file_bytes)
    return index


def filters_of(node: h5py.Dataset) -> tuple[Filter, ...]:
    """The filters of a dataset in stored order."""
    plist = node.id.get_create_plist()
    found = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    return tuple(Filter(int(item[0]), tuple(int(value) for value in item[2])) for item in found)


def _check_digests(index: ChunkIndex, digests: npt.NDArray[np.uint64]) -> None:
    """Refuse an index that has holes, or another number of chunks than there are digests."""
    if len(digests) != index.num_chunks:
        raise DataError(
            f"{index.path}: dataset {index.dataset!r} has {index.num_chunks} chunks but "
            f"{len(digests)} digests; {REPACK}"
        )
    missing = np.flatnonzero(index.offsets < 0)
    if len(missing):
        raise DataError(
            f"{index.path}: dataset {index.dataset!r}: chunk {missing[0]} of {index.num_chunks} "
            f"was never written; {REPACK}"
        )


def check_extent(index: ChunkIndex, file_bytes: int) -> None:
    """Raise `DataError` for an index that points outside the file."""
    beyond = np.flatnonzero(
        (index.offsets > file_bytes) | (index.sizes > file_bytes - index.offsets) | (index.sizes < 0)
    )
    if len(beyond):
        raise DataError(
            f"{index.describe(int(beyond[0]))} reaches past the end of the file ({file_bytes} bytes): "
            f"it is truncated; {index.mend}"
        )
