"""A packed set: a directory of HDF5 shards and `dataset.json`, its manifest.

The manifest says what the shards must hold; `open_packed` compares the two completely (fields, shapes, types,
filters, chunk digests), so that what it returns is the set that was packed. No chunk of data is read for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.chunks import FileSource, read_flat
from hpctrain.h5.codecs import known_filters
from hpctrain.h5.fields import OFFSETS_SUFFIX, Field, offsets_field
from hpctrain.h5.filters import BLOSC
from hpctrain.h5.filters.blosc import HEADER_BYTES as FRAME_HEADER_BYTES
from hpctrain.h5.filters.blosc import frame_block_bytes
from hpctrain.h5.index import REPACK, ChunkIndex, index_dataset, open_h5
from hpctrain.h5.manifest import MANIFEST, VERSION, classes_from, field_from, read_manifest

if TYPE_CHECKING:
    from hpctrain.h5.dataset import Dataset


@dataclass(frozen=True)
class Shard:
    """One file of the set.

    `dense` has the indexes of the dense fields; of the ragged ones, `flat` has the indexes of their values,
    `tables` those of their offsets, and `offsets` the offsets themselves, int64 of shape (num_samples + 1,).
    `library` has the dense fields that only libhdf5 can read.
    """

    path: Path
    num_samples: int
    dense: dict[str, ChunkIndex]
    flat: dict[str, ChunkIndex]
    offsets: dict[str, npt.NDArray[np.int64]]
    tables: dict[str, ChunkIndex] = dataclass_field(default_factory=dict)
    library: dict[str, Dataset] = dataclass_field(default_factory=dict)


@dataclass(frozen=True)
class PackedSet:
    """A packed set, ready to be read; picklable, so that one rank opens it and broadcasts it."""

    root: Path
    fields: dict[str, Field]
    shards: tuple[Shard, ...]
    chunk_samples: int
    num_samples: int
    identity: str
    classes: tuple[str, ...] | None
    block_bytes: dict[str, int] = dataclass_field(default_factory=dict)
    """Bytes of a block in the Blosc frames of a dense field, as the first frame has it; fields of one frame a chunk."""

    @cached_property
    def chunk_sizes(self) -> npt.NDArray[np.int64]:
        """Samples in each sample chunk of the whole set, in order; only a shard's last chunk may be short."""
        sizes: list[int] = []
        for shard in self.shards:
            full, rest = divmod(shard.num_samples, self.chunk_samples)
            sizes += [self.chunk_samples] * full + [rest] * (rest > 0)
        return np.array(sizes, np.int64)

    @cached_property
    def _first_chunks(self) -> npt.NDArray[np.int64]:
        """Number of the first sample chunk of each shard, and the total."""
        counts = [-(-shard.num_samples // self.chunk_samples) for shard in self.shards]
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def locate(self, chunk: int) -> tuple[int, int]:
        """Shard, and row of the chunk table in it, of a sample chunk; IndexError outside [0, number of chunks)."""
        if not 0 <= chunk < self._first_chunks[-1]:
            raise IndexError(f"sample chunk {chunk} of {self._first_chunks[-1]}")
        shard = int(np.searchsorted(self._first_chunks, chunk, side="right")) - 1
        return shard, chunk - int(self._first_chunks[shard])


def open_packed(root: Path) -> PackedSet:
    """Open and check a packed set.

    Raises `DataError`, naming the file and the mend, when the manifest or a shard is missing, truncated,
    damaged, of an unknown version or not what the manifest says; `StorageError` when a file cannot be read.
    """
    root = Path(root).absolute()
    manifest = read_manifest(root)
    try:
        fields = {name: field_from(name, entry) for name, entry in manifest["fields"].items()}
        with FileSource() as source:
            shards = tuple(
                open_shard(root, entry, fields, int(manifest["chunk_samples"]), source)
                for entry in manifest["shards"]
            )
        packed = PackedSet(
            root,
            fields,
            shards,
            int(manifest["chunk_samples"]),
            int(manifest["num_samples"]),
            str(manifest["identity"]),
            classes_from(manifest["classes"]),
            block_bytes_of(shards, int(manifest["chunk_samples"])),
        )
    except DataError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError, SyntaxError) as error:
        raise DataError(
            f"{root / MANIFEST}: not a manifest of version {VERSION}: {error!r}; {REPACK}"
        ) from error
    _check_whole(packed)
    return packed


def block_bytes_of(shards: Iterable[Shard], chunk_samples: int) -> dict[str, int]:
    """`PackedSet.block_bytes` of a set of shards: 16 bytes are read per field. Raises `StorageError`."""
    first = next(iter(shards), None)
    found: dict[str, int] = {}
    for name, index in first.dense.items() if first else ():
        whole_samples = index.chunk_shape == (chunk_samples, *index.shape[1:])
        only_blosc = [item.id for item in index.pipeline.filters] == [BLOSC]
        if whole_samples and only_blosc and index.num_chunks and index.offsets[0] >= 0:
            found[name] = frame_block_bytes(_first_bytes(index, FRAME_HEADER_BYTES))
    return found


def _first_bytes(index: ChunkIndex, num_bytes: int) -> bytes:
    """The first stored bytes of the first chunk."""
    try:
        descriptor = os.open(index.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, num_bytes, int(index.offsets[0]))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"{index.path}: cannot be read: {error.strerror}") from error


