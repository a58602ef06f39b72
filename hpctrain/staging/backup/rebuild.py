"""Restoring: a generation becomes a packed set again, byte for byte."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import DataError
from hpctrain.h5.manifest import MANIFEST
from hpctrain.h5.publish import check_target, publishing
from hpctrain.resilience.faults import fault_point
from hpctrain.staging.backup.generations import Generation, find_generation
from hpctrain.staging.backup.recipe import FileLayout, Recipe, read_layout
from hpctrain.staging.backup.store import Store, check_apart, open_store
from hpctrain.staging.backup.table import MissingObjectError
from hpctrain.staging.backup.work import Counter, Progress, in_threads, open_file, storage, write_at


@dataclass(frozen=True)
class RestoreReport:
    """What was restored, and in how many seconds."""

    generation: Generation
    root: Path
    seconds: float


def restore(
    store_path: Path, which: str, target: Path, overwrite: bool = False, progress: Progress | None = None
) -> RestoreReport:
    """Rebuild the generation `which`, `NAME@NUMBER` or `NAME` for the newest, as the directory `target`.

    It appears whole or not at all, and every object is verified while it is read. Raises `DataError`, with all that
    cannot be rebuilt, where the store lacks right bytes; `UsageError` for a generation or a target that cannot be;
    `StorageError` when reading or writing fails.
    """
    started_s = time.monotonic()
    store = open_store(store_path)
    target = Path(target).absolute()
    check_apart(store.path, target)
    check_target(target, MANIFEST, overwrite)
    generation = find_generation(store, which)
    if [item.name for item in generation.files].count(MANIFEST) != 1:
        raise DataError(f"{generation.label} holds no {MANIFEST}: it is not a generation of a packed set")
    counter = Counter(progress, generation.num_bytes)
    with (
        publishing(target, MANIFEST, overwrite, point="restore.write") as partial,
        storage(target, "restoring"),
    ):
        lost = [
            words for recipe in generation.files for words in _write_file(partial, recipe, store, counter)
        ]
        if lost:
            raise _cannot_rebuild(store, generation, lost)
        fault_point("restore.write")
    return RestoreReport(generation, target, time.monotonic() - started_s)


def _cannot_rebuild(store: Store, generation: Generation, lost: list[str]) -> DataError:
    """What a generation lacks, and what may help."""
    return DataError(
        f"{generation.label} cannot be rebuilt from {store.path}, and nothing was written; it lacks:\n  "
        + "\n  ".join(lost)
        + f"\nrun `hpctrain backup {store.path} --verify` to see what else that harms; a backup of a set that "
        "still has these bytes puts them back"
    )


def _write_file(folder: Path, recipe: Recipe, store: Store, counter: Counter) -> list[str]:
    """Write a file into a new folder; returns in words what is lost of it."""
    try:
        layout = read_layout(store, recipe)
    except MissingObjectError as error:
        return [f"{recipe.name}: all of it: a part of its recipe is gone ({error})"]
    with open_file(folder / recipe.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        fault_point("restore.write")
        os.ftruncate(descriptor, recipe.num_bytes)
        for offset, content in layout.gaps:
            fault_point("restore.write")
            write_at(descriptor, content, offset)
            counter.add(len(content))
        write_chunk = _chunk_writer(descriptor, recipe, layout, store, counter)
        return [words for words in in_threads(write_chunk, range(len(layout.sizes))) if words]


def _chunk_writer(
    descriptor: int, recipe: Recipe, layout: FileLayout, store: Store, counter: Counter
) -> Callable[[int], str | None]:
    """Writes a chunk to its place; gives in words what is lost."""

    def write(chunk: int) -> str | None:
        offset, size = int(layout.offsets[chunk]), int(layout.sizes[chunk])
        try:
            content = store.read(layout.digests[chunk])
        except MissingObjectError as error:
            return f"{recipe.name}: the {size} bytes at byte {offset} ({error})"
        if len(content) != size:
            raise DataError(f"{recipe.name}: {len(content)} bytes for the {size} at byte {offset}")
        fault_point("restore.write")
        write_at(descriptor, content, offset)
        counter.add(size)
        return None

    return write
