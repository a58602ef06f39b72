"""Segments: files of many objects each, which appear whole and never change.

    16 bytes   magic
    records    48 bytes (`RECORD`: SHA-256, xxh3_64, size) and the bytes of the object, one after another
    index      `ROW` for each record: the same 48 bytes, and where the object begins
    24 bytes   magic of the end, number of records, xxh3_64 of the index

All numbers are little endian. Where the index is damaged or cut off, the records lead from one to the next. The xxh3_64
is there to find a chunk by what a packed set knows of it; it vouches for nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import struct
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpctrain.durable import fsync_path
from hpctrain.h5.filters import Buffer
from hpctrain.h5.index import digest_of
from hpctrain.resilience.faults import fault_point
from hpctrain.staging.backup.work import open_file, read_at, write_at

SEGMENT_BYTES: Final = 256 << 20
SUFFIX: Final = ".segment"
PARTIAL: Final = ".partial"

RECORD: Final = np.dtype([("digest", "V32"), ("xxh3", "<u8"), ("size", "<u8")])
ROW: Final = np.dtype([("digest", "V32"), ("xxh3", "<u8"), ("size", "<u8"), ("offset", "<u8")])
Rows = npt.NDArray[Any]
"""Records of a segment; `ROW`, shape (records,)."""

_MAGIC: Final = b"hpctrain segm 1\n"
_END: Final = struct.Struct("<8sQQ")
_END_MAGIC: Final = b"segm end"


def name_of(content: Buffer) -> bytes:
    """The name of an object: the SHA-256 of its bytes."""
    return hashlib.sha256(content).digest()


def read_rows(path: Path) -> tuple[Rows, str | None]:
    """The records of a segment, and in words what is wrong with it, if so; raises `OSError`.

    Rows say where objects should be; what is read there is verified when it is used.
    """
    with open_file(path) as descriptor:
        size = os.fstat(descriptor).st_size
        rows = _indexed_rows(descriptor, size)
        if rows is not None:
            return rows, None
        rows = _walked_rows(descriptor, size)
    return rows, f"{path}: its index is damaged or cut off; {len(rows)} records were found without it"


def _indexed_rows(descriptor: int, size: int) -> Rows | None:
    end = read_at(descriptor, _END.size, max(0, size - _END.size))
    if len(end) != _END.size:
        return None
    magic, count, digest = _END.unpack(end)
    begin = size - _END.size - count * ROW.itemsize
    if magic != _END_MAGIC or begin < len(_MAGIC):
        return None
    index = read_at(descriptor, count * ROW.itemsize, begin)
    if digest_of(index) != digest:
        return None
    rows = np.frombuffer(index, ROW)
    # Places outside can only be meant to harm: what is read there is as long as they say.
    is_inside = (rows["offset"] <= begin) & (rows["size"] <= begin - rows["offset"].clip(max=begin))
    return rows if np.all(is_inside) else None


def _walked_rows(descriptor: int, size: int) -> Rows:
    found: list[tuple[bytes, int, int, int]] = []
    at = len(_MAGIC)
    while at + RECORD.itemsize <= size:
        record = np.frombuffer(read_at(descriptor, RECORD.itemsize, at), RECORD)[0]
        begin, num_bytes = at + RECORD.itemsize, int(record["size"])
        if begin + num_bytes > size:
            break
        found.append((record["digest"].tobytes(), int(record["xxh3"]), num_bytes, begin))
        at = begin + num_bytes
    return np.array(found, ROW)


class _Growing:
    """A segment that is being written, under a name that nobody reads."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{secrets.token_hex(8)}{SUFFIX}"
        self.partial = folder / f".{self.path.name}{PARTIAL}"
        self.rows: list[tuple[bytes, int, int, int]] = []
        self.end = len(_MAGIC)
        self.writers = 0
        fault_point("backup.write")
        self.descriptor = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        write_at(self.descriptor, _MAGIC, 0)

    def seal(self) -> int:
        """Add the index, make it durable and give it its name; returns its bytes."""
        index = np.array(self.rows, ROW).tobytes()
        tail = index + _END.pack(_END_MAGIC, len(self.rows), digest_of(index))
        fault_point("backup.write")
        write_at(self.descriptor, tail, self.end)
        os.fsync(self.descriptor)
        fault_point("backup.write")
        os.rename(self.partial, self.path)
        fsync_path(self.path.parent)
        self.close()
        return self.end + len(tail)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class SegmentWriter:
    """Writes objects into new segments of a folder; `put` may be called by many threads at once.

    A segment is sealed by the thread that ends the last write into it once it is full, the last one by `finish`; only
    then are the objects durable. `abandon` removes what is not sealed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._current: _Growing | None = None
        self._growing: set[_Growing] = set()
        self.sealed_bytes = 0

    def put(self, name: bytes, content: Buffer) -> None:
        """Write one object. Raises `OSError`."""
        xxh3, size = digest_of(content), memoryview(content).nbytes
        segment, at = self._reserve(name, xxh3, size)
        head = np.array([(name, xxh3, size)], RECORD).tobytes()
        fault_point("backup.write")
        write_at(segment.descriptor, head, at)
        fault_point("backup.write")
        write_at(segment.descriptor, content, at + len(head))
        self._done(segment)

    def finish(self) -> None:
        """Seal what is left; no `put` may be under way. Raises `OSError`."""
        self._current = None
        for segment in list(self._growing):
            self._seal(segment)

    def abandon(self) -> None:
        """Remove segments that are not sealed; for an error that ended the work."""
        for segment in self._growing:
            segment.close()
            with contextlib.suppress(OSError):
                segment.partial.unlink()
        self._growing.clear()

    def _reserve(self, name: bytes, xxh3: int, size: int) -> tuple[_Growing, int]:
        """A segment with room, and where in it the record goes."""
        with self._lock:
            if self._current is None:
                self._current = _Growing(self._folder)
                self._growing.add(self._current)
            segment, at = self._current, self._current.end
            segment.rows.append((name, xxh3, size, at + RECORD.itemsize))
            segment.end += RECORD.itemsize + size
            segment.writers += 1
            if segment.end >= SEGMENT_BYTES:
                self._current = None
            return segment, at

    def _done(self, segment: _Growing) -> None:
        with self._lock:
            segment.writers -= 1
            is_complete = segment.writers == 0 and segment is not self._current
        if is_complete:
            self._seal(segment)

    def _seal(self, segment: _Growing) -> None:
        num_bytes = segment.seal()
        with self._lock:
            self._growing.discard(segment)
            self.sealed_bytes += num_bytes
