"""A mirror: a sparse copy of a set's shared files in a directory of the node, and the map of which chunks are there.

One process owns it (the node's agent) and writes; others read its files themselves, by pread. A chunk is written, then
its digest, then its byte of the map: within one boot the map never outruns the data. It is a hint all the same and no
proof: every chunk is verified whenever it is read, so that what a power cut left half written is found.

A reader holds a lock on the chunk's byte of the map (`staging.mirror.byte_locks`) while it reads; what is held is not
evicted.

A set without digests gets those of its chunks as they were first read. They are kept bound to the size, time and inode
of their file: a chunk of an older version of a file does not verify, whoever kept it and whoever reads it.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import Counter
from pathlib import Path

from hpctrain.errors import StorageError
from hpctrain.h5.filters import Buffer
from hpctrain.staging import disk
from hpctrain.staging.mirror.byte_locks import try_lock, unlock
from hpctrain.staging.mirror.files import write_all
from hpctrain.staging.mirror.holes import Holes
from hpctrain.staging.mirror.reader import ABSENT, PRESENT, MirrorReader
from hpctrain.staging.mirror.record import OnChanged, Record, earlier_record
from hpctrain.staging.stored import StoredChunks


class Mirror(MirrorReader):
    """The mirror of one set under `directory` on the node; made where it does not exist.

    Safe to use from several threads, but not across a fork. Chunks of no bytes are always present.

    Args:
        directory: a configured one; the mirror lies in `DIRECTORY/hpctrain-UID/IDENTITY`.
        stored: the set's chunks.
        quota_bytes: of chunks that may lie in it; None: by what is free when it is opened.

    Raises:
        ConfigError: the directory belongs to somebody else, is a link, or others may write to it.
        StorageError: it cannot be made or opened, or its filesystem has no locks.

    Attributes:
        path: of the mirror.
        is_owner: whether this object owns it (`take`): only then may it change it.
        is_memory: whether it takes memory of the node (tmpfs).
        quota_bytes: the quota that holds. In memory, without one asked for: what is free there or half of what memory
            is available, whichever is less; on a disk: what is free but for 1 % of the disk. What the mirror holds
            already counts as free.
    """

    def __init__(self, directory: Path, stored: StoredChunks, quota_bytes: int | None = None) -> None:
        super().__init__(directory, stored)
        self.is_owner = False
        self.is_memory = disk.mount_of(self._files.map).is_memory
        self._asked_bytes = quota_bytes
        try:
            self.quota_bytes = self._effective_quota()
        except OSError as error:
            self.close()
            raise StorageError(f"{directory}: cannot be looked at: {error.strerror or error}") from error
        self._lock = threading.Lock()
        # Under its lock, for the owner:
        self._present_bytes = 0
        self._writing: Counter[int] = Counter()
        self._holes: Holes | None = None
        """None where the filesystem cannot make holes: then nothing is evicted, because that would free nothing."""

    @property
    def present_bytes(self) -> int:
        """Of the chunks that are there. Raises `OSError`."""
        return self._present_bytes if self.is_owner else super().present_bytes

    def take(self) -> bool:
        """Become the owner; False where another process is it (or another object of this one), or the mirror has gone.

        Raises `OSError` where the disk fails.
        """
        with self._lock:
            if self.is_owner:
                return True
            if not try_lock(self._files.owner, 0, exclusive=True):
                return False
            if self.is_deleted():  # by whoever held the lock until now
                unlock(self._files.owner, 0)
                return False
            self._present_bytes = super().present_bytes
            if disk.can_punch_holes(self._files.map):
                stored, space = self._stored, disk.space_of(self._files.map)
                self._holes = Holes(stored.files, stored.offsets, self._sizes, space.block_bytes)
            self.quota_bytes = self._effective_quota()
            self.is_owner = True
        return True

    def adopt(self, on_changed: OnChanged) -> str | None:
        """Look at what an earlier owner left, and say in words what of it does not hold; to be called after `take`.

        A mirror without its record, or with a damaged one, is emptied. After a restart of the node everything is kept,
        because it is verified when it is read. Where the shared files of a set without digests have changed, the mirror
        is emptied ("restage") or `StorageError` is raised ("stop"). A disk that takes nothing is told of in words too.
        """
        self._check_owner()
        found, problem = earlier_record(self._files.folder, self._stored, on_changed, self.present_bytes > 0)
        record = Record.of(self._stored, self.quota_bytes)
        try:
            if found is None:
                self._begin_anew(record)
            elif found != record:
                if found.boot_id != record.boot_id:
                    problem = (
                        "filled before the node was restarted: its chunks are verified before they are used"
                    )
                record.write(self._files.folder)
        except OSError as error:
            # No harm: what it holds is verified before use, and the next owner finds the same as this one, or nothing.
            problem = f"its record cannot be written: {error.strerror or error}; what it holds is verified before use"
        return None if problem is None else f"{self.path}: {problem}"

    def write(self, slot: int, stored: Buffer, digest: int) -> None:
        """Keep a verified chunk and then mark it present; one that is there already is left alone.

        Several threads may write at once. The owner asks `room_bytes` before; a write that would go beyond the quota
        all the same raises `OSError` with `EDQUOT`. Raises `OSError` (a full disk among others); the chunk is not
        there then, and takes no space.
        """
        self._check_owner()
        view, size = memoryview(stored), int(self._sizes[slot])
        if view.nbytes != size:
            raise ValueError(f"{view.nbytes} bytes are not those of {self._stored.describe(slot)}")
        if not size or not self._begin_write(slot):
            return
        is_marked = False
        try:
            file = int(self._stored.files[slot])
            write_all(self._files.data[file], view.cast("B"), int(self._stored.offsets[slot]))
            if not self._stored.has_digests:
                write_all(self._files.digests, (digest ^ self._salts[file]).to_bytes(8, "little"), 8 * slot)
            with self._lock:
                if not self._is_marked(slot):  # by another thread
                    write_all(self._files.map, PRESENT, slot)
                    self._present_bytes += size
                is_marked = True
        finally:
            self._end_write(slot, is_marked)

    def forget(self, slot: int) -> None:
        """Drop a chunk whose bytes turned out to be damaged, even while it is read. Raises `OSError`."""
        self._check_owner()
        with self._lock:
            if self._sizes[slot] and self._is_marked(slot):
                self._drop(slot)

    def evict(self, slot: int) -> bool:
        """Give up a chunk, and its space. Raises `OSError`.

        Returns False, and changes nothing, where a reader holds it, it is not there (or has no bytes), or the
        filesystem cannot make holes.
        """
        self._check_owner()
        with self._lock:
            if (
                self._holes is None
                or not self._sizes[slot]
                or slot in self._writing
                or not self._is_marked(slot)
            ):
                return False
            if not try_lock(self._files.map, slot, exclusive=True):
                return False
            try:
                self._drop(slot)
            finally:
                unlock(self._files.map, slot)
        return True

    def room_bytes(self) -> int:
        """What may still be written: by the quota, and by what is free on the disk now. Raises `OSError`."""
        space = disk.space_of(self._files.map)
        is_shared = self._asked_bytes is None and not self.is_memory
        free_bytes = space.free_bytes - (disk.reserve_bytes(space) if is_shared else 0)
        return max(0, min(self.quota_bytes - self.present_bytes, free_bytes))

    def shrink(self) -> None:
        """Take no more than is there now: the disk is full."""
        with self._lock:
            self.quota_bytes = min(self.quota_bytes, self.present_bytes)

    def sync(self) -> None:
        """Make everything written durable. Raises `OSError`."""
        self._files.sync()

    def close(self) -> None:
        """Close the files and give up the ownership; the mirror stays. Nobody may be reading or writing any more."""
        self.is_owner = False
        super().close()

    def _check_owner(self) -> None:
        if not self.is_owner:
            raise ValueError(
                f"{self.path}: only the owner may do that, and this is not it (`take` comes first)"
            )

    def _effective_quota(self) -> int:
        if self._asked_bytes is not None:
            return self._asked_bytes
        return disk.quota_by_space(disk.space_of(self._files.map), self.is_memory, self.present_bytes)

    def _begin_anew(self, record: Record) -> None:
        with self._lock:
            try:
                self._files.empty()
            finally:
                self._present_bytes = super().present_bytes
        write_all(self._files.sizes, self._sizes.tobytes(), 0)
        record.write(self._files.folder)

    def _begin_write(self, slot: int) -> bool:
        """Count a write against the quota; False where the chunk is there already."""
        with self._lock:
            if self._is_marked(slot):
                return False
            under_way = {slot, *self._writing}
            wanted_bytes = self._present_bytes + sum(int(self._sizes[one]) for one in under_way)
            if wanted_bytes > self.quota_bytes:
                raise OSError(
                    errno.EDQUOT, f"{wanted_bytes} bytes in all, and the quota is {self.quota_bytes}"
                )
            self._writing[slot] += 1
        return True

    def _end_write(self, slot: int, is_marked: bool) -> None:
        with self._lock:
            self._writing[slot] -= 1
            if not self._writing[slot]:
                del self._writing[slot]
            with contextlib.suppress(OSError):  # the first error is the one to hear of
                if not is_marked and not self._is_marked(slot):
                    self._free(slot)

    def _drop(self, slot: int) -> None:
        """From the map, and then from the disk; under the lock."""
        write_all(self._files.map, ABSENT, slot)
        self._present_bytes -= int(self._sizes[slot])
        self._free(slot)

    def _free(self, slot: int) -> None:
        """Give back the space of a chunk that is not marked, and of its blocks as far as nothing else is in them."""
        if self._holes is not None and slot not in self._writing:
            begin, end = self._holes.hole(slot, lambda one: one in self._writing or self._is_marked(one))
            disk.punch_hole(self._files.data[self._stored.files[slot]], begin, end - begin)
