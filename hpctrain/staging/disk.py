"""What a mirror must know of the filesystem under it: its kind, its space, the memory it takes, and making holes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_MEMORY_KINDS: Final = ("tmpfs", "ramfs")
_MEMORY_DEVICES: Final = ("/dev/zram", "/dev/ram")
_RESERVED_PART: Final = 100
_PUNCH_HOLE: Final = 0x02  # linux/falloc.h: FALLOC_FL_PUNCH_HOLE, which goes with ...
_KEEP_SIZE: Final = 0x01  # ... FALLOC_FL_KEEP_SIZE
_NO_HOLES: Final = (errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class Mount:
    """What is mounted: the kind of filesystem ("ext4") and its source ("/dev/sda1"); empty where it is not known."""

    kind: str = ""
    source: str = ""

    @property
    def is_memory(self) -> bool:
        """Whether what is stored there takes memory of the node."""
        return self.kind in _MEMORY_KINDS or self.source.startswith(_MEMORY_DEVICES)


def mount_of(descriptor: int, process: Path = Path("/proc/self")) -> Mount:
    """The mount that an open file or directory lies on (proc(5): mnt_id of /proc/PID/fdinfo, and /proc/PID/mountinfo).

    By its number and not by path or device: right for subvolumes and for mounts over mounts.
    """
    try:
        facts = (process / "fdinfo" / str(descriptor)).read_text(encoding="ascii")
        number = facts.partition("mnt_id:")[2].split(maxsplit=1)[0]
        lines = (process / "mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except (OSError, IndexError):
        return Mount()
    for line in lines:
        first, _, last = line.partition(" - ")
        if first.split(" ", 1)[0] == number:
            kind, source = last.split(" ")[:2]
            return Mount(kind, source)
    return Mount()


@dataclass(frozen=True)
class Space:
    """Of a filesystem: all of it, what this user may still take, and the bytes of a block."""

    total_bytes: int
    free_bytes: int
    block_bytes: int


def space_of(descriptor: int) -> Space:
    """The space of the filesystem that an open file or directory lies on. Raises `OSError`.

    A memory filesystem without a limit (ramfs, tmpfs with size=0) has as much as there is memory.
    """
    found = os.fstatvfs(descriptor)
    if found.f_blocks == 0:
        available_bytes = memory_available_bytes()
        return Space(available_bytes, available_bytes, found.f_frsize or found.f_bsize)
    return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, found.f_frsize)


def reserve_bytes(space: Space) -> int:
    """What is left free of a disk that others use too: 1 % of it."""
    return space.total_bytes // _RESERVED_PART


def quota_by_space(space: Space, is_memory: bool, present_bytes: int) -> int:
    """What may be stored where nobody set a quota; `present_bytes` of it are there already, and count as free.

    On a disk: what is free but for a reserve. In memory: that, or half of what memory is available.
    """
    free_bytes = space.free_bytes + present_bytes
    if is_memory:
        return max(0, min(free_bytes, (memory_available_bytes() + present_bytes) // 2))
    return max(0, free_bytes - reserve_bytes(space))


def memory_available_bytes(root: Path = Path("/")) -> int:
    """Memory to be had: what the kernel calls available, or less where a control group of this process has less left.

    In a control group, file pages that are not in use count as free, as they do for the kernel.
    """
    meminfo = (root / "proc/meminfo").read_text(encoding="ascii")
    available_bytes = int(meminfo.partition("MemAvailable:")[2].split(maxsplit=1)[0]) * 1024
    for folder in _memory_cgroups(root):
        for limit_name, usage_name, reclaimable_name in (
            ("memory.max", "memory.current", "inactive_file"),  # version 2
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, ValueError):  # no such file, "max"
                limit_bytes, used_bytes = (_number(folder / name) for name in (limit_name, usage_name))
                left_bytes = limit_bytes - used_bytes + _of_stat(folder / "memory.stat", reclaimable_name)
                available_bytes = max(0, min(available_bytes, left_bytes))
    return available_bytes


def _memory_cgroups(root: Path) -> Iterator[Path]:
    """Folders of this process' control groups of memory and of all above them, of both versions (cgroups(7)).

    In a container the path is the host's, and not all of them are there.
    """
    top = root / "sys/fs/cgroup"
    yield from (top, top / "memory")
    with contextlib.suppress(OSError):
        own = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape")
        for line in own.splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or "memory" in controllers.split(","):
                place = PurePosixPath(path.lstrip("/"))
                start = top if number == "0" else top / "memory"
                if ".." not in place.parts:  # else outside this container's view
                    yield from (start / part for part in (place, *place.parents) if part.parts)


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))


def _of_stat(path: Path, name: str) -> int:
    """A value of a file of "NAME VALUE" lines; 0 where it is not there."""
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


def punch_hole(descriptor: int, offset: int, num_bytes: int) -> None:
    """Give a part of a file back to the filesystem; it reads as zeros then, and the size stays.

    Whole blocks are given back, parts of blocks at its ends are zeroed. Raises `OSError`, with `EOPNOTSUPP` where the
    filesystem cannot do it (`can_punch_holes`).
    """
    while _fallocate()(descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, num_bytes) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def can_punch_holes(descriptor: int) -> bool:
    """Whether holes can be made in this file: tried past its end, where there is nothing. Raises `OSError`."""
    end = os.fstat(descriptor).st_size
    try:
        punch_hole(descriptor, end, 1)
    except OSError as error:
        if error.errno in _NO_HOLES:
            return False
        raise
    return True


@functools.cache
def _fallocate() -> Callable[[int, int, int, int], int]:
    """fallocate(2), which `os` does not have (its posix_fallocate only adds)."""
    function = ctypes.CDLL(None, use_errno=True).fallocate
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function
