"""Backing up: a packed set becomes a generation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.chunks import FileSource
from hpctrain.h5.index import ChunkIndex, file_key_of
from hpctrain.h5.manifest import MANIFEST, read_manifest
from hpctrain.h5.packed import Shard, open_packed
from hpctrain.h5.retry import patiently
from hpctrain.h5.scratch import Scratch
from hpctrain.staging.backup.generations import (
    Generation,
    check_name,
    numbers_of,
    write_generation,
)
from hpctrain.staging.backup.recipe import (
    PAGE_CHUNKS,
    PIECE,
    Recipe,
    gap_offsets,
    gaps_between,
    rest_pieces,
    rest_size,
)
from hpctrain.staging.backup.segments import name_of
from hpctrain.staging.backup.store import Store, check_apart, make_store
from hpctrain.staging.backup.work import Counter, Progress, in_threads, read_at

FileKey = tuple[int, int, int]
_SCRATCH: Final = Scratch()


@dataclass(frozen=True)
class BackupReport:
    """What a backup did; sizes in bytes, time in seconds.

    `read_bytes`: the set's own bytes, all of them read; `added_bytes`: what the store grew by; `new_chunks`: those
    among `num_chunks` that the store did not have; `problems`: of the store, in words.
    """

    generation: Generation
    read_bytes: int
    added_bytes: int
    num_chunks: int
    new_chunks: int
    seconds: float
    problems: tuple[str, ...]


def back_up(
    data: Path, dest: Path, name: str | None = None, progress: Progress | None = None
) -> BackupReport:
    """Add a generation of the packed set at `data` to the store at `dest`, which is made where there is none.

    Kept is the content of dataset.json and of the shards that it names, without owners, modes and times. `name` None:
    that of the directory. Raises `DataError`, naming every bad chunk, for a set that is damaged or changes
    while it is read: then there is no new generation; `UsageError` for a name or store that cannot be; `StorageError`
    when reading or writing fails, or another one works on the store.
    """
    started_s = time.monotonic()
    data = Path(data).absolute()
    name = check_name(data.resolve().name if name is None else name)
    check_apart(Path(dest).absolute(), data)
    source = _Source(data)
    store = make_store(dest)
    with store.exclusive():
        with store.writing() as writer:
            counter = Counter(progress, source.num_bytes)
            files, new_chunks = _store_files(source, store, counter)
            source.refuse_changed()
        generation = Generation(
            name=name,
            number=max(numbers_of(store, name), default=0) + 1,
            created_s=time.time(),
            source=str(data),
            identity=source.identity,
            manifest_digest=name_of(source.manifest).hex(),
            added_bytes=writer.sealed_bytes,
            files=files,
        )
        manifest_bytes = write_generation(store, generation)
    return BackupReport(
        generation=generation,
        read_bytes=source.num_bytes,
        added_bytes=writer.sealed_bytes + manifest_bytes,
        num_chunks=sum(item.num_chunks for item in files),
        new_chunks=new_chunks,
        seconds=time.monotonic() - started_s,
        problems=store.warnings,
    )


class _Source:
    """A packed set whose files must not change while they are read."""

    def __init__(self, data: Path) -> None:
        self.data = data
        shards = read_manifest(data).get("shards", [])
        names = [Path(str(entry.get("file"))).name for entry in shards if isinstance(entry, dict)]
        # Before anything is opened: what changes from now on is found by `refuse_changed`.
        self._keys = {path: self._key(path) for path in (data / MANIFEST, *(data / name for name in names))}
        packed = open_packed(data)
        self.identity = packed.identity
        self.files = [_ShardFile(shard, self._keys[shard.path][0]) for shard in packed.shards]
        try:
            self.manifest = (data / MANIFEST).read_bytes()
        except OSError as error:
            raise StorageError(f"{data / MANIFEST}: cannot be read: {error.strerror}") from error

    @property
    def num_bytes(self) -> int:
        return sum(key[0] for key in self._keys.values())

    def refuse_changed(self) -> None:
        """Raise `DataError` for files that are others than at the start."""
        changed = [path.name for path, key in self._keys.items() if self._key(path) != key]
        if changed:
            raise DataError(
                f"{self.data}: changed while it was read ({', '.join(changed)}): no generation was made of it; run the "
                "backup again when nobody writes the set"
            )

    def _key(self, path: Path) -> FileKey:
        try:
            return file_key_of(path)
        except FileNotFoundError:
            return (-1, -1, -1)  # `open_packed` says it better, or it was removed meanwhile
        except OSError as error:
            raise StorageError(f"{path}: cannot be looked at: {error.strerror}") from error


class _ShardFile:
    """A shard, its chunks in the order in which they lie in the file."""

    def __init__(self, shard: Shard, num_bytes: int) -> None:
        self.path, self.num_bytes = shard.path, num_bytes
        self._indexes = [*shard.dense.values(), *shard.flat.values(), *shard.tables.values()]
        counts = [index.num_chunks for index in self._indexes]
        offsets = np.concatenate([np.zeros(0, np.int64), *(index.offsets for index in self._indexes)])
        order = np.argsort(offsets, kind="stable")
        self.offsets = offsets[order]
        self.sizes = np.concatenate([np.zeros(0, np.int64), *(index.sizes for index in self._indexes)])[order]
        self._owners = np.repeat(np.arange(len(counts)), counts)[order]
        self._numbers = np.concatenate([np.zeros(0, np.int64), *map(np.arange, counts)])[order]

    def chunk(self, at: int) -> tuple[ChunkIndex, int]:
        """The dataset, and the chunk of it, that is the `at`-th in the file."""
        return self._indexes[self._owners[at]], int(self._numbers[at])

    @cached_property
    def gaps(self) -> npt.NDArray[np.int64]:
        try:
            return gaps_between(self.offsets, self.sizes, self.num_bytes)
        except DataError as error:
            raise DataError(f"{self.path}: {error}; {self._indexes[0].mend}") from error


@dataclass(frozen=True)
class _Page:
    """A page of a file, stored: its name, the chunks that were new, and those that are damaged, in words."""

    name: bytes
    new: int
    bad: tuple[str, ...]


def _store_files(source: _Source, store: Store, counter: Counter) -> tuple[tuple[Recipe, ...], int]:
    """The recipes of all files of a set, and the number of new chunks; raises `DataError` naming every bad chunk."""
    with FileSource() as chunks:
        work = [(file, at) for file in source.files for at in range(0, len(file.offsets), PAGE_CHUNKS)]
        pages = in_threads(lambda item: _store_page(*item, chunks, store, counter), work)
    bad = [words for page in pages for words in page.bad]
    if bad:
        raise DataError(
            f"{len(bad)} damaged chunks, so that no generation was made:\n  " + "\n  ".join(bad) + "\nwhat "
            f"{store.path} has of them is put back by `hpctrain restore {store.path} --repair {source.data}`"
        )
    rests = in_threads(lambda file: _store_rest(file, store, counter), source.files)
    found = iter(pages)
    recipes = [
        Recipe(
            name=file.path.name,
            num_bytes=file.num_bytes,
            num_chunks=len(file.offsets),
            rest_bytes=rest_size(file.gaps),
            pages=tuple(next(found).name for _ in range(0, len(file.offsets), PAGE_CHUNKS)),
            rest=rest,
        )
        for file, rest in zip(source.files, rests, strict=True)
    ]
    return (*recipes, _store_manifest(source.manifest, store, counter)), sum(page.new for page in pages)


def _store_page(file: _ShardFile, first: int, chunks: FileSource, store: Store, counter: Counter) -> _Page:
    """Store the chunks of one page that are new, and the page; never bytes that no digest vouches for."""
    pieces: list[tuple[bytes, int]] = []
    bad: list[str] = []
    new = 0
    for at in range(first, min(first + PAGE_CHUNKS, len(file.offsets))):
        index, number = file.chunk(at)
        try:
            stored = chunks.read(index, number, lambda num_bytes: _SCRATCH.bytes("chunk", num_bytes))
        except DataError as error:
            bad.append(str(error))
            continue
        name, is_new = store.put(stored)
        pieces.append((name, len(stored)))
        new += is_new
        counter.add(len(stored))
    name = b"" if bad else store.put(np.array(pieces, PIECE).tobytes())[0]
    return _Page(name, new, tuple(bad))


def _store_rest(file: _ShardFile, store: Store, counter: Counter) -> tuple[bytes, ...]:
    """Store what lies between the chunks of a file."""
    try:
        content = patiently(lambda: _read_gaps(file))
    except OSError as error:
        raise StorageError(f"{file.path}: cannot be read: {error.strerror}") from error
    counter.add(len(content))
    return tuple(store.put(piece)[0] for piece in rest_pieces(file.gaps, content))


def _read_gaps(file: _ShardFile) -> bytes:
    """What lies between the chunks; raises `OSError`."""
    begins = gap_offsets(file.gaps, file.sizes).tolist()
    with open(file.path, "rb", buffering=0) as opened:
        places = zip(begins, file.gaps[:, 1].tolist(), strict=True)
        return b"".join(read_at(opened.fileno(), size, begin) for begin, size in places)


def _store_manifest(content: bytes, store: Store, counter: Counter) -> Recipe:
    """Store the set's own manifest: a file without chunks."""
    gaps = gaps_between(np.zeros(0, np.int64), np.zeros(0, np.int64), len(content))
    counter.add(len(content))
    rest = tuple(store.put(piece)[0] for piece in rest_pieces(gaps, content))
    return Recipe(MANIFEST, len(content), 0, rest_size(gaps), (), rest)
