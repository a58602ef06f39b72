"""Where stored chunks come from: `ChunkSource`, and the one that reads files by pread.

How the files are read is a choice (`PageCache`): through the kernel's page cache, which keeps what fits; the same, but
the pages are given back at once, so that one pass over a large set does not push out what others on the node need; or
past the cache (O_DIRECT), which some parallel filesystems serve faster, others several times slower: measure.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.filters import Buffer
from hpctrain.h5.index import ChunkIndex, digest_of
from hpctrain.h5.retry import OpenFiles

PageCache = Literal["keep", "drop", "bypass"]
Allocate = Callable[[int], npt.NDArray[np.uint8]]
"""Gives a buffer of so many bytes, shape (bytes,)."""

_BLOCK_BYTES: Final = 4096  # O_DIRECT: file offsets, sizes and addresses are multiples of it


def fresh(num_bytes: int) -> npt.NDArray[np.uint8]:
    """A buffer of its own."""
    return np.empty(num_bytes, np.uint8)


class ChunkSource(Protocol):
    """Where stored chunks come from: the file itself, or a mirror of it."""

    def read(self, index: ChunkIndex, chunk: int, allocate: Allocate = fresh) -> Buffer:
        """The stored bytes of one chunk, verified against `index.digests`; called from several threads at once.

        They lie in what `allocate` gave, or in memory of the source's own.
        """
        ...


class FileSource:
    """Reads chunks from the files themselves.

    Files are opened on first use and closed by `close` (or on leaving the `with` block). What fails for a moment is
    read again (`hpctrain.h5.retry`); `warn` is told once per file. Safe to share between threads: pread has no file
    position.
    """

    def __init__(
        self, page_cache: PageCache = "keep", warn: Callable[[str], None] = lambda message: None
    ) -> None:
        self._page_cache = page_cache
        self._files = OpenFiles(lambda path: _open(path, page_cache == "bypass"), warn)
        self._aligned = threading.local()

    def read(self, index: ChunkIndex, chunk: int, allocate: Allocate = fresh) -> Buffer:
        """The stored bytes of one chunk, in what `allocate` gave; none for a chunk that was never written.

        Raises `DataError` when the file is too short, was changed since it was indexed, or the bytes do not match their
        digest; `StorageError` when reading fails.
        """
        if index.offsets[chunk] < 0:
            return b""
        stored = allocate(int(index.sizes[chunk]))
        try:
            done = self._files.read(index.path, self._fill, index, stored, int(index.offsets[chunk]))
        except FileNotFoundError as error:
            raise DataError(f"{index.path}: there is no such file any more; {index.mend}") from error
        except OSError as error:
            reason = (
                f"cannot be read: {error.strerror} (errno {error.errno}); check the filesystem and run again"
            )
            raise StorageError(f"{index.describe(chunk)} {reason}") from error
        if done != len(stored):
            raise DataError(
                f"{index.describe(chunk)}: the file ends after {done} of these bytes; {index.mend}"
            )
        verify(index, chunk, stored.data)
        return stored.data

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        self._files.close()

    def __enter__(self) -> FileSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self, descriptor: int, index: ChunkIndex, out: npt.NDArray[np.uint8], offset: int) -> int:
        if self._page_cache == "bypass":
            done = self._read_direct(descriptor, out, offset)
        else:
            done = pread_into(descriptor, out, offset)
        if self._page_cache == "drop":
            os.posix_fadvise(descriptor, offset, len(out), os.POSIX_FADV_DONTNEED)
        # Without digests nothing else tells that the bytes are other ones now. Asked afterwards: it may be another file
        # that is open here since a retry.
        if index.file_key is not None:
            _refuse_changed(index, os.fstat(descriptor))
        return done

    def _read_direct(self, descriptor: int, out: npt.NDArray[np.uint8], offset: int) -> int:
        """Whole blocks into an aligned buffer of this thread, and the bytes wanted out of it."""
        begin = offset // _BLOCK_BYTES * _BLOCK_BYTES
        length = -(-(offset + len(out) - begin) // _BLOCK_BYTES) * _BLOCK_BYTES
        buffer: mmap.mmap | None = getattr(self._aligned, "buffer", None)
        if buffer is None or len(buffer) < length:
            buffer = self._aligned.buffer = mmap.mmap(-1, length)  # anonymous memory begins on a page
        aligned = np.frombuffer(buffer, np.uint8)[:length]
        found = pread_into(descriptor, aligned, begin, _BLOCK_BYTES)
        done = max(0, min(found - (offset - begin), len(out)))
        out[:done] = aligned[offset - begin : offset - begin + done]
        return done


def _open(path: Path, direct: bool) -> int:
    """Open for reading, past the page cache if asked to and where the filesystem can do it."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    if direct:
        with contextlib.suppress(OSError):  # EINVAL: not here; other errors come again below
            return os.open(path, flags | os.O_DIRECT)
    return os.open(path, flags)


def verify(index: ChunkIndex, chunk: int, stored: Buffer) -> None:
    """Raise `DataError` for stored bytes that do not match their digest; bytes without one pass."""
    if index.digests is None:
        return
    found, wanted = digest_of(stored), int(index.digests[chunk])
    if found != wanted:
        raise DataError(
            f"{index.describe(chunk)}: the digest is {found:016x} but should be {wanted:016x}; {index.mend}"
        )


def _refuse_changed(index: ChunkIndex, found: os.stat_result) -> None:
    if (found.st_size, found.st_mtime_ns, found.st_ino) != index.file_key:
        raise DataError(
            f"{index.path}: changed since this run looked at it (size, time or file are others); put the old file "
            "back, or begin a new run"
        )


def pread_into(descriptor: int, out: npt.NDArray[np.uint8], offset: int, block_bytes: int = 1) -> int:
    """Fill `out`; returns how many bytes there were: fewer only at the end of the file.

    Where `offset` and `out` are whole blocks (O_DIRECT), so is all that is asked for: a part of one ends the file.
    """
    done = 0
    while done < len(out):
        more = os.preadv(descriptor, [out[done:].data], offset + done)
        done += more
        if not more or done % block_bytes:
            break
    return done


def read_flat(
    index: ChunkIndex, source: ChunkSource, start: int, stop: int, out: npt.NDArray[Any] | None = None
) -> npt.NDArray[Any]:
    """Elements [start, stop) of a 1-D dataset, in native byte order; errors as for `ChunkSource.read`."""
    if out is None:
        out = np.empty(stop - start, index.dtype.newbyteorder("="))
    step = index.chunk_shape[0]
    for chunk in range(start // step, -(-stop // step) if stop > start else start // step):
        begin, end = max(start, chunk * step), min(stop, (chunk + 1) * step)
        part = index.decode(chunk, source.read(index, chunk))
        out[begin - start : end - start] = part[begin - chunk * step : end - chunk * step]
    return out


def allow_many_files() -> None:
    """Raise the soft limit of open files to the hard one: a set may have more shards than the usual 1024."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # a kernel that allows less: it may still be enough
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
