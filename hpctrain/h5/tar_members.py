"""The members of tar archives, read in place: their headers once, and then the bytes of any of them by pread.

A compressed archive is unpacked once, into a temporary file without a name (in TMPDIR), because nothing can be read out
of the middle of it.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import os
import tempfile
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Final, cast

from isal import igzip, isal_zlib

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.archive_limits import ArchiveCount, check_member_bytes
from hpctrain.h5.blocks import BlockCache
from hpctrain.h5.each import SourceChangedError
from hpctrain.h5.options import SourceOptions
from hpctrain.h5.tar_headers import MEND, scan_headers

_SUFFIXES: Final = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
SPLITS: Final = frozenset({"train", "test", "val", "valid", "validation", "dev"})
"""What the parts of a data set are called, as folders or at the start of names of shards."""
_Unpack = Callable[[IO[bytes]], IO[bytes]]
_OPEN: Final[dict[bytes, _Unpack]] = {
    b"\x1f\x8b": cast("_Unpack", igzip.open),
    b"BZh": cast("_Unpack", bz2.open),
    b"\xfd7zXZ": cast("_Unpack", lzma.open),
}
_BAD_DEFLATE: Final = cast("type[Exception]", isal_zlib.error)  # its stub declares an instance
_BAD_STREAM: Final = (EOFError, zlib.error, _BAD_DEFLATE, lzma.LZMAError, gzip.BadGzipFile)
_COPY_BYTES: Final = 1 << 20
_KEPT_FILES: Final = 64
_TOLD_MEMBERS: Final = 1024


def is_tar(path: Path) -> bool:
    """Whether the name is that of a tar archive that can be read."""
    return path.name.lower().endswith(_SUFFIXES)


class TarMembers:
    """The regular files in some archives, in their order there; hidden ones are left out.

    Raises `DataError`, naming archive and entry, for what is damaged, cut off or beyond the bounds of `how`, and for
    links, devices and names that lead out; `StorageError` when reading fails.
    """

    def __init__(self, paths: Sequence[Path], how: SourceOptions) -> None:
        self._shards = [_Shard(path, how) for path in paths]
        self._names, self._ends = bytearray(), array("q", [0])
        self._offsets, self._sizes = array("q"), array("q")
        self.firsts = [0]
        """Number of the first member of each archive, and how many members there are."""
        total_bytes, before_bytes = sum(shard.num_bytes for shard in self._shards), 0
        for shard in self._shards:
            self._scan(shard, how, before_bytes, total_bytes)
            before_bytes += shard.num_bytes
        shards = self._shards  # not `self`, so that all is closed as soon as nobody holds it
        self._open: BlockCache[int, _Descriptor] = BlockCache(
            lambda number: shards[number].open(), lambda _: 1, _KEPT_FILES
        )

    def __len__(self) -> int:
        return len(self._offsets)

    def name(self, member: int) -> str:
        """Its path in the archive, without `./` before it."""
        start, stop = self._ends[member], self._ends[member + 1]
        return self._names[start:stop].decode("utf-8", "surrogateescape")

    def where(self, member: int) -> str:
        """What messages call it."""
        return f"{self._shards[self._shard_of(member)].path}: {self.name(member)}"

    def size(self, member: int) -> int:
        """Its bytes."""
        return self._sizes[member]

    def read(self, member: int) -> bytes:
        """Its content; called from several threads at once."""
        size, number = self._sizes[member], self._shard_of(member)
        check_member_bytes(self.where(member), size)
        try:
            opened = self._open.get(number)
            self._shards[number].check_unchanged(opened)
            data = os.pread(opened.descriptor, size, self._offsets[member])
        except OSError as error:
            raise StorageError(
                f"{self.where(member)}: cannot be read: {error.strerror}; check the filesystem"
            ) from error
        if len(data) != size:
            raise DataError(f"{self.where(member)}: ends after {len(data)} of {size} bytes; {MEND}")
        return data

    def _shard_of(self, member: int) -> int:
        return bisect_right(self.firsts, member) - 1

    def _scan(self, shard: _Shard, how: SourceOptions, before_bytes: int, total_bytes: int) -> None:
        def tell(done_bytes: int) -> None:
            how.opening("reading headers", before_bytes + done_bytes, total_bytes, f"{len(self)} files")

        def add(name: str, offset: int, size: int) -> None:
            self._add(name, offset, size)
            if len(self) % _TOLD_MEMBERS == 0:
                tell(offset)

        opened = shard.open()
        scan_headers(opened.descriptor, shard.path, how, add)
        self.firsts.append(len(self))
        tell(shard.num_bytes)

    def _add(self, name: str, offset: int, size: int) -> None:
        self._names += name.encode("utf-8", "surrogateescape")
        self._ends.append(len(self._names))
        self._offsets.append(offset)
        self._sizes.append(size)


class _Descriptor:
    """An open file, closed when nobody holds it any more: another thread may be reading from it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class _Shard:
    """One archive: the file itself, or what it unpacks to."""

    def __init__(self, path: Path, how: SourceOptions) -> None:
        self.path = path
        self._copy: _Descriptor | None = None
        self._key = (0, 0, 0)
        try:
            descriptor = self._open_file()
            self._key = _key_of(descriptor.descriptor)
            start = os.pread(descriptor.descriptor, 8, 0)
            unpack = next((item for magic, item in _OPEN.items() if start.startswith(magic)), None)
            if unpack is not None:
                self._copy = _unpacked(path, unpack, how)
            self.num_bytes = os.fstat((self._copy or descriptor).descriptor).st_size
        except (DataError, StorageError):
            raise
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {error.strerror}; check the filesystem") from error

    def open(self) -> _Descriptor:
        """The bytes of the archive, uncompressed."""
        return self._open_file() if self._copy is None else self._copy

    def check_unchanged(self, opened: _Descriptor) -> None:
        """Raise `SourceChangedError` where the archive is another than the one that was looked at."""
        if self._copy is None and _key_of(opened.descriptor) != self._key:
            raise SourceChangedError(
                f"{self.path}: changed since this run looked at it (size, time or file are others); run again"
            )

    def _open_file(self) -> _Descriptor:
        # Not to wait for the other end of a pipe.
        return _Descriptor(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))


