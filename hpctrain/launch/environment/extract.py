"""The members of an environment archive, written below a directory that is new and private.

They are held to stricter rules than by the filters of `tarfile` (which Python before 3.11.4 lacks): only directories,
regular files and links, each name once, no `..`, nothing written through a link because links are made last, and none
of them leading out.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

import xxhash
from isal import igzip_threaded, isal_zlib

from hpctrain.errors import DataError
from hpctrain.launch.environment.header import Header

Progress = Callable[[int, int], None]
"""Called with the bytes of files that are done, and of all files."""

_COPY_BYTES = 1 << 20
_READ_BYTES = 1 << 16  # tarfile copies what is left of it at each read
_BAD_DEFLATE = cast("type[Exception]", isal_zlib.error)  # its stub declares an instance
# The directory was empty: a name that is there already is the archive's fault.
_DAMAGE = (
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    _BAD_DEFLATE,
    EOFError,
    ValueError,
    FileExistsError,
)
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def extract(file: BinaryIO, header: Header, root: Path, progress: Progress) -> None:
    """Write what follows the header in `file` below `root`, an empty directory.

    Raises:
        DataError: the archive is damaged, or holds what `hpctrain env-archive create` does not write.
        OSError: `root` cannot be written to, or the archive not be read.
    """
    try:
        with _Source(file) as source:
            links = _write_files(source, header, root, progress)
            while source.read(_COPY_BYTES):
                pass  # padding, which is digested too
        if source.digest() != header.digest:
            raise ValueError(f"the digest is {source.digest()}, but {header.digest} is stated")
        _make_links(links, root)
    except _DAMAGE as error:
        raise DataError(
            f"{file.name}: damaged: {error}; make it again with `hpctrain env-archive create`"
        ) from error


class _Source:
    """The tar stream of an archive, digested as it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._hash = xxhash.xxh3_128()
        self._stream = igzip_threaded.open(file, "rb", threads=1)  # type: ignore[no-untyped-call]

    def read(self, size: int) -> bytes:
        data: bytes = self._stream.read(size)
        self._hash.update(data)
        return data

    def digest(self) -> str:
        return self._hash.hexdigest()

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def _write_files(source: _Source, header: Header, root: Path, progress: Progress) -> list[tarfile.TarInfo]:
    """Write directories and files within the bounds that the header states; returns the links."""
    links: list[tarfile.TarInfo] = []
    members = done_bytes = 0
    stream = cast("IO[bytes]", source)  # all that tarfile asks for in this mode is `read`
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_READ_BYTES) as tar:
        for member in tar:
            members, done_bytes = members + 1, done_bytes + member.size
            if members > header.members or done_bytes > header.total_bytes:
                raise ValueError(
                    f"more than the {header.members} members and {header.total_bytes} bytes that are stated"
                )
            path = root / _checked_name(member.name)
            if member.isdir():
                path.mkdir(mode=0o755)
            elif member.isreg():
                _write_file(tar, member, path)
            elif member.issym():
                links.append(member)
            else:
                raise ValueError(f"{member.name} is neither a directory, nor a file, nor a link")
            progress(done_bytes, header.total_bytes)
    if (members, done_bytes) != (header.members, header.total_bytes):
        raise ValueError(
            f"{members} members and {done_bytes} bytes, but {header.members} and {header.total_bytes} are stated"
        )
    return links


def _checked_name(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise ValueError(f"the name {name!r} points out of the archive")
    return name


def _write_file(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    content = tar.extractfile(member)
    if content is None:
        raise ValueError(f"{member.name} has no content")
    descriptor = os.open(path, _NEW_FILE, 0o755 if member.mode & 0o111 else 0o644)
    with content, open(descriptor, "wb") as file:
        shutil.copyfileobj(content, file, _COPY_BYTES)
        file.flush()
        os.utime(descriptor, (member.mtime, member.mtime))


def _make_links(links: list[tarfile.TarInfo], root: Path) -> None:
    """Make all, then see where each of them leads: one may go by way of another."""
    for link in links:
        (root / link.name).symlink_to(link.linkname)
    inside = root.resolve()
    for link in links:
        if os.path.isabs(link.linkname) or not (root / link.name).resolve().is_relative_to(inside):
            raise ValueError(f"the link {link.name} -> {link.linkname} leads out of the archive")
