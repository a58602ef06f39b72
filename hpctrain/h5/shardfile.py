"""The file beneath libhdf5 while a shard is written.

libhdf5 must not see a write fail: when metadata cannot be flushed on a full disk, closing the file ends in a
segmentation fault (HDF5 2.0.0). So it writes through this object, which keeps the first error to itself and
lets all later writes pass; `check` raises it once the control is back in Python.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.resilience.faults import fault_point


class ShardFile:
    """A new file for h5py's `fileobj` driver; `path` must not exist."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._position = 0
        self._end = 0
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise the first error that a write met: an OSError, or a KeyboardInterrupt that came meanwhile."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Close the file, without raising for what `check` has to say; nothing happens the second time."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    # What the driver calls.

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position; only from the start (SEEK_SET) or to the end (SEEK_END)."""
        self._position = offset if whence == os.SEEK_SET else self._end + offset
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def read(self, size: int) -> bytes:
        """`size` bytes at the position; zeros where nothing was written (as after an error)."""
        data = os.pread(self._descriptor, size, self._position)
        return data.ljust(size, b"\0")

    def readinto(self, buffer: memoryview) -> int:
        """Fill a buffer as `read` does."""
        buffer[:] = self.read(len(buffer))
        return len(buffer)

    def write(self, data: memoryview) -> int:
        """Write all bytes at the position, or remember the error and claim to have done so."""
        try:
            done = 0 if self._error is None else len(data)
            while done < len(data):
                fault_point("pack.write")
                done += os.pwrite(self._descriptor, data[done:], self._position + done)
        except BaseException as error:  # noqa: BLE001  (kept for `check`; a signal may arrive in here, too)
            self._error = error
        self._end = max(self._end, self._position + len(data))
        return len(data)

    def truncate(self, size: int) -> int:
        """Set the length of the file."""
        self._end = size
        try:
            if self._error is None:
                os.ftruncate(self._descriptor, size)
        except OSError as error:
            self._error = error
        return size

    def flush(self) -> None:
        """Nothing is buffered here."""
