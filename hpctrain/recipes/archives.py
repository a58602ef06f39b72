"""Reading members of archives with bounds: on count, on size, on names and on kinds.

Nothing is unpacked to disk: callers get bytes and choose the file names themselves, so no name in an archive
can point outside. The digests of the packages vouch for them already; these bounds keep a mistake there from
doing harm.
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from hpctrain.errors import DataError


@dataclass(frozen=True)
class Limits:
    """Bounds on one archive: `member_bytes` for each member that is read, `total_bytes` and `members` over
    all.
    """

    members: int = 20_000
    member_bytes: int = 16 << 20
    total_bytes: int = 512 << 20


def read_tar(path: Path, wanted: re.Pattern[str], limits: Limits) -> dict[str, bytes]:
    """Bytes of the regular files in a .tar.gz whose whole name matches `wanted`, by name.

    Raises `DataError` for a broken archive, for a name that is absolute or climbs, for a wanted member that
    is no regular file, and beyond the limits.
    """
    found: dict[str, bytes] = {}
    members = total_bytes = 0
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                members, total_bytes = members + 1, total_bytes + member.size
                _check_name(path, member.name)
                _check_bound(path, "members", members, limits.members)
                _check_bound(path, "bytes in all", total_bytes, limits.total_bytes)
                if wanted.fullmatch(member.name):
                    found[member.name] = _read_member(path, archive, member, limits)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: not a whole tar archive: {error}; delete it and run again") from error
    return found


def read_zip_member(path: Path, name: str, limits: Limits) -> bytes:
    """Bytes of one member of a zip archive; raises `DataError` where it is missing, broken or beyond the
    limits.
    """
    try:
        with zipfile.ZipFile(path) as archive, archive.open(name) as member:
            return _read_bounded(path, name, member, limits.member_bytes)
    except KeyError as error:
        raise DataError(f"{path}: holds no {name}; delete it and run again") from error
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a whole zip archive: {error}; delete it and run again") from error


def gunzip(name: str, data: bytes, limits: Limits) -> bytes:
    """Decompress; raises `DataError` for broken data and beyond `limits.member_bytes`."""
    try:
        with gzip.open(io.BytesIO(data)) as stream:
            return _read_bounded(Path(name), "content", stream, limits.member_bytes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{name}: not whole gzip data: {error}") from error


def _read_member(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo, limits: Limits) -> bytes:
    stream = archive.extractfile(member) if member.isreg() else None
    if stream is None:
        raise DataError(f"{path}: {member.name} is a link or a special file, not a regular one; refused")
    with stream:
        return _read_bounded(path, member.name, stream, limits.member_bytes)


def _read_bounded(path: Path, name: str, stream: IO[bytes] | gzip.GzipFile, bound: int) -> bytes:
    """All of a stream. Stated sizes are not believed: one byte beyond the bound is asked for."""
    data = stream.read(bound + 1)
    _check_bound(path, f"bytes in {name}", len(data), bound)
    return data


def _check_name(path: Path, name: str) -> None:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise DataError(f"{path}: the name {name!r} points outside of the archive; refused")


def _check_bound(path: Path, what: str, value: int, bound: int) -> None:
    if value > bound:
        raise DataError(f"{path}: {value} {what} or more, but the bound is {bound}; refused")
