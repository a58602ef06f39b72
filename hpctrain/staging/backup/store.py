"""A backup store: who may write, and objects in and out."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hpctrain.durable import fsync_path, replace_file
from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.h5.filters import Buffer
from hpctrain.resilience.faults import fault_point
from hpctrain.resilience.lockfile import LockFile
from hpctrain.staging.backup.segments import PARTIAL, SegmentWriter, name_of
from hpctrain.staging.backup.table import MARKS, MissingObjectError, Table, segment_names
from hpctrain.staging.backup.work import read_file, storage

FORMAT: Final = "hpctrain-backup"
VERSION: Final = 1
_ABOUT: Final = "store.json"
_LOCK: Final = "lock"


class Store:
    """A store that is open; `read`, `has` and `put` may be called by many threads at once.

    Attributes:
        path: the directory; `segments` and `sets` are those in it.
        has_locks: False where the filesystem has none, so that nobody knows who else writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.segments, self.sets = path / "segments", path / "sets"
        self.has_locks = True
        self._lock = threading.Lock()
        self._writer: SegmentWriter | None = None
        self._new: set[bytes] = set()
        self._table: Table | None = None

    @property
    def table(self) -> Table:
        """The objects, as they were when it was first asked for, or at the last `refresh`."""
        table = self._table
        if table is None:
            table = self._table = Table(self.segments)
        return table

    def refresh(self) -> None:
        """Read the indexes of all segments again."""
        self._table = Table(self.segments)

    def has(self, name: bytes) -> bool:
        """Whether the object is in the store, as far as is known."""
        return name in self.table or name in self._new

    def read(self, name: bytes) -> bytes:
        """The bytes of an object, verified.

        Raises `MissingObjectError` when no segment has them, `StorageError` when reading fails.
        """
        table = self.table
        try:
            return table.read(name)
        except MissingObjectError:
            with self._lock:  # a prune may have moved it meanwhile
                if self._table is table:  # no other thread has looked again since
                    if table.names == segment_names(self.segments):
                        raise
                    self.refresh()
        return self.table.read(name)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know of this store, in words."""
        alone = f"{self.path}: this filesystem has no locks: see to it that one backup or prune at a time is at work"
        return (*self.table.problems.values(), *(() if self.has_locks else (alone,)))

    # Writing, by the one who holds the lock.

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep all other writers out. Raises `StorageError` while another one works on the store."""
        lock = LockFile(self.path / _LOCK)
        try:
            taken = lock.try_take()
        except StorageError as error:
            raise StorageError(
                f"{self.path}: cannot be written to (its lock: {error.__cause__ or error}); check the permissions"
            ) from error
        if not taken:
            raise StorageError(
                f"{self.path}: another backup or prune is at work on this store; wait for it to end, and run again"
            )
        try:
            self.refresh()
            self.has_locks = lock.is_real
            unreadable = self.table.unreadable.values()
            if unreadable:  # what is in them might be missed, or taken for nobody's
                raise StorageError(f"{'; '.join(unreadable)}; check the disk, and run again")
            if lock.is_real:  # else they may be another's who is at work
                self._remove_partial()
            yield
        finally:
            lock.release()

    def _remove_partial(self) -> None:
        with storage(self.segments, "removing what a killed backup left"):
            for path in self.segments.glob(f".*{PARTIAL}"):
                fault_point("backup.write")
                path.unlink()

    @contextlib.contextmanager
    def writing(self) -> Iterator[SegmentWriter]:
        """Objects that are `put` in this block are durable when it ends without an error, and found after a refresh."""
        self._writer, self._new = SegmentWriter(self.segments), set()
        try:
            with storage(self.segments, "writing"):
                yield self._writer
                self._writer.finish()
        finally:
            self._writer.abandon()
            self._writer, self._new = None, set()

    def put(self, content: Buffer) -> tuple[bytes, bool]:
        """Keep an object, inside a `writing` block; gives its name, and whether it is new."""
        name = name_of(content)
        with self._lock:
            if self.has(name):
                return name, False
            self._new.add(name)
        if self._writer is None:
            raise RuntimeError("objects are put inside a `writing` block")
        self._writer.put(name, content)
        return name, True

    def mark(self, segment: str, offsets: list[int]) -> None:
        """Keep where damaged records begin, in place of what was kept: they count no more."""
        path = self.segments / f"{segment}{MARKS}"
        fault_point("backup.write")
        with storage(path, "writing"):
            if offsets:
                replace_file(path, json.dumps(offsets).encode())
            elif path.exists():
                path.unlink()

    def remove_segment(self, segment: str) -> None:
        """Remove a segment, and what is kept about it."""
        with storage(self.segments, "removing"):
            for name in (f"{segment}{MARKS}", segment):
                fault_point("backup.write")
                (self.segments / name).unlink(missing_ok=True)
            fsync_path(self.segments)


def check_apart(store: Path, data: Path) -> None:
    """Raise `UsageError` for a store and a set of which one lies within the other: who replaces one removes both."""
    one, other = store.resolve(), data.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise UsageError(f"{data} and the store {store} lie within each other; choose places apart")


def open_store(path: Path) -> Store:
    """A store that is there; raises `UsageError` where there is none, `DataError` for one of another version."""
    path = Path(path).absolute()
    about = path / _ABOUT
    try:
        found: Any = json.loads(read_file(about))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            f"{path} is no backup store (it has no {_ABOUT}); make one with `hpctrain backup DATA {path}`"
        ) from error
    except OSError as error:
        raise StorageError(f"{about}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{about}: not valid JSON: {error}; it should hold {_about().decode().strip()}"
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("version") != VERSION:
        raise DataError(
            f"{about}: not that of a backup store of version {VERSION}, the one this hpctrain knows; "
            "read it with the hpctrain that wrote it"
        )
    return Store(path)


def make_store(path: Path) -> Store:
    """A store that is there, or a new one; raises `UsageError` for a directory with other things in it."""
    path = Path(path).absolute()
    with storage(path, "making the store"):
        if not (path / _ABOUT).exists():
            if path.exists() and not path.is_dir():
                raise UsageError(f"{path} is not a directory; choose another DEST")
            names = [entry.name for entry in path.iterdir()] if path.exists() else []
            strange = [name for name in names if _ABOUT not in name]
            if strange:
                raise UsageError(
                    f"{path} holds {strange[0]!r} and is no backup store; choose a new or empty directory as DEST"
                )
            path.mkdir(parents=True, exist_ok=True)
            fault_point("backup.write")
            replace_file(path / _ABOUT, _about())
            fsync_path(path.parent)
        store = open_store(path)
        for folder in (store.segments, store.sets):
            fault_point("backup.write")
            folder.mkdir(exist_ok=True)
        fsync_path(path)
    return store


def _about() -> bytes:
    return json.dumps({"format": FORMAT, "version": VERSION}).encode() + b"\n"
