"""The stored chunks of a set, numbered: what an agent must know of a set to read, keep and verify its chunks.

A chunk's number is its *slot*. Slots follow the shards, in each the datasets of the fields, and in each dataset the
chunks in row-major order. An agent gets this table from its ranks: it opens no HDF5 file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError
from hpctrain.h5.index import ChunkIndex, file_key_of
from hpctrain.h5.packed import PackedSet
from hpctrain.staging.message import Arrays

_ARRAYS: Final = ("file_sizes", "file_keys", "files", "offsets", "sizes", "digests")


@dataclass(frozen=True, eq=False)
class StoredChunks:
    """All stored chunks of a set, by slot.

    Attributes:
        identity: of the set.
        paths: the shared files.
        file_sizes: bytes of each; int64, shape (files,).
        file_keys: size, time of the last change (ns) and inode of each; int64, shape (files, 3).
        files: the file of each slot; int32, shape (slots,).
        offsets: byte of each slot in its file; -1: never written, there is nothing to read; int64, shape (slots,).
        sizes: stored bytes; int64, shape (slots,).
        digests: xxh3_64 of them; uint64, shape (slots,); 0 where none is known.
        has_digests: whether the set came with digests (a packed set) or they are taken at the first read (user files).
    """

    identity: str
    paths: tuple[Path, ...]
    file_sizes: npt.NDArray[np.int64]
    file_keys: npt.NDArray[np.int64]
    files: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint64]
    has_digests: bool

    @property
    def num_slots(self) -> int:
        """Stored chunks."""
        return len(self.files)

    @cached_property
    def num_bytes(self) -> int:
        """Of all stored chunks."""
        return int(self.sizes.sum())

    def describe(self, slot: int) -> str:
        """File and place, for messages."""
        path = self.paths[self.files[slot]]
        return f"{path}: chunk {slot} of the set (byte {self.offsets[slot]}, {self.sizes[slot]} bytes stored)"

    def to_message(self) -> tuple[dict[str, Any], Arrays]:
        """Head and arrays, for `staging.message`."""
        head = {
            "identity": self.identity,
            "paths": [str(path) for path in self.paths],
            "has_digests": self.has_digests,
        }
        return head, {name: getattr(self, name) for name in _ARRAYS}

    @classmethod
    def from_message(cls, head: Mapping[str, Any], arrays: Arrays) -> StoredChunks:
        """What `to_message` gave."""
        return cls(
            identity=str(head["identity"]),
            paths=tuple(Path(path) for path in head["paths"]),
            has_digests=bool(head["has_digests"]),
            **{name: arrays[name] for name in _ARRAYS},
        )


def file_keys_of(packed: PackedSet) -> npt.NDArray[np.int64]:
    """`StoredChunks.file_keys` of a set: looks at each shared file. Raises `DataError` where one has gone."""
    paths = _paths(packed)
    return np.array([_key(path) for path in paths], np.int64).reshape(len(paths), 3)


def stored_chunks(packed: PackedSet, file_keys: npt.NDArray[np.int64]) -> StoredChunks:
    """The table of a set; reads nothing."""
    indexes, paths = list(_indexes(packed)), _paths(packed)
    numbers = {path: number for number, path in enumerate(paths)}
    counts = [index.num_chunks for index in indexes]
    digests = [
        np.zeros(index.num_chunks, np.uint64) if index.digests is None else index.digests for index in indexes
    ]
    return StoredChunks(
        identity=packed.identity,
        paths=paths,
        file_sizes=file_keys[:, 0].copy(),
        file_keys=file_keys,
        files=np.repeat([numbers[index.path] for index in indexes], counts).astype(np.int32),
        offsets=_joined([index.offsets for index in indexes]),
        sizes=_joined([np.where(index.offsets < 0, 0, index.sizes) for index in indexes]),
        digests=np.concatenate([np.zeros(0, np.uint64), *digests]).astype(np.uint64),
        has_digests=all(index.digests is not None for index in indexes),
    )


class Slots:
    """Which slots belong to which datasets, and to which sample chunks."""

    def __init__(self, packed: PackedSet) -> None:
        self._packed = packed
        self._bases: dict[tuple[Path, str], int] = {}
        base = 0
        for index in _indexes(packed):
            self._bases[index.path, index.dataset] = base
            base += index.num_chunks
        self.num_slots = base

    def slot(self, index: ChunkIndex, chunk: int) -> int | None:
        """The slot of a chunk; None where its dataset is none of the set's fields (a table of offsets)."""
        base = self._bases.get((index.path, index.dataset))
        return None if base is None else base + chunk

    def least_of_sample_chunks(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """For each slot the least of the values of those sample chunks that need it, such as the step of a first use.

        `values`: one per sample chunk. A slot that holds no samples gets the greatest int64.
        """
        firsts, lasts = self._sample_chunks
        padded = np.append(values, np.iinfo(np.int64).max)
        bounds = np.stack((firsts, lasts + 1), axis=1).reshape(-1)
        least = np.minimum.reduceat(padded, bounds)[::2]
        return np.where(lasts < firsts, padded[-1], least)

    @cached_property
    def _sample_chunks(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The first and the last sample chunk that need each slot; the last is below the first where none does."""
        parts, first_chunk, step = [], 0, self._packed.chunk_samples
        for shard in self._packed.shards:
            chunks = -(-shard.num_samples // step)
            for index in shard.dense.values():
                parts.append(first_chunk + _rows_of_chunks(index, shard.num_samples) // step)
            for name, index in shard.flat.items():
                values = _rows_of_chunks(index, int(shard.offsets[name][-1]))
                samples = np.searchsorted(shard.offsets[name], values, side="right") - 1
                parts.append(first_chunk + np.minimum(samples // step, chunks - 1))
            first_chunk += chunks
        joined = np.concatenate([np.zeros((0, 2), np.int64), *parts]).astype(np.int64)
        return joined[:, 0], joined[:, 1]


def _rows_of_chunks(index: ChunkIndex, num_rows: int) -> npt.NDArray[np.int64]:
    """First and last row (index along axis 0) of each chunk of a dataset; shape (chunks, 2)."""
    step = index.chunk_shape[0]
    per_row = index.num_chunks // max(index.grid[0], 1)
    first = np.repeat(np.arange(index.grid[0], dtype=np.int64) * step, per_row)
    return np.stack((first, np.minimum(first + step, num_rows) - 1), axis=1)


def _paths(packed: PackedSet) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(index.path for index in _indexes(packed)))


def _indexes(packed: PackedSet) -> Iterator[ChunkIndex]:
    """In the order of the slots."""
    for shard in packed.shards:
        yield from shard.dense.values()
        yield from shard.flat.values()


def _key(path: Path) -> tuple[int, int, int]:
    try:
        return file_key_of(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be looked at: {error.strerror}; put the file back") from error


def _joined(parts: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)
