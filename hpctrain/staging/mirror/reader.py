"""Reading a mirror: by pread, verified, and with a lock on the chunk's byte of the map meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from hpctrain.errors import DataError, HpctrainError, StorageError
from hpctrain.h5.chunks import Allocate, fresh, pread_into
from hpctrain.h5.filters import Buffer
from hpctrain.h5.index import digest_of
from hpctrain.staging.mirror.byte_locks import try_lock, unlock
from hpctrain.staging.mirror.files import MirrorFiles
from hpctrain.staging.stored import StoredChunks

PRESENT: Final = b"\1"
ABSENT: Final = b"\0"


class DamagedChunkError(DataError):
    """A chunk of a mirror whose bytes are not those that were written: to be forgotten, and got again."""


class MirrorReader:
    """What everybody can do with a mirror; see `staging.mirror.Mirror`."""

    def __init__(self, directory: Path, stored: StoredChunks) -> None:
        self._stored = stored
        self._sizes: npt.NDArray[np.int64] = np.where(stored.offsets < 0, 0, stored.sizes)
        self._salts: list[int] = [xxhash.xxh3_64_intdigest(key.tobytes()) for key in stored.file_keys]
        try:
            self._files = MirrorFiles(directory, stored)
        except OSError as error:
            if isinstance(error, HpctrainError):
                raise
            raise StorageError(
                f"{directory}: no mirror can be kept there: {error.strerror or error}; mend that or choose another "
                "staging directory"
            ) from error
        self.path = self._files.path
        self._idle: list[int] = []
        """The map, opened for readers that are done: a lock of one must not end with that of another."""

    def has(self, slot: int) -> bool:
        """Whether the map says that the chunk is there. Raises `OSError`."""
        return not self._sizes[slot] or self._is_marked(slot)

    def read(self, slot: int, allocate: Allocate = fresh) -> Buffer | None:
        """The verified bytes of a chunk, in what `allocate` gave; None where it is not there, or is just going.

        Raises `DamagedChunkError` for bytes that do not match their digest, `OSError` where the disk fails.
        """
        size = int(self._sizes[slot])
        if not size:
            return b""
        try:
            descriptor = self._idle.pop()
        except IndexError:
            descriptor = self._files.open_map()
        try:
            if not try_lock(descriptor, slot, exclusive=False):
                return None
            try:
                if not self._is_marked(slot):
                    return None
                out, wanted = allocate(size), self._digest(slot)
                pread_into(self._files.data[self._stored.files[slot]], out, int(self._stored.offsets[slot]))
            finally:
                unlock(descriptor, slot)
        finally:
            self._idle.append(descriptor)
        if digest_of(out.data) != wanted:
            raise DamagedChunkError(f"{self.path}: damaged bytes for {self._stored.describe(slot)}")
        return out.data

    def present(self) -> npt.NDArray[np.bool_]:
        """Which chunks are there by the map; shape (slots,). Raises `OSError`."""
        marks = np.zeros(self._stored.num_slots, np.uint8)
        pread_into(self._files.map, marks, 0)
        found: npt.NDArray[np.bool_] = (marks == PRESENT[0]) | (self._sizes == 0)
        return found

    @property
    def present_bytes(self) -> int:
        """Of the chunks that are there. Raises `OSError`."""
        return int(self._sizes[self.present()].sum())

    def is_deleted(self) -> bool:
        """Whether the mirror was removed under its open files, which go on working. Raises `OSError`."""
        return self._files.is_deleted()

    def close(self) -> None:
        """Close the files; the mirror stays. Nobody may be reading any more."""
        while self._idle:
            os.close(self._idle.pop())
        self._files.close()

    def _is_marked(self, slot: int) -> bool:
        return os.pread(self._files.map, 1, slot) == PRESENT

    def _digest(self, slot: int) -> int:
        """What a chunk's digest should be; where none was kept, a number that none will be."""
        if self._stored.has_digests:
            return int(self._stored.digests[slot])
        entry = int.from_bytes(os.pread(self._files.digests, 8, 8 * slot), "little")
        return entry ^ self._salts[int(self._stored.files[slot])]
