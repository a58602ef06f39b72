"""Repairing: damaged pieces of a set's files are put back in place.

Where the store holds a generation of this very set (the same dataset.json), every piece of every file is compared with
it: chunks, HDF5's own structures, missing and truncated files. Where it does not, the set was changed since; then its
own digests say which chunks are damaged, and any object with the right digest, of any set and generation, mends them.

Pieces are written where they are wrong and nowhere else, so that a repair that was killed is simply run again.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hpctrain.durable import fsync_path
from hpctrain.errors import DataError, UsageError
from hpctrain.h5.fields import OFFSETS_SUFFIX
from hpctrain.h5.index import ChunkIndex, digest_of, index_dataset, open_h5
from hpctrain.h5.manifest import MANIFEST, field_from, read_manifest
from hpctrain.h5.packed import identity_of
from hpctrain.resilience.faults import fault_point
from hpctrain.staging.backup.generations import Generation, find_generation, list_generations
from hpctrain.staging.backup.mend import Piece, mend_file
from hpctrain.staging.backup.recipe import FileLayout, read_layout
from hpctrain.staging.backup.segments import name_of
from hpctrain.staging.backup.store import Store, open_store
from hpctrain.staging.backup.table import MissingObjectError
from hpctrain.staging.backup.work import (
    Counter,
    Progress,
    open_file,
    storage,
)


@dataclass(frozen=True)
class RepairReport:
    """A repair: `mended` and `lost` (still damaged) in words; `truth`: the generation compared with, if any."""

    mended: tuple[str, ...]
    lost: tuple[str, ...]
    truth: str | None
    checked_bytes: int
    seconds: float


def repair(
    store_path: Path, data: Path, which: str | None = None, progress: Progress | None = None
) -> RepairReport:
    """Put right bytes back where files of the packed set at `data` are damaged.

    `which`: the generation that it is, `NAME@NUMBER` or `NAME` for the newest, where its dataset.json is damaged; None:
    that with the same dataset.json, or else the set's own digests decide. Each piece is verified, written, made durable
    and verified again.

    Raises `UsageError`; `DataError` where it is not known what is right; `StorageError` when reading or writing fails.
    """
    started_s = time.monotonic()
    store, data = open_store(store_path), Path(data).absolute()
    if not data.is_dir():
        raise UsageError(f"{data} is not a directory; name that of a packed set, or restore to a new one")
    truth = _truth(store, data) if which is None else _named(store, data, find_generation(store, which))
    with storage(data, "repairing"):
        if truth is None:
            mended, lost, checked_bytes = _repair_by_digests(store, data, progress)
        else:
            mended, lost, checked_bytes = _repair_by_generation(store, data, truth, progress)
    return RepairReport(
        tuple(mended),
        tuple(lost),
        None if truth is None else truth.label,
        checked_bytes,
        time.monotonic() - started_s,
    )


def _truth(store: Store, data: Path) -> Generation | None:
    """The newest generation with the same dataset.json; raises `DataError` where that is damaged."""
    generations, _ = list_generations(store)
    try:
        digest = name_of((data / MANIFEST).read_bytes()).hex()
    except OSError:
        digest = ""
    same = [item for item in generations if item.manifest_digest == digest]
    if same:
        return max(same, key=lambda item: item.created_s)
    try:
        read_manifest(data)
    except DataError as error:
        known = ", ".join(item.label for item in generations) or "none"
        raise DataError(
            f"{error}\nwhich generation {data} is cannot be told without it: say so, as in `hpctrain restore "
            f"{store.path} NAME@GENERATION --repair {data}` (there are: {known})"
        ) from error
    return None


def _named(store: Store, data: Path, generation: Generation) -> Generation:
    """The generation that the user named; raises `UsageError` where the set says itself that it is another one."""
    try:
        read_manifest(data)
    except DataError:
        return generation
    if name_of((data / MANIFEST).read_bytes()).hex() != generation.manifest_digest:
        raise UsageError(
            f"{data} is not {generation.label}, but another set or generation, and its dataset.json is whole: repair "
            f"it without a name, or restore {generation.label} to a new folder"
        )
    return generation


# By a generation.


def _repair_by_generation(
    store: Store, data: Path, truth: Generation, progress: Progress | None
) -> tuple[list[str], list[str], int]:
    counter = Counter(progress, truth.num_bytes)
    mended: list[str] = []
    lost: list[str] = []
    for recipe in truth.files:
        try:
            layout = read_layout(store, recipe)
        except MissingObjectError as error:
            lost.append(f"{recipe.name}: cannot be checked: a part of its recipe is gone ({error})")
            continue
        path = data / recipe.name
        _set_size(path, recipe.num_bytes, mended)
        fixed, left = mend_file(path, list(_pieces(store, layout)), counter)
        mended += fixed
        lost += left
    return mended, lost, counter.done_bytes


def _set_size(path: Path, num_bytes: int, mended: list[str]) -> None:
    """Make a file of this size, where there is none or another."""
    with open_file(path, os.O_RDWR | os.O_CREAT) as descriptor:
        found = os.fstat(descriptor).st_size
        if found != num_bytes:
            fault_point("restore.write")
            os.ftruncate(descriptor, num_bytes)
            os.fsync(descriptor)
            fsync_path(path.parent)  # it may be new
            mended.append(f"{path.name}: {found} bytes long, made {num_bytes}")


def _pieces(store: Store, layout: FileLayout) -> Iterator[Piece]:
    for offset, content in layout.gaps:
        yield Piece(offset, len(content), partial(operator.eq, content), partial(bytes, content))
    chunks = zip(layout.offsets.tolist(), layout.sizes.tolist(), layout.digests, strict=True)
    for offset, size, name in chunks:
        yield Piece(offset, size, partial(_is_named, name), partial(store.read, name))


def _is_named(name: bytes, content: bytes) -> bool:
    return name_of(content) == name


# By the digests of the set.


def _repair_by_digests(
    store: Store, data: Path, progress: Progress | None
) -> tuple[list[str], list[str], int]:
    files = _indexes(store, data)
    sizes = [int(index.sizes.sum()) for indexes in files.values() for index in indexes]
    counter = Counter(progress, sum(sizes))
    mended: list[str] = []
    lost: list[str] = []
    for path, indexes in files.items():
        pieces = [piece for index in indexes for piece in _chunk_pieces(store, index)]
        fixed, left = mend_file(path, pieces, counter)
        mended += fixed
        lost += left
    return mended, lost, counter.done_bytes


def _indexes(store: Store, data: Path) -> dict[Path, list[ChunkIndex]]:
    """The datasets of each file, with digests that the set's identity vouches for; no chunk is read."""
    manifest = read_manifest(data)
    found: dict[Path, list[ChunkIndex]] = {}
    try:
        fields = [field_from(name, entry) for name, entry in manifest["fields"].items()]
        names = [field.name for field in fields]
        names += [field.name + OFFSETS_SUFFIX for field in fields if field.kind == "ragged"]
        for entry in manifest["shards"]:
            path = data / Path(str(entry["file"])).name
            with open_h5(path) as file:
                found[path] = [index_dataset(file, path, name) for name in sorted(names)]
        every = [index for indexes in found.values() for index in indexes]
        identity = identity_of((item.dataset, item.shape, item.dtype, _digests(item)) for item in every)
        if identity != manifest["identity"]:
            raise DataError(f"{data}: the digests in its files are damaged: they are not those of the set")
    except (DataError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{error}\n{store.path} holds no generation with this dataset.json, so that only chunks could be mended, "
            "but here HDF5's own structures are damaged: restore an older generation, or pack the source again"
        ) from error
    return found


def _digests(index: ChunkIndex) -> npt.NDArray[np.uint64]:
    return np.zeros(0, np.uint64) if index.digests is None else index.digests


def _chunk_pieces(store: Store, index: ChunkIndex) -> Iterator[Piece]:
    chunks = zip(index.offsets.tolist(), index.sizes.tolist(), _digests(index).tolist(), strict=True)
    for offset, size, digest in chunks:
        yield Piece(offset, size, partial(_has_digest, digest), partial(_fetch, store, digest, size))


def _has_digest(digest: int, content: bytes) -> bool:
    return digest_of(content) == digest


def _fetch(store: Store, digest: int, size: int) -> bytes:
    for content in store.table.find_chunk(digest, size):
        if digest_of(content) == digest:
            return content
    raise MissingObjectError(f"no object of {size} bytes in {store.path} has the digest {digest:016x}")
