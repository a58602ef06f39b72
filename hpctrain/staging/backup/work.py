"""What all of a backup's work has in common: threads, reading and writing at a place in a file, and progress."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Final, TypeVar

from hpctrain.errors import StorageError
from hpctrain.h5.filters import Buffer

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, by one thread at a time."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_WAITING_ON_STORAGE: Final = 2  # threads a core: while some read, others hash
_AHEAD: Final = 4  # tasks a thread that are submitted at once: not all of a million


OPEN_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def in_threads(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """The results in order; the first error ends what has not begun, and is raised when all threads have ended."""
    threads = _WAITING_ON_STORAGE * len(os.sched_getaffinity(0))
    results: list[_Result] = []
    waiting: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="backup") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > _AHEAD * threads:
                    results.append(waiting.popleft().result())
            return results + [future.result() for future in waiting]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def write_at(descriptor: int, content: Buffer, offset: int) -> None:
    """Write all of it at `offset`. Raises `OSError`."""
    left = memoryview(content).cast("B")
    while left:
        done = os.pwrite(descriptor, left, offset)
        left, offset = left[done:], offset + done


def read_at(descriptor: int, num_bytes: int, offset: int) -> bytes:
    """Bytes from `offset`; fewer only at the end of the file. Raises `OSError`."""
    found = os.pread(descriptor, num_bytes, offset)
    while found and len(found) < num_bytes:  # the kernel gives 2 GiB at most at once
        more = os.pread(descriptor, num_bytes - len(found), offset + len(found))
        if not more:
            break
        found += more
    return found


@contextlib.contextmanager
def open_file(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """A descriptor of a file; no symbolic link is followed to it, no pipe waited for. Raises `OSError`."""
    descriptor = os.open(path, flags | OPEN_FLAGS, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_file(path: Path) -> bytes:
    """All of a small file. Raises `OSError`."""
    with open_file(path) as descriptor:
        return read_at(descriptor, os.fstat(descriptor).st_size, 0)


@contextlib.contextmanager
def storage(path: Path, doing: str) -> Iterator[None]:
    """Turn an `OSError` into a `StorageError` that says where and what to do."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        place = error.filename if isinstance(error.filename, str) else path
        if error.errno == errno.ELOOP:
            raise StorageError(
                f"{place}: {doing} failed: it is a link, and none is followed; put the file itself in its place"
            ) from error
        raise StorageError(
            f"{place}: {doing} failed: {error.strerror or error}; check the disk, its space and the permissions, "
            "and run the same command again: nothing half done stays in the way"
        ) from error


class Counter:
    """Bytes done, summed over threads and told to `progress`."""

    def __init__(self, progress: Progress | None, total_bytes: int) -> None:
        self._progress, self._total, self._lock = progress, total_bytes, Lock()
        self.done_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count so many bytes more."""
        with self._lock:
            self.done_bytes += num_bytes
            if self._progress is not None:
                self._progress(self.done_bytes, self._total)
