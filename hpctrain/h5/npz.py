"""`.npz` archives: a zip of `.npy` members, whose sizes are checked before any of them is unpacked.

What is stored plainly (`numpy.savez`) is mapped where it lies; what is compressed (`numpy.savez_compressed`) is
unpacked into memory, where zip's checksum is verified. Nothing is unpickled.
"""

from __future__ import annotations

import errno
import math
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import psutil

from hpctrain.errors import DataError, StorageError

_MEND: Final = "save it again with numpy.savez, without objects in it"
_LOCAL_HEADER_BYTES: Final = 30  # PKZIP APPNOTE 4.3.7: lengths of name and extra field are its last two u16
_MEMORY_SHARE: Final = 0.5

ARRAY_ERRORS: Final = (
    ValueError,
    EOFError,
    TypeError,
    ArithmeticError,
    SyntaxError,
    MemoryError,
    RecursionError,
    tokenize.TokenError,
)
"""What NumPy's readers raise for damaged headers, which are Python literals."""
_ZIP_ERRORS: Final = (zipfile.BadZipFile, RuntimeError, IndexError, zlib.error, struct.error)


def load_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an archive by name.

    Raises `DataError`, naming file and member, for what is no archive of arrays of numbers, for a member whose size is
    not what its header says, and for compressed members that need more than half of the free memory together;
    `StorageError` when the file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if not info.is_dir()]
            heads = {info.filename: _checked_head(path, archive, info) for info in members}
            _check_memory(path, [info for info in members if info.compress_type != zipfile.ZIP_STORED])
            return {
                info.filename.removesuffix(".npy"): _load(path, archive, info, *heads[info.filename])
                for info in members
            }
    except DataError:
        raise
    except (*_ZIP_ERRORS, *ARRAY_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which is a damaged offset
            raise StorageError(f"{path}: cannot be read: {error.strerror}; check the filesystem") from error
        raise DataError(f"{path}: cannot be read as an archive of arrays (.npz): {error}; {_MEND}") from error


_Head = tuple[tuple[int, ...], bool, np.dtype[Any], int]
"""Shape, whether in Fortran order, type, and bytes of the header."""


def _checked_head(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Head:
    if not info.filename.endswith(".npy") or info.compress_type not in (
        zipfile.ZIP_STORED,
        zipfile.ZIP_DEFLATED,
    ):
        raise DataError(f"{path}: member {info.filename!r} is not an array as NumPy saves it; {_MEND}")
    with archive.open(info) as stream:
        shape, fortran, dtype = _read_head(stream)
        head_bytes = stream.tell()
    if dtype.hasobject:
        raise DataError(f"{path}: member {info.filename!r} holds Python objects; {_MEND}")
    wanted = head_bytes + math.prod(shape) * dtype.itemsize
    if wanted != info.file_size:
        raise DataError(
            f"{path}: member {info.filename!r} has {info.file_size} bytes, but its header says {wanted} "
            f"(shape {shape}, {dtype}); {_MEND}"
        )
    return shape, fortran, dtype, head_bytes


def _read_head(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"version {version} of the array format")  # 3.0 is for names of structures


def _check_memory(path: Path, packed: list[zipfile.ZipInfo]) -> None:
    needed = sum(info.file_size for info in packed)
    limit = int(_MEMORY_SHARE * psutil.virtual_memory().available)
    if needed > limit:
        raise DataError(
            f"{path}: its compressed members take {needed} bytes in memory, but the bound is {limit} (half of what is "
            "free); save them as .npy files, or with numpy.savez, and pack those"
        )


def _load(
    path: Path,
    archive: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    shape: tuple[int, ...],
    fortran: bool,
    dtype: np.dtype[Any],
    head_bytes: int,
) -> npt.NDArray[Any]:
    if info.compress_type == zipfile.ZIP_STORED and 0 not in shape:
        start = _data_offset(path, info) + head_bytes
        return np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C")
    with archive.open(info) as stream:
        array: npt.NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
    return array


def _data_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a stored member begin: behind its local header, whose extra field may differ."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(_LOCAL_HEADER_BYTES)
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
    return info.header_offset + _LOCAL_HEADER_BYTES + int(name_bytes) + int(extra_bytes)
