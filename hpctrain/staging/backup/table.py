"""The table of a store's objects: where each lies in the segments, as they were at one moment."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, StorageError
from hpctrain.staging.backup.segments import ROW, SUFFIX, Rows, name_of, read_rows
from hpctrain.staging.backup.work import OPEN_FLAGS, read_at, storage

MARKS: Final = ".damaged"
"""Beside a segment, after its name: where the records begin that a check found damaged."""


class MissingObjectError(DataError):
    """The store has no right bytes under a name."""


class _Descriptor:
    """Of the segment that a thread read last; closed with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = os.open(path, os.O_RDONLY | OPEN_FLAGS)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.number)


class Table:
    """All records of all segments; nothing changes in it, so that many threads read with one.

    Attributes:
        names: of the segments.
        rows: `ROW`, shape (records,).
        owners: the segment of each, a number in `names`; int32, shape (records,).
        damaged: whether a check found a record damaged: it does not count; bool, shape (records,).
        problems: in words, by segment: those whose index is not as it should be.
        unreadable: the same of those that could not be read at all.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._local = threading.local()
        self.problems: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}
        self.names = segment_names(folder)
        parts = [self._load(name) for name in self.names]
        self.rows: Rows = np.concatenate([np.zeros(0, ROW), *parts])
        self.owners = np.repeat(np.arange(len(parts), dtype=np.int32), [len(rows) for rows in parts])
        marks = [
            np.isin(rows["offset"], read_marks(folder, name))
            for name, rows in zip(self.names, parts, strict=True)
        ]
        self.damaged: npt.NDArray[np.bool_] = np.concatenate([np.zeros(0, np.bool_), *marks])
        self._index: dict[bytes, int] = {}
        self._twice: dict[bytes, list[int]] = {}  # a prune that was killed leaves two records of a name
        digests = self.rows["digest"].tobytes()
        for row in np.flatnonzero(~self.damaged).tolist():
            name = digests[32 * row : 32 * row + 32]
            if self._index.setdefault(name, row) != row:
                self._twice.setdefault(name, []).append(row)

    def _load(self, name: str) -> Rows:
        try:
            rows, problem = read_rows(self._folder / name)
        except OSError as error:
            self.unreadable[name] = f"{self._folder / name}: cannot be read: {error.strerror}"
            return np.zeros(0, ROW)
        if problem is not None:
            self.problems[name] = problem
        return rows

    def __contains__(self, name: bytes) -> bool:
        return name in self._index

    def row_of(self, name: bytes) -> int | None:
        """The record to use for a name: the first; of several the first good one. None where there is none."""
        rows = self._rows_of(name)
        if len(rows) < 2:
            return next(iter(rows), None)
        return next((row for row in rows if self.read_row(row) is not None), rows[0])

    def _rows_of(self, name: bytes) -> list[int]:
        row = self._index.get(name)
        return [] if row is None else [row, *self._twice.get(name, ())]

    def read(self, name: bytes) -> bytes:
        """The bytes of an object, verified; raises `MissingObjectError`, and `StorageError` when reading fails."""
        rows = self._rows_of(name)
        for row in rows:
            content = self.read_row(row)
            if content is not None:
                return content
        if rows:
            raise MissingObjectError(f"object {name.hex()} is damaged: {self.describe(rows[0])}")
        raise MissingObjectError(f"object {name.hex()} is missing")

    def read_row(self, row: int) -> bytes | None:
        """The bytes of a record; None where they do not match its name, or are not there."""
        record = self.rows[row]
        path = self._folder / self.names[self.owners[row]]
        try:
            if getattr(self._local, "open", None) is None or self._local.open.path != path:
                self._local.open = _Descriptor(path)
            content = read_at(self._local.open.number, int(record["size"]), int(record["offset"]))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(
                f"{self.describe(row)} cannot be read: {error.strerror}; check the disk, and run again"
            ) from error
        return content if name_of(content) == record["digest"].tobytes() else None

    def describe(self, row: int) -> str:
        """Where a record is, for messages."""
        record = self.rows[row]
        name = self.names[self.owners[row]]
        return f"{self._folder / name}, byte {record['offset']}, {record['size']} bytes"

    def find_chunk(self, xxh3: int, size: int) -> Iterator[bytes]:
        """Objects of this size and xxh3_64, verified by their names."""
        rows = np.flatnonzero((self.rows["xxh3"] == np.uint64(xxh3)) & (self.rows["size"] == np.uint64(size)))
        for row in rows.tolist():
            content = self.read_row(row)
            if content is not None:
                yield content


def segment_names(folder: Path) -> tuple[str, ...]:
    """Names of the segments that are there, sorted; raises `StorageError`."""
    if not folder.is_dir():
        return ()
    with storage(folder, "listing"):
        return tuple(sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(SUFFIX)))


def read_marks(folder: Path, segment: str) -> list[int]:
    """Where the damaged records of a segment begin, as the last check found."""
    try:
        found = json.loads((folder / f"{segment}{MARKS}").read_bytes())
        return [int(offset) for offset in found]
    except (OSError, ValueError, TypeError):  # none, or only a hint lost: the next check finds them again
        return []
