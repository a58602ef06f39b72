"""Pruning: older generations go, and then the objects that no generation needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hpctrain.durable import fsync_path
from hpctrain.errors import DataError, UsageError
from hpctrain.resilience.faults import fault_point
from hpctrain.staging.backup import segments
from hpctrain.staging.backup.generations import (
    list_generations,
    manifest_path,
    numbers_of,
    set_names,
)
from hpctrain.staging.backup.needs import references
from hpctrain.staging.backup.store import Store, open_store
from hpctrain.staging.backup.work import Progress, storage

_MANY_SMALL: Final = 8
"""Segments below a quarter of the full size: so many of them are joined."""


@dataclass(frozen=True)
class PruneReport:
    """What a prune did: labels of the generations removed, bytes of segments before and after."""

    removed: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    problems: tuple[str, ...]


def prune(path: Path, keep: int, progress: Progress | None = None) -> PruneReport:
    """Keep the newest `keep` generations of each set, and remove the objects that nobody needs then.

    Segments without a needed object are removed; of those that are mostly dead, or small and many, what is needed is
    written to new ones first. Killed at any point, everything needed is still there, some of it twice perhaps; the next
    prune does the rest. Raises `DataError` when what a generation needs cannot be known; `UsageError`; `StorageError`.
    """
    if keep < 1:
        raise UsageError(f"--prune {keep}: keep at least 1 generation of each set")
    store = open_store(path)
    with store.exclusive():
        before = _segment_bytes(store)
        removed = _remove_generations(store, keep)
        problems = _remove_objects(store, *_needed_rows(store), progress)
        store.refresh()
        return PruneReport(
            tuple(removed), sum(before), sum(_segment_bytes(store)), (*problems, *store.warnings)
        )


def _remove_generations(store: Store, keep: int) -> list[str]:
    _, unreadable = list_generations(store)
    if unreadable:  # one that is lost must not count as one that is kept
        raise DataError("; ".join(unreadable) + "; nothing was pruned")
    old = [(name, number) for name in set_names(store) for number in numbers_of(store, name)[:-keep]]
    for name, number in old:
        path = manifest_path(store, name, number)
        with storage(path, "removing"):
            fault_point("backup.write")
            path.unlink()
            fsync_path(path.parent)
    return [f"{name}@{number}" for name, number in old]


def _needed_rows(store: Store) -> tuple[npt.NDArray[np.bool_], bool]:
    """The records that are needed, bool, shape (records,), and whether needed objects are missing.

    Raises `DataError` where it cannot be known what is needed.
    """
    names: set[bytes] = set()
    lost: dict[str, None] = {}
    for reference in references(store, list_generations(store)[0]):
        names.update(reference.names)
        if reference.lost is not None:
            lost[f"{reference.lost}; needed by {reference.user}"] = None
    if lost:
        raise DataError(
            f"{store.path}: no object was removed, because it is not known what all generations need:\n  "
            + "\n  ".join(lost)
            + "\nback these sets up again, which may put it back, and prune again; or remove the manifests of these "
            f"generations in {store.sets} to give them up"
        )
    rows = [store.table.row_of(name) for name in names]
    needed = np.zeros(len(store.table.rows), np.bool_)
    needed[[row for row in rows if row is not None]] = True
    return needed, None in rows


def _remove_objects(
    store: Store, needed: npt.NDArray[np.bool_], is_missing: bool, progress: Progress | None
) -> list[str]:
    """Give back the room of records that are not needed; returns in words what could not be moved."""
    moved = _segments_to_move(store, needed, is_missing)
    rows = np.flatnonzero(needed & moved[store.table.owners])
    lost = _copy(store, rows, progress)
    stay = {int(store.table.owners[row]) for row in lost}
    for number in np.flatnonzero(moved).tolist():
        if number not in stay:
            store.remove_segment(store.table.names[number])
    return [f"{store.table.describe(row)}: damaged; its segment stays as it is" for row in lost]


def _segments_to_move(store: Store, needed: npt.NDArray[np.bool_], is_missing: bool) -> npt.NDArray[np.bool_]:
    """Segments whose needed objects go into new ones: mostly dead, or small and many; bool, shape (segments,)."""
    sizes = np.array(_segment_bytes(store), np.int64)
    overhead = segments.RECORD.itemsize + segments.ROW.itemsize
    lengths = (store.table.rows["size"].astype(np.int64) + overhead) * needed
    needed_bytes = np.bincount(store.table.owners, lengths, len(store.table.names)).astype(np.int64)
    is_small = sizes < segments.SEGMENT_BYTES // 4
    moved = 2 * needed_bytes < sizes
    if np.count_nonzero(is_small) >= _MANY_SMALL:
        moved |= is_small
    # Behind a damaged place of a segment without its index there may be what is missing.
    is_odd = np.array([name in store.table.problems for name in store.table.names], np.bool_)
    result: npt.NDArray[np.bool_] = np.where(is_odd, not is_missing, moved)
    return result


def _copy(store: Store, rows: npt.NDArray[np.int64], progress: Progress | None) -> list[int]:
    """Write objects to new segments; returns the records that could not be read whole."""
    total_bytes, done_bytes = int(store.table.rows["size"][rows].sum()), 0
    lost: list[int] = []
    with store.writing() as writer:
        for row in rows.tolist():
            content = store.table.read_row(row)
            if content is None:
                lost.append(row)
                continue
            writer.put(store.table.rows["digest"][row].tobytes(), content)
            done_bytes += len(content)
            if progress is not None:
                progress(done_bytes, total_bytes)
    return lost


def _segment_bytes(store: Store) -> list[int]:
    """Bytes of each segment."""
    with storage(store.segments, "looking at"):
        return [(store.segments / name).stat().st_size for name in store.table.names]
