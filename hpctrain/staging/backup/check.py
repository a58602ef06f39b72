"""Checking a store: every object is read, and what is missing or damaged is named with all that it harms."""

from __future__ import annotations

import errno
import time
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hpctrain.errors import StorageError
from hpctrain.staging.backup.generations import list_generations
from hpctrain.staging.backup.needs import references
from hpctrain.staging.backup.store import Store, open_store
from hpctrain.staging.backup.table import Table, read_marks
from hpctrain.staging.backup.work import Counter, Progress, in_threads


@dataclass(frozen=True)
class CheckReport:
    """What a check found; time in seconds.

    `problems`: in words, all that is wrong, with the generations and files that it harms; empty: every generation can
    be restored. `notes`: what is wrong but harms nothing.
    """

    num_generations: int
    num_objects: int
    num_bytes: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float


def check_store(path: Path, progress: Progress | None = None) -> CheckReport:
    """Read and verify every object of a store, and look for all that its generations need.

    Damaged records are marked, so that they count no more: the next backup of a set that has these bytes stores them
    again; so are those that the disk does not give (EIO). Raises `StorageError` when another one works on the store or
    reading fails otherwise.
    """
    started_s = time.monotonic()
    store = open_store(path)
    with store.exclusive():
        is_good = _read_all(store.table, progress)
        _mark(store, is_good)
        store.refresh()
        generations, unreadable = list_generations(store)
        missing: dict[bytes, set[str]] = {}
        for reference in references(store, generations):
            for name in reference.names:
                if not store.has(name):
                    missing.setdefault(name, set()).add(reference.user)
        damaged = _damaged(store.table)
        problems = [*unreadable, *(_harm(store.table, damaged, *item) for item in sorted(missing.items()))]
        notes = [*store.warnings, *_dead(store.table, missing)]
    return CheckReport(
        num_generations=len(generations),
        num_objects=len(store.table.rows),
        num_bytes=int(store.table.rows["size"].sum()),
        problems=tuple(problems),
        notes=tuple(notes),
        seconds=time.monotonic() - started_s,
    )


def _read_all(table: Table, progress: Progress | None) -> npt.NDArray[np.bool_]:
    """Whether each record holds what its name says; bool, shape (records,)."""
    counter = Counter(progress, int(table.rows["size"].sum()))

    def check(row: int) -> bool:
        try:
            content = table.read_row(row)
        except StorageError as error:
            # A bad sector must not hide what else is wrong; when the next check can read it, it counts again.
            if getattr(error.__cause__, "errno", None) != errno.EIO:
                raise
            content = None
        counter.add(int(table.rows["size"][row]))
        return content is not None

    return np.array(in_threads(check, range(len(table.rows))), np.bool_)


def _mark(store: Store, is_good: npt.NDArray[np.bool_]) -> None:
    table, bad = store.table, np.flatnonzero(~is_good)
    for number, segment in enumerate(table.names):
        offsets = table.rows["offset"][bad[table.owners[bad] == number]].astype(np.int64).tolist()
        if sorted(offsets) != sorted(read_marks(store.segments, segment)):
            store.mark(segment, offsets)


def _damaged(table: Table) -> dict[bytes, int]:
    """The record of each name that has a damaged one."""
    return {table.rows["digest"][row].tobytes(): row for row in np.flatnonzero(table.damaged).tolist()}


def _harm(table: Table, damaged: Mapping[bytes, int], name: bytes, users: set[str]) -> str:
    where = f"damaged: {table.describe(damaged[name])}" if name in damaged else "missing"
    return f"object {name.hex()}: {where}; harms {', '.join(sorted(users))}"


def _dead(table: Table, missing: Container[bytes]) -> Iterator[str]:
    """Damaged records that nothing needs, or not any more."""
    for row in np.flatnonzero(table.damaged).tolist():
        if table.rows["digest"][row].tobytes() not in missing:
            yield f"{table.describe(row)}: damaged, but nothing needs it any more: a prune removes it"
