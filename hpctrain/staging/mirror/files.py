"""The files of a mirror: `DIRECTORY/hpctrain-UID/IDENTITY/`.

    N.data        a sparse file for the N-th shared file, of its size: a chunk lies at the same place in both
    present.map   a byte per slot: 1 where the chunk is there
    digests.u64   xxh3_64 per slot, for sets without digests of their own
    sizes.i64     bytes per slot, for those who look at the mirror without opening the set
    mirror.json   what the mirror is of, and which boot filled it
    owner.lock    its first byte is locked by the owner

Making, mending and removing a mirror happen under a lock beside it, so that nobody opens one half made.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hpctrain.resilience.faults import fault_point
from hpctrain.staging.mirror.byte_locks import is_locked, try_lock
from hpctrain.staging.private import (
    by_descriptor,
    open_private,
    open_private_at,
    open_private_file,
    private_path,
)
from hpctrain.staging.stored import StoredChunks

MAP, DIGESTS, SIZES, OWNER = "present.map", "digests.u64", "sizes.i64", "owner.lock"
_GUARD: Final = "mirrors.lock"
_GUARD_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.01
PLANTED: Final = "data"
INSTEAD: Final = "choose another staging directory"


class MirrorFiles:
    """The open files of the mirror of a set under `directory`; made where they are missing.

    A file whose size is not that of the set is of another layout, or damaged: it is made anew.
    Raises `ConfigError` (see `staging.private`) and `OSError`.

    Attributes:
        path: of the mirror's directory.
        directory, map, digests, sizes, owner: descriptors.
        data: descriptors of the data files, by the number of the shared file.
    """

    def __init__(self, directory: Path, stored: StoredChunks) -> None:
        self.path = private_path(directory, stored.identity)
        self._descriptors: list[int] = []
        self._map_bytes = stored.num_slots
        self._digests_bytes = 0 if stored.has_digests else 8 * stored.num_slots
        try:
            with guarded(directory) as parent:
                self.directory = open_mirror(parent, self.path)
                self._descriptors.append(self.directory)
                self._open_all(stored)
            is_locked(self.map, 0)  # where the filesystem has no locks, hear of it now
        except BaseException:
            self.close()
            raise

    def _open_all(self, stored: StoredChunks) -> None:
        """The map comes last: what it does not account for takes no space, whenever this is cut off."""
        self.owner, self.map = self._open(OWNER), self._open(MAP)
        is_new = os.fstat(self.map).st_size != self._map_bytes
        self.data = [
            self._open_sized(f"{number}.data", num_bytes, is_new)
            for number, num_bytes in enumerate(stored.file_sizes.tolist())
        ]
        self.digests = self._open_sized(DIGESTS, self._digests_bytes, is_new)
        self.sizes = self._open_sized(SIZES, 8 * stored.num_slots, is_new)
        if is_new:
            _make_anew(self.map, self._map_bytes)

    def is_deleted(self) -> bool:
        """Whether the directory or a file of it was removed or moved away since it was opened."""
        try:
            is_there = os.path.samestat(os.stat(self.path), os.fstat(self.directory))
        except FileNotFoundError:
            return True
        return not is_there or any(os.fstat(one).st_nlink == 0 for one in self._descriptors)

    @property
    def folder(self) -> Path:
        """The mirror's directory, by its descriptor: wherever it has been moved to."""
        return by_descriptor(self.directory)

    def open_map(self) -> int:
        """The map opened once more, for locks that are apart from those of other descriptors."""
        return os.open(by_descriptor(self.map), os.O_RDONLY | os.O_CLOEXEC)

    def empty(self) -> None:
        """Drop all chunks: from the map, durably, and then the data. Raises `OSError`."""
        lengths = {self.map: self._map_bytes, self.digests: self._digests_bytes}
        for descriptor in [self.map, self.digests, *self.data]:
            fault_point("staging.write")
            _make_anew(descriptor, lengths.get(descriptor, os.fstat(descriptor).st_size))
            if descriptor in lengths:
                os.fdatasync(descriptor)

    def sync(self) -> None:
        """Make everything durable, the map last. Raises `OSError`."""
        for descriptor in [*self.data, self.digests, self.map]:
            os.fdatasync(descriptor)

    def close(self) -> None:
        """Close all files."""
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # what did not reach the disk is found when it is verified
                os.close(descriptor)

    def _open(self, name: str) -> int:
        descriptor = open_private_file(self.directory, name, self.path)
        self._descriptors.append(descriptor)
        return descriptor

    def _open_sized(self, name: str, num_bytes: int, is_new: bool) -> int:
        descriptor = self._open(name)
        if is_new or os.fstat(descriptor).st_size != num_bytes:
            _make_anew(descriptor, num_bytes)
        return descriptor


def write_all(descriptor: int, content: bytes | memoryview, offset: int) -> None:
    """Write all of it at a place of a file. Raises `OSError`."""
    view = memoryview(content)
    fault_point("staging.write")
    while len(view):
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


@contextlib.contextmanager
def guarded(directory: Path, *, make: bool = True) -> Iterator[int]:
    """`DIRECTORY/hpctrain-UID` (a descriptor), in which nobody else makes or removes a mirror meanwhile.

    Raises as `private.open_private`, and `TimeoutError`.
    """
    shown = private_path(directory)
    parent = open_private(directory, planted=PLANTED, instead=INSTEAD, make=make)
    try:
        guard = open_private_file(parent, _GUARD, shown)
        try:
            _wait_for(guard, shown)
            yield parent
        finally:
            os.close(guard)
    finally:
        os.close(parent)


def _wait_for(guard: int, shown: Path) -> None:
    deadline_s = time.monotonic() + _GUARD_TIMEOUT_S
    while not try_lock(guard, 0, exclusive=True):
        if time.monotonic() > deadline_s:
            raise TimeoutError(
                f"another process has been making or removing mirrors for {_GUARD_TIMEOUT_S:g} s; find it with `fuser "
                f"{shown / _GUARD}` and end it"
            )
        time.sleep(_POLL_S)


def open_mirror(parent: int, path: Path, *, make: bool = True) -> int:
    """The directory of the mirror at `path`, in what `guarded` gave. Raises as `private.open_private_at`."""
    return open_private_at(parent, path.name, path, planted=PLANTED, instead=INSTEAD, make=make)


def _make_anew(descriptor: int, num_bytes: int) -> None:
    """Zeros, and no space taken."""
    os.ftruncate(descriptor, 0)
    os.ftruncate(descriptor, num_bytes)
