"""The chunk table of a dataset, and what h5py has no call for, asked of the libhdf5 that it has loaded."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt
from h5py._objects import phil

from hpctrain.errors import DataError

ChunkTable = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint32]]
"""Offsets (-1: never written), stored sizes and filter masks, each of shape (num_chunks,)."""

_BATCH_CHUNKS: Final = (
    1 << 16
)  # what chunk_iter gives takes some 300 bytes a chunk until it is put into arrays
_UNFILTERED_EDGES: Final = 0x2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS
_EXTENSIBLE_ARRAY: Final = 4  # H5D_CHUNK_IDX_EARRAY
_PROBE_USER_BLOCK: Final = 512
_SIGNATURE: Final = b"\x89HDF\r\n\x1a\n"


@dataclass(frozen=True)
class Reports:
    """How a libhdf5 reports chunks, where that is not as it should be.

    `without_user_block`: before 1.14.4 addresses were counted from the end of the user block (HDFGroup/hdf5 pull
    request 4236). `counts_chunks`: some versions counted the starts in chunks, not in elements (issue 1419 there).
    `rotated`: for the index that is an extensible array, starts are wrong unless the unlimited axis is the first; seen
    with 2.0.0, where H5Dget_chunk_info and H5Dget_chunk_info_by_coord are wrong in the same way.
    """

    without_user_block: bool = False
    counts_chunks: bool = False
    rotated: bool = False


@functools.cache
def probe() -> Reports:
    """How this libhdf5 reports chunks, found out with a file in memory; raises `DataError` for a way not known."""
    values = np.array([3, 0x1122334455667788], "<u8")
    with h5py.File(
        "probe", "w", driver="core", backing_store=False, libver="latest", userblock_size=_PROBE_USER_BLOCK
    ) as file:
        plain = file.create_dataset("plain", data=np.concatenate([values + 1, values]), chunks=(2,))
        array = file.create_dataset("array", (2, 1), "u1", chunks=(1, 1), maxshape=(2, None))
        array[1, 0] = 1
        file.flush()
        image = file.id.get_file_image()
        # The image may start with the user block or behind it.
        address = image.find(values.tobytes()) + _PROBE_USER_BLOCK - image.find(_SIGNATURE)
        return _judge(_reported(plain)[-1], address, _reported(array)[0])


def _reported(node: h5py.Dataset) -> list[Any]:
    found: list[Any] = []
    node.id.chunk_iter(found.append)
    return found


def _judge(plain: Any, address: int, array: Any) -> Reports:
    """What reports of two chunks say of the library.

    `plain` is that of the chunk at `address` that starts at element 2, `array` that of the one at (1, 0), unlimited
    along the second axis.
    """
    less, start, corner = address - plain.byte_offset, plain.chunk_offset[0], tuple(array.chunk_offset)
    if less not in (0, _PROBE_USER_BLOCK) or start not in (1, 2) or corner not in ((1, 0), (0, 1)):
        raise DataError(
            f"libhdf5 {h5py.version.hdf5_version} reports a chunk at byte {address}, element 2 as at "
            f"{plain.byte_offset}, {start}, and one at (1, 0) as at {corner}: chunks cannot be found with it; "
            "use another version of h5py"
        )
    return Reports(less != 0, start == 1, corner == (0, 1))


def read_chunk_table(node: h5py.Dataset, grid: tuple[int, ...]) -> ChunkTable:
    """The chunk table of a chunked dataset with this grid of chunks, in row-major order; one walk of its index.

    Raises `DataError` for chunks outside the grid, and what h5py raises for an index that libhdf5 cannot read.
    """
    count = int(np.prod(grid, dtype=np.int64))
    offsets, sizes, masks = (
        np.full(count, -1, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.uint32),
    )
    reports = probe()
    unit = np.ones(len(grid), np.int64) if reports.counts_chunks else np.array(node.chunks, np.int64)
    base = node.file.userblock_size if reports.without_user_block else 0
    axis = _rotated_axis(node) if reports.rotated else None
    strides = np.array([int(np.prod(grid[i + 1 :], dtype=np.int64)) for i in range(len(grid))], np.int64)
    batch: list[Any] = []

    def flush() -> None:
        places = _numbers((info[0] for info in batch), len(batch), len(grid)) // unit
        if axis is not None:
            places = _rotated_back(places, node, axis)
        if np.any((places < 0) | (places >= np.array(grid))):
            raise DataError(
                f"{node.file.filename}: dataset {node.name!r} has chunks outside its shape {node.shape}"
            )
        rows = places @ strides
        mask_offset_size = _numbers((info[1:] for info in batch), len(batch), 3)
        masks[rows] = mask_offset_size[:, 0]
        offsets[rows] = mask_offset_size[:, 1] + base
        sizes[rows] = mask_offset_size[:, 2]
        batch.clear()

    def take(info: Any) -> None:
        batch.append(info)
        if len(batch) == _BATCH_CHUNKS:
            flush()

    if count:
        node.id.chunk_iter(take)
        flush()
    return offsets, sizes, masks


def _rotated_axis(node: h5py.Dataset) -> int | None:
    """The unlimited axis of a dataset whose chunks are reported wrongly for it (`Reports.rotated`)."""
    unlimited = [axis for axis, extent in enumerate(node.maxshape) if extent is None]
    if len(unlimited) != 1 or unlimited[0] == 0:
        return None
    kind = ctypes.c_int(-1)
    function = _libhdf5("H5Dget_chunk_index_type")
    if function is not None:
        with phil:
            function(ctypes.c_int64(node.id.id), ctypes.byref(kind))
    if kind.value < 0:
        raise DataError(
            f"{node.file.filename}: dataset {node.name!r} is unlimited along axis {unlimited[0]}, and this libhdf5 "
            "cannot be asked which index its chunks have; use another build of h5py"
        )
    return unlimited[0] if kind.value == _EXTENSIBLE_ARRAY else None


def _rotated_back(places: npt.NDArray[np.int64], node: h5py.Dataset, axis: int) -> npt.NDArray[np.int64]:
    """True places in the grid, (chunks, rank), from those reported for an extensible array.

    The array numbers chunks with the unlimited axis first, over the greatest extents of the others; the report
    takes the number apart as if the axes were in their own order.
    """
    limits = [
        0 if extent is None else -(-extent // step)
        for extent, step in zip(node.maxshape, node.chunks, strict=True)
    ]
    number = places[:, axis].copy()
    for other in range(axis + 1, len(limits)):
        number = number * limits[other] + places[:, other]
    found = np.empty_like(places)
    for other in reversed([i for i in range(len(limits)) if i != axis]):
        number, found[:, other] = np.divmod(number, limits[other])
    found[:, axis] = number
    return found


def _numbers(rows: Any, count: int, width: int) -> npt.NDArray[np.int64]:
    """Tuples of `width` integers each, as an array (count, width)."""
    return np.fromiter(chain.from_iterable(rows), np.int64, count * width).reshape(count, width)


def raw_partial_edges(node: h5py.Dataset) -> bool | None:
    """Whether the partial chunks at the edges are stored without their filters; None where that cannot be found out.

    Their filter masks do not say so.
    """
    plist = node.id.get_create_plist()
    options = ctypes.c_uint(0)
    function = _libhdf5("H5Pget_chunk_opts")
    if function is None:
        return None
    with phil:  # h5py's lock: no other thread may be inside libhdf5
        status = function(ctypes.c_int64(plist.id), ctypes.byref(options))
    return bool(options.value & _UNFILTERED_EDGES) if status >= 0 else None


def _libhdf5(name: str) -> Any:
    """A function that h5py has no call for; None where it cannot be had.

    It is looked up through h5py's own extension module, which leads to the very libhdf5 that h5py has loaded.
    """
    try:
        return getattr(ctypes.CDLL(h5py.h5p.__file__), name)
    except (OSError, AttributeError):
        return None
