"""A lock of the kernel on a file: it ends with its holder, and a new holder may replace the file under a stuck one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from hpctrain.errors import StorageError

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Lustre mounted without `-o flock`, NFS without its lock service."""

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_POLL_S = 0.02


class LockFile:
    """The lock of the file that is at `path`. The file is made when missing, and never removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self.is_real = True
        """False where the filesystem has no locks: then every taker gets one, and it says nothing about others."""

    @property
    def is_held(self) -> bool:
        """Whether this object holds a lock; the file may have been replaced since."""
        return self._descriptor is not None

    def try_take(self) -> bool:
        """Take the lock if no process holds it. Raises `StorageError` where there can be no lock."""
        while True:
            descriptor = _open(self._path, _FLAGS)
            try:
                taken = self._try_lock(descriptor)
            except StorageError:
                os.close(descriptor)
                raise
            # Between opening and locking the file may have been replaced: what counts is the lock of the one there now.
            if _is_at(self._path, descriptor):
                break
            os.close(descriptor)
        if taken:
            self._descriptor = descriptor
        else:
            os.close(descriptor)
        return taken

    def replace(self) -> None:
        """Put a locked file in place of the one there, whose holder keeps a lock that nobody asks for any more.

        The new file is locked before it gets the name, so that nobody else can be the first to lock it. Of two that do
        this at once the last one wins and neither knows: callers hold an `exclusive` section. Raises `StorageError`.
        """
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        descriptor = _open(temporary, _FLAGS | os.O_EXCL)
        try:
            self._try_lock(descriptor)
            os.replace(temporary, self._path)
        except OSError as error:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise error if isinstance(error, StorageError) else _failure(self._path, error) from error
        self._descriptor = descriptor

    def _try_lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise _failure(self._path, error) from error
            self.is_real = False
        return True

    def is_replaced(self) -> bool:
        """Whether the lock held here is that of a file which is no longer at the path."""
        return self._descriptor is not None and not _is_at(self._path, self._descriptor)

    def release(self) -> None:
        """Give the lock back; without one nothing happens."""
        if self._descriptor is not None:
            # The file stays: removing it would let two processes lock two files.
            os.close(self._descriptor)
            self._descriptor = None


@contextlib.contextmanager
def exclusive(path: Path, timeout_s: float) -> Iterator[None]:
    """A section that one process at a time is in; meant to last milliseconds.

    Raises `TimeoutError` when another stays in it for `timeout_s`, and `StorageError`.
    """
    lock, deadline_s = LockFile(path), time.monotonic() + timeout_s
    while not lock.try_take():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path}: held by another process for {timeout_s:g} s")
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        lock.release()


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o644)
    except OSError as error:
        raise _failure(path, error) from error


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _failure(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path}: cannot be made and locked: {error.strerror}; choose another --dir")