def _key_of(descriptor: int) -> tuple[int, int, int]:
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns, found.st_ino


def _unpacked(path: Path, unpack: _Unpack, how: SourceOptions) -> _Descriptor:
    """The whole archive, uncompressed, in a file without a name."""
    count, total_bytes = ArchiveCount(path, how), 0
    try:
        with tempfile.TemporaryFile() as copy, path.open("rb") as file, unpack(file) as stream:
            packed_bytes = os.fstat(file.fileno()).st_size
            while block := stream.read(_COPY_BYTES):
                total_bytes += len(block)
                count.check_bytes(total_bytes)
                _write(copy, block, path)
                how.opening("unpacking", file.tell(), packed_bytes, path.name)
            copy.flush()
            return _Descriptor(os.dup(copy.fileno()))
    except _BAD_STREAM as error:
        raise DataError(f"{path}: damaged or cut off: {error}; {MEND}") from error
    except StorageError:
        raise
    except OSError as error:
        if error.errno is None:  # a damaged bzip2 stream
            raise DataError(f"{path}: damaged: {error}; {MEND}") from error
        raise


def _write(copy: IO[bytes], block: bytes, path: Path) -> None:
    try:
        copy.write(block)
    except OSError as error:
        room = "set TMPDIR to a folder with more room, or " if error.errno == errno.ENOSPC else ""
        raise StorageError(
            f"{tempfile.gettempdir()}: {path} cannot be unpacked there: {error.strerror}; {room}decompress it first"
        ) from error
