"""Locks of the kernel on single bytes of a file: of an open file description (fcntl(2), F_OFD_SETLK).

Such a lock belongs to one `open`, not to the process: two descriptors that were opened apart exclude each other within
a process as they do between processes, and the lock ends with its holder, however that ends. There is no waiting.
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import Final

_FLOCK: Final = struct.Struct("hhqqi4x")
"""struct flock of 64-bit Linux: type, whence, start, length, pid (0 for these locks)."""


def try_lock(descriptor: int, byte: int, *, exclusive: bool) -> bool:
    """Lock a byte, shared or exclusive; False where another holder is in the way. Raises `OSError`."""
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int, byte: int) -> None:
    """Give the lock back. Raises `OSError`."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def is_locked(descriptor: int, byte: int) -> bool:
    """Whether another holder has the byte locked; takes nothing. Raises `OSError` where there are no locks."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    answer: bytes = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
