"""Samples in HDF5 files as their owner wrote them, read without packing them first.

A set of files becomes a `PackedSet` whose chunks are those that are there. No digests are kept in such files: the
comparison with libhdf5 at opening, the checksums that the files may have, and the identity stand in for them.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.chunks import FileSource
from hpctrain.h5.compare import sampled_chunks
from hpctrain.h5.dataset import DEFAULT_BOUNDS, Dataset
from hpctrain.h5.fields import Field
from hpctrain.h5.index import ChunkIndex
from hpctrain.h5.index_cache import cached_dataset
from hpctrain.h5.packed import PackedSet, Shard
from hpctrain.h5.roads import PIECE_BYTES, in_pieces

_SAMPLED_CHUNKS: Final = 16  # of a dataset in one file
_SAMPLED_OF_SET: Final = (
    1024  # of a dataset in all files: each is a read from the shared filesystem at every start
)
_SAMPLED_BYTES: Final = 1 << 16  # of rows that stand in for a chunk in the identity where there are no chunks

Datasets = dict[str, Dataset]


def open_files(
    paths: Sequence[Path],
    fields: Mapping[str, str],
    *,
    cache_dir: Path | None = None,
    verify_chunks: int = 4,
    max_bytes: int = DEFAULT_BOUNDS.max_bytes,
    max_chunk_bytes: int = DEFAULT_BOUNDS.max_chunk_bytes,
    max_chunks: int = DEFAULT_BOUNDS.max_chunks,
) -> PackedSet:
    """The samples of one or several HDF5 files; axis 0 of every dataset counts them.

    `fields` maps names of fields to paths of datasets, the same in every file. Booleans become uint8 and complex
    numbers pairs of floats (a last axis of 2). A sample chunk has as many rows as a chunk of the field with the most
    bytes. Indexes are kept in `cache_dir`; the rest as for `open_dataset`. The identity is made of shapes, types,
    filters, chunk tables and some of the stored bytes, not of paths.

    Raises `UsageError` without files or fields; `DataError`, naming file and dataset, for what `open_dataset` refuses,
    for types that cannot be trained on, and where the files or the lengths of fields disagree; `StorageError` when a
    file cannot be read.
    """
    if not paths or not fields:
        raise UsageError("name at least one HDF5 file and one field (name = dataset path)")
    arguments = {
        "verify_chunks": verify_chunks,
        "max_bytes": max_bytes,
        "max_chunk_bytes": max_chunk_bytes,
        "max_chunks": max_chunks,
    }
    files: list[Datasets] = []
    for path in paths:
        opened = {name: cached_dataset(cache_dir, path, place, **arguments) for name, place in fields.items()}
        files.append({name: _as_numbers(dataset, name) for name, dataset in opened.items()})
        _check_lengths(files[-1])
        _check_alike(files[0], files[-1])
    chunk_samples = _chunk_samples(files[0])
    shards = tuple(
        _shard(Path(path).absolute(), file, chunk_samples) for path, file in zip(paths, files, strict=True)
    )
    return PackedSet(
        root=Path(os.path.commonpath([shard.path.parent for shard in shards])),
        fields={
            name: Field(name, "dense", item.dtype, item.shape[1:], "") for name, item in files[0].items()
        },
        shards=shards,
        chunk_samples=chunk_samples,
        num_samples=sum(shard.num_samples for shard in shards),
        identity=_identity(files),
        classes=None,
    )


def _as_numbers(dataset: Dataset, field: str) -> Dataset:
    """The dataset in a type that can be trained on: integers or floats of 8 bytes at most."""
    dtype = dataset.dtype
    if dataset.shape == ():
        raise DataError(
            f"{_where(dataset)} has no rows, so it cannot be the field {field!r}; name another dataset"
        )
    if dtype.kind in "iuf" and dtype.itemsize <= 8:
        return _viewed(dataset, np.dtype(dtype.str))
    if dtype.kind == "b":
        return _viewed(dataset, np.dtype(np.uint8))
    if dtype.kind == "c" and dtype.itemsize <= 16 and dataset.index is not None:
        return _viewed(dataset, np.dtype(f"{dtype.byteorder}f{dtype.itemsize // 2}"), (2,))
    raise DataError(
        f"{_where(dataset)} holds {_kind(dataset)}, which the field {field!r} cannot be made of; {_advice(dataset)}"
    )


def _kind(dataset: Dataset) -> str:
    if dataset.dtype.hasobject:
        return f"values that are no numbers of fixed size ({dataset.reason})"
    return f"values of the type {dataset.dtype}"


def _advice(dataset: Dataset) -> str:
    if dataset.dtype.names is not None:
        return "write the member you need as a dataset of its own"
    if dataset.dtype.hasobject:
        return "pack it: `hpctrain pack` makes ragged fields of such rows"
    return "convert it to integers or floats, for instance with `hpctrain pack`"


def _viewed(dataset: Dataset, dtype: np.dtype[np.generic], tail: tuple[int, ...] = ()) -> Dataset:
    """The same bytes as another type, with `tail` as further axes."""
    index = dataset.index and dataclasses.replace(
        dataset.index,
        dtype=dtype,
        shape=(*dataset.index.shape, *tail),
        chunk_shape=(*dataset.index.chunk_shape, *tail),
    )
    return dataclasses.replace(dataset, dtype=dtype, shape=(*dataset.shape, *tail), index=index)


def _check_lengths(file: Datasets) -> None:
    first_name, first = next(iter(file.items()))
    for name, dataset in file.items():
        if dataset.num_rows != first.num_rows:
            raise DataError(
                f"{_where(dataset)} has {dataset.num_rows} rows for the field {name!r}, but {first.name!r} has "
                f"{first.num_rows} for {first_name!r}: every sample needs a row in both; cut or complete one of them"
            )
    if not first.num_rows:
        raise DataError(f"{_where(first)} has no rows; leave the file out")


def _check_alike(first: Datasets, other: Datasets) -> None:
    for name, wanted in first.items():
        found = other[name]
        for what, one, two in (
            ("type", wanted.dtype.str, found.dtype.str),
            ("shape of a sample", wanted.shape[1:], found.shape[1:]),
        ):
            if one != two:
                raise DataError(
                    f"{_where(found)}: the {what} of the field {name!r} is {two}, but {one} in {wanted.path}; "
                    "files of one set must be alike"
                )


def _where(dataset: Dataset) -> str:
    return f"{dataset.path}: dataset {dataset.name!r}"


def _chunk_samples(file: Datasets) -> int:
    """Rows in a chunk of the field with the most bytes; where it has no chunks, about 1 MiB of them."""
    largest = max(file.values(), key=_row_bytes)
    if largest.index is not None:
        return largest.index.chunk_shape[0]
    return max(min(PIECE_BYTES // max(_row_bytes(largest), 1), largest.num_rows), 1)


def _row_bytes(dataset: Dataset) -> int:
    return math.prod(dataset.shape[1:]) * dataset.dtype.itemsize


def _shard(path: Path, file: Datasets, chunk_samples: int) -> Shard:
    dense = {name: dataset.index for name, dataset in file.items() if dataset.index is not None}
    return Shard(
        path,
        next(iter(file.values())).num_rows,
        {name: in_pieces(item, chunk_samples) if item.contiguous else item for name, item in dense.items()},
        flat={},
        offsets={},
        library={name: dataset for name, dataset in file.items() if dataset.index is None},
    )


def _identity(files: Sequence[Datasets]) -> str:
    """xxh3_128 (hex) of what makes the set: it changes when a file is changed in place where it is sampled."""
    hasher = xxhash.xxh3_128()
    count = max(min(_SAMPLED_CHUNKS, _SAMPLED_OF_SET // len(files)), 1)
    for file in files:
        with FileSource() as source:  # one per file: there may be more files than a process may have open
            for name, dataset in file.items():
                hasher.update(f"{name}\0{dataset.shape}\0{dataset.dtype.str}\0".encode())
                if dataset.index is None:
                    _add_library(hasher, dataset, count)
                else:
                    _add_index(hasher, dataset.index, count, source)
    return hasher.hexdigest()


def _add_index(hasher: xxhash.xxh3_128, index: ChunkIndex, count: int, source: FileSource) -> None:
    if index.contiguous:  # the pieces are no part of the file: always the same ones here
        row_bytes = math.prod(index.shape[1:]) * index.dtype.itemsize
        index = in_pieces(index, max(_SAMPLED_BYTES // max(row_bytes, 1), 1))
    filters = [(item.id, item.cd_values) for item in index.pipeline.filters]
    hasher.update(f"{filters}\0{index.chunk_shape}\0{index.raw_edges}\0{index.fill.hex()}\0".encode())
    for column, kind in ((index.offsets, "<i8"), (index.sizes, "<i8"), (index.masks, "<u4")):
        hasher.update(np.ascontiguousarray(column, kind).tobytes())
    for chunk in sampled_chunks(index, count):
        hasher.update(source.read(index, chunk))


def _add_library(hasher: xxhash.xxh3_128, dataset: Dataset, count: int) -> None:
    """Of a dataset without an index: runs of rows, as libhdf5 reads them."""
    rows = min(max(_SAMPLED_BYTES // max(_row_bytes(dataset), 1), 1), dataset.num_rows)
    for start in np.unique(np.linspace(0, dataset.num_rows - rows, count).round().astype(np.int64)).tolist():
        hasher.update(dataset.read_rows(start, start + rows).tobytes())
