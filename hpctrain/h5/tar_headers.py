"""The headers of a tar archive: which files it holds and where, and a refusal of what must not be in it.

`tarfile` reads them. What it lets pass is refused here: names that lead out, links and devices, an archive that ends
too early, a header that is damaged (which it takes for the end), and headers that ask for much memory.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.archive_limits import ArchiveCount
from hpctrain.h5.options import SourceOptions

MEND: Final = "make the archive again, or copy it again"
_BLOCK_BYTES: Final = 512  # of tar
_MAX_HEADER_BYTES: Final = 1 << 20  # of one long name, or one set of extended headers
_TRAILER_BYTES: Final = 1 << 20  # looked through for what stands behind the end mark
# Where fields stand in a header (POSIX.1-1988, ustar).
_NAME, _SIZE, _SUM, _PREFIX = slice(0, 100), slice(124, 136), slice(148, 156), 345
_TYPE: Final = 156

Add = Callable[[str, int, int], None]
"""Told the name, offset and size of a file."""


class _Entry(tarfile.TarInfo):
    """Reads the header of a plain file at three times the speed, for there are millions; others as `tarfile` does."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Entry:
        """What the block says, in the fields that are used here."""
        name = bytes(buf[_NAME]).rstrip(b"\0")
        if (
            len(buf) == _BLOCK_BYTES
            and buf[_TYPE] == ord("0")
            and name
            and 0 not in name
            and not buf[_PREFIX]
        ):
            try:
                size, total = (int(bytes(buf[field]).rstrip(b" \0"), 8) for field in (_SIZE, _SUM))
            except ValueError:  # a size in base 256
                return super().frombuf(buf, encoding, errors)
            # The sum counts its own field as blanks.
            if size >= 0 and sum(buf) - sum(buf[_SUM]) + 8 * ord(" ") == total:
                entry = cls(name.decode(encoding, errors))
                entry.size = size
                return entry
        return super().frombuf(buf, encoding, errors)


class _Headers(io.BufferedReader):
    """What `tarfile` reads headers from: it takes those of any size into memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes, but the bound is {_MAX_HEADER_BYTES}")
        return super().read(size)


def scan_headers(descriptor: int, path: Path, how: SourceOptions, add: Add) -> None:
    """Tell `add` each regular file of an uncompressed archive, in its order there; hidden ones are left out.

    Raises `DataError`, naming `path` and entry, for what is damaged, cut off, beyond the bounds of `how`, a link or a
    device, or has a name that leads out; `StorageError` when reading fails.
    """
    try:
        with io.FileIO(descriptor, closefd=False) as raw, _Headers(raw) as file:
            file.seek(0)  # a copy was written last
            with tarfile.open(fileobj=file, mode="r:", tarinfo=_Entry) as tar:
                _scan(tar, ArchiveCount(path, how), path, os.fstat(descriptor).st_size, add)
                _check_end(os.pread(descriptor, _TRAILER_BYTES, tar.offset), tar.offset, path)
    except DataError:
        raise
    except RecursionError as error:
        raise DataError(
            f"{path}: has extended headers one behind the other, without entries; {MEND}"
        ) from error
    except (tarfile.TarError, EOFError, ValueError, OverflowError, MemoryError) as error:
        raise DataError(f"{path}: not a whole tar archive: {error}; {MEND}") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}; check the filesystem") from error


def _scan(
    tar: tarfile.TarFile,
    count: ArchiveCount,
    path: Path,
    num_bytes: int,
    add: Add,
) -> None:
    end = 0
    while (member := tar.next()) is not None:
        cast("Any", tar).members.clear()  # it would keep a kilobyte of each
        if member.size < 0 or member.offset < end:
            raise DataError(f"{path}: the header of entry {member.name!r} is damaged; {MEND}")
        count.add(member.name, member.size)
        end = member.offset + _BLOCK_BYTES
        if member.isdir():
            continue
        if not member.isreg() or member.issparse():
            kind = (
                "sparse"
                if member.issparse()
                else "a link"
                if member.islnk() or member.issym()
                else "a device"
            )
            raise DataError(
                f"{path}: the entry {member.name!r} is {kind}, not a plain file; make the archive without it"
            )
        if member.offset_data + member.size > num_bytes:
            raise DataError(
                f"{path}: cut off at byte {num_bytes}, in entry {member.name!r}, which ends at byte "
                f"{member.offset_data + member.size}; {MEND}"
            )
        name = _clean(member.name)
        if name:
            add(name, member.offset_data, member.size)


def _check_end(trailer: bytes, offset: int, path: Path) -> None:
    """Refuse an archive that goes on where it should end: `tarfile` takes a damaged header for the end."""
    if len(trailer) < _BLOCK_BYTES:
        raise DataError(f"{path}: cut off at byte {offset + len(trailer)}: it has no end mark; {MEND}")
    if trailer[:_BLOCK_BYTES].strip(b"\0"):
        raise DataError(f"{path}: the header at byte {offset} is damaged; {MEND}")
    if trailer.strip(b"\0"):
        raise DataError(
            f"{path}: goes on behind the end mark at byte {offset}, as archives joined with `cat` do; "
            "join them with `tar --concatenate`, or pack them as a folder of shards"
        )


def _clean(name: str) -> str:
    """The name without `.` in it; "" for what is hidden."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if any(part.startswith(".") or part == "__MACOSX" for part in parts):
        return ""
    return "/".join(parts)
