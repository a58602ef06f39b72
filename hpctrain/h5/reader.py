"""Reading packed sets: stored bytes by pread, verified by digest, decoded outside libhdf5 and outside the GIL."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from hpctrain.h5.chunks import ChunkSource, FileSource, read_flat
from hpctrain.h5.packed import PackedSet, Shard
from hpctrain.h5.ragged import Ragged

__all__ = ["ChunkSource", "FileSource", "Ragged", "read_sample_chunk"]


def read_sample_chunk(
    packed: PackedSet, source: ChunkSource, chunk: int
) -> dict[str, npt.NDArray[Any] | Ragged]:
    """All fields of the samples of one sample chunk, decoded and without padding.

    Dense fields have shape (rows, *sample_shape), ragged ones are `Ragged` of `rows` rows; `rows` is
    `packed.chunk_sizes[chunk]`. Raises what `source` raises, and `DataError` for bytes that do not decode.
    """
    number, row = packed.locate(chunk)
    shard = packed.shards[number]
    rows = int(packed.chunk_sizes[chunk])
    fields: dict[str, npt.NDArray[Any] | Ragged] = {
        name: index.decode(row, source.read(index, row))[:rows] for name, index in shard.dense.items()
    }
    for name in shard.flat:
        fields[name] = _read_rows(shard, name, source, row * packed.chunk_samples, rows)
    return {name: fields[name] for name in packed.fields}


def _read_rows(shard: Shard, name: str, source: ChunkSource, first: int, rows: int) -> Ragged:
    index = shard.flat[name]
    offsets = shard.offsets[name][first : first + rows + 1]
    return Ragged(read_flat(index, source, int(offsets[0]), int(offsets[-1])), offsets - offsets[0])
