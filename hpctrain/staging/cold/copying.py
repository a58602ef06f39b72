"""Copying files with long reads and writes in threads; and what makes a later read come from the disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from hpctrain.durable import fsync_path
from hpctrain.errors import StorageError, UsageError
from hpctrain.h5.chunks import pread_into
from hpctrain.h5.index import file_key_of
from hpctrain.h5.retry import OpenFiles
from hpctrain.h5.scratch import Scratch
from hpctrain.resilience.faults import fault_point

Show = Callable[[str, int, int], None]
"""Called with what is being done, bytes done, and bytes in all."""
FileKeys = dict[str, tuple[int, int, int]]

FAULT: Final = "archive.write"
_BLOCK_BYTES: Final = 8 << 20
_MIN_THREADS: Final = 4
"""Also on fewer cores: a block is written while the next one is read."""


def copy_files(paths: Sequence[Path], target: Path, show: Show) -> None:
    """Copy files into a directory that has none of these names.

    Raises `StorageError`, saying which file could not be read or written.
    """
    total_bytes, done_bytes = bytes_of(paths), 0
    scratch, threads = Scratch(), max(len(os.sched_getaffinity(0)), _MIN_THREADS)
    for path in paths:
        # After an error the threads end before the files are closed: their numbers may be others' then.
        with (
            _Pair(path, target / path.name, scratch) as pair,
            ThreadPoolExecutor(threads, thread_name_prefix="copy") as pool,
        ):
            try:
                for num_bytes in pool.map(pair.copy, range(0, pair.num_bytes, _BLOCK_BYTES)):
                    done_bytes += num_bytes
                    show("copy", done_bytes, total_bytes)
            finally:
                pool.shutdown(cancel_futures=True)


def keys_of(root: Path) -> FileKeys:
    """All that is in a set's folder, by name. Raises `UsageError` for what is no file: it would be lost."""
    with named(root, "listed"):
        paths = sorted(root.iterdir())
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise UsageError(f"{path} is not a plain file, and only those are moved; put it elsewhere first")
    with named(root, "looked at"):
        return {path.name: file_key_of(path) for path in paths}


def bytes_of(paths: Sequence[Path]) -> int:
    """Of all the files. Raises `StorageError`."""
    total = 0
    for path in paths:
        with named(path, "looked at"):
            total += path.stat().st_size
    return total


@contextlib.contextmanager
def named(path: Path, what: str) -> Iterator[None]:
    """Turn a failure of the system into a `StorageError` that says which file could not be read or written."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{path}: cannot be {what}: {error.strerror}") from error


def forget_cached(root: Path) -> None:
    """Make the files of a directory durable, and let the kernel forget them: they are then read from the disk.

    Raises `StorageError`. Where the filesystem keeps its files in memory they stay there.
    """
    for path in root.iterdir():
        with named(path, "made durable (fsync)"):
            fsync_path(path)
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


class _Pair:
    """A file and its copy, both open."""

    def __init__(self, source: Path, target: Path, scratch: Scratch) -> None:
        self._source, self._target, self._scratch = source, target, scratch
        self.num_bytes = bytes_of([source])
        self._reading = OpenFiles(lambda path: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        with named(target, "written"):
            fault_point(FAULT)
            self._writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> _Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self._reading.close()
        os.close(self._writing)

    def copy(self, offset: int) -> int:
        """Copy one block; gives its bytes. Called in several threads."""
        block = self._scratch.bytes("block", min(_BLOCK_BYTES, self.num_bytes - offset))
        with named(self._source, "read"):
            found = self._reading.read(self._source, lambda file: pread_into(file, block, offset))
        if found != len(block):
            raise StorageError(f"{self._source}: became shorter while it was copied; run it again")
        with named(self._target, "written"):
            fault_point(FAULT)
            done = 0
            while done < len(block):
                done += os.pwrite(self._writing, block[done:].data, offset + done)
        return len(block)
