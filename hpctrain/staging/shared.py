"""The shared files as the agent reads them: slot by slot, verified, with patience, and with an eye on changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.chunks import fresh, pread_into
from hpctrain.h5.filters import Buffer
from hpctrain.h5.index import digest_of
from hpctrain.h5.retry import OpenFiles
from hpctrain.resilience.faults import fault_point
from hpctrain.staging.stored import StoredChunks

_MEND: Final = "put the old file back, or begin a new run"


class SharedFiles:
    """Reads slots from the shared files; safe to use from several threads.

    `drop_pages`: the kernel's pages are given back at once, so that a large set does not push out what others need.
    `warn` is told of files that had to be read again.
    """

    def __init__(
        self, stored: StoredChunks, warn: Callable[[str], None], *, drop_pages: bool = False
    ) -> None:
        self._stored, self._drop_pages = stored, drop_pages
        self._files = OpenFiles(_open, warn)

    def read(self, slot: int) -> tuple[Buffer, int]:
        """The stored bytes of a slot and their digest, verified where one is known.

        Raises `StorageError` (class io) where reading fails for good, or the file was changed, cut or replaced since
        the set was opened; `DataError` where an unchanged file holds other bytes than its digest says.
        """
        stored, size = self._stored, int(self._stored.sizes[slot])
        path = stored.paths[stored.files[slot]]
        out = fresh(size)
        try:
            done = self._files.read(path, self._read_into, out, int(stored.offsets[slot]))
        except OSError as error:
            raise StorageError(
                f"{stored.describe(slot)} cannot be read: {error.strerror or error}; check the filesystem and run again"
            ) from error
        digest = digest_of(out.data)
        wrong = done != size or (stored.has_digests and digest != int(stored.digests[slot]))
        if wrong or not stored.has_digests:  # then nothing else tells that the bytes are other ones now
            self._refuse_changed(slot, by_name=wrong)
        if wrong:
            what = (
                f"the file ends after {done} of these bytes" if done != size else "the digest does not match"
            )
            raise DataError(
                f"{stored.describe(slot)}: {what}; `hpctrain verify` names all that is damaged, "
                "`hpctrain restore --repair` mends it from a backup"
            )
        return out.data, digest

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def _read_into(self, descriptor: int, out: npt.NDArray[np.uint8], offset: int) -> int:
        fault_point("staging.read")
        done = pread_into(descriptor, out, offset)
        if self._drop_pages:
            os.posix_fadvise(descriptor, offset, len(out), os.POSIX_FADV_DONTNEED)
        return done

    def _refuse_changed(self, slot: int, *, by_name: bool) -> None:
        """Raise `StorageError` where the open file is not the one that the set was opened with.

        `by_name`: nor the one that has its name now, which costs a look into the directory.
        """
        file = int(self._stored.files[slot])
        path, key = self._stored.paths[file], tuple(self._stored.file_keys[file].tolist())
        try:
            found = [self._files.read(path, os.fstat), *([os.stat(path)] if by_name else [])]
        except OSError as error:
            raise StorageError(f"{path}: cannot be looked at: {error.strerror}; {_MEND}") from error
        if any((one.st_size, one.st_mtime_ns, one.st_ino) != key for one in found):
            raise StorageError(
                f"{path}: changed since this run looked at it (size, time or file are others); {_MEND}"
            )


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