def identity_of(
    datasets: Iterable[tuple[str, tuple[int, ...], np.dtype[Any], npt.NDArray[np.uint64]]],
) -> str:
    """Identity of a set: xxh3_128 (hex) over name, shape, type and stored-chunk digests of every dataset.

    The datasets come shard by shard, sorted by name within a shard.
    """
    hasher = xxhash.xxh3_128()
    for name, shape, dtype, digests in datasets:
        hasher.update(f"{name}\0{shape}\0{dtype.str}\0{len(digests)}\0".encode())
        hasher.update(np.ascontiguousarray(digests, "<u8").tobytes())
    return hasher.hexdigest()


def open_shard(
    root: Path, entry: Mapping[str, Any], fields: Mapping[str, Field], chunk_samples: int, source: FileSource
) -> Shard:
    """Open one shard, as its entry in the manifest describes it, and compare the two; errors as for `open_packed`."""
    name, num_samples = str(entry["file"]), int(entry["num_samples"])
    path = root / Path(name).name  # a manifest cannot point outside its directory
    dense: dict[str, ChunkIndex] = {}
    flat: dict[str, ChunkIndex] = {}
    tables: dict[str, ChunkIndex] = {}
    offsets: dict[str, npt.NDArray[np.int64]] = {}
    with open_h5(path) as file:
        _check_bytes(path, int(entry["bytes"]))
        for field in fields.values():
            index = index_dataset(file, path, field.name)
            if field.kind == "dense":
                dense[field.name] = index
                _check_dataset(index, field, (num_samples, *field.sample_shape), chunk_samples)
            else:
                flat[field.name] = index
                table = tables[field.name] = index_dataset(file, path, field.name + OFFSETS_SUFFIX)
                offsets[field.name] = _read_offsets(table, field, index, num_samples, source)
    return Shard(path, num_samples, dense, flat, offsets, tables)


def _read_offsets(
    table: ChunkIndex, field: Field, flat: ChunkIndex, num_samples: int, source: FileSource
) -> npt.NDArray[np.int64]:
    _check_dataset(table, offsets_field(field), (num_samples + 1,), table.chunk_shape[0])
    offsets: npt.NDArray[np.int64] = read_flat(table, source, 0, num_samples + 1)
    _check_dataset(flat, field, (int(offsets[-1]),), flat.chunk_shape[0])
    if offsets[0] != 0 or np.any(np.diff(offsets) < 0):
        raise DataError(f"{table.path}: the offsets of {field.name!r} do not ascend from 0; {REPACK}")
    return offsets


def _check_bytes(path: Path, wanted: int) -> None:
    found = path.stat().st_size
    if found != wanted:
        raise DataError(
            f"{path}: {found} bytes, but the manifest says {wanted}: it is truncated or not this set's; {REPACK}"
        )


def _check_dataset(index: ChunkIndex, field: Field, shape: tuple[int, ...], chunk_rows: int) -> None:
    """Compare a dataset with what the manifest says of its field."""
    chunk_shape = (chunk_rows, *shape[1:])
    chunk_bytes = int(np.prod(chunk_shape, dtype=np.int64)) * field.dtype.itemsize
    found_filters = index.pipeline.filters
    known = known_filters(field.codec, field.dtype, chunk_bytes)
    expected = {
        "shape": (shape, index.shape),
        "dtype": (field.dtype, index.dtype),
        "chunk shape": (chunk_shape, index.chunk_shape),
        "filters": (found_filters if found_filters in known else known[0], found_filters),
        "filter masks": (0, int(index.masks.max(initial=0))),
    }
    for what, (wanted, found) in expected.items():
        if wanted != found:
            raise DataError(
                f"{index.path}: dataset {index.dataset!r}: {what} {found}, but the manifest says {wanted}; {REPACK}"
            )


def _check_whole(packed: PackedSet) -> None:
    """Compare sums over the shards with the manifest."""
    path = packed.root / MANIFEST
    found = sum(shard.num_samples for shard in packed.shards)
    if found != packed.num_samples or not packed.shards or packed.chunk_samples < 1:
        raise DataError(
            f"{path}: {found} samples in {len(packed.shards)} shards, "
            f"but the manifest says {packed.num_samples}; {REPACK}"
        )
    identity = identity_of(item for shard in packed.shards for item in _identity_items(shard))
    if identity != packed.identity:
        raise DataError(f"{path}: identity {packed.identity}, but the shards' is {identity}; {REPACK}")


def _identity_items(
    shard: Shard,
) -> Iterable[tuple[str, tuple[int, ...], np.dtype[Any], npt.NDArray[np.uint64]]]:
    indexes = sorted(
        (*shard.dense.values(), *shard.flat.values(), *shard.tables.values()), key=lambda item: item.dataset
    )
    none = np.zeros(0, np.uint64)  # not in a packed set; `index_dataset` refuses one without
    return [
        (index.dataset, index.shape, index.dtype, none if index.digests is None else index.digests)
        for index in indexes
    ]
