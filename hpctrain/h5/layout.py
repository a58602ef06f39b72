"""How the samples of a source are laid out in shards and chunks; pure arithmetic over the source and the options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.codecs import pipeline_for
from hpctrain.h5.fields import Field
from hpctrain.h5.filters import FilterPipeline
from hpctrain.h5.options import PackOptions
from hpctrain.h5.rounding import mantissa_bits
from hpctrain.h5.sources import Source

_CHUNK_BYTES: Final = 1 << 20
"""Chunks of the largest field: what one request to a parallel filesystem fetches (a stripe, an RPC of Lustre)."""
_MIN_CHUNK_BYTES: Final = 64 << 10
_MIN_CHUNKS: Final = 64
"""Chunks that a small set is cut into all the same, so that they can be shuffled and dealt to lanes."""
_MAX_CHUNK_BYTES: Final = 1 << 30  # the filters' own bounds are near 2 GiB
_MIN_CHUNK_VALUES: Final = 4096
_OFFSETS_CHUNK: Final = 8192  # 64 KiB


@dataclass(frozen=True)
class Layout:
    """Shapes of everything that is written.

    `shard_samples` samples per shard, `chunk_samples` per chunk of the dense fields; `chunk_values` values per chunk of
    the flat dataset of each ragged field, `offsets_chunk` offsets per chunk of its offsets; `raw_bytes` of all samples.
    """

    fields: dict[str, Field]
    num_samples: int
    chunk_samples: int
    shard_samples: int
    chunk_values: dict[str, int]
    offsets_chunk: int
    raw_bytes: int


def plan_layout(source: Source, options: PackOptions) -> Layout:
    """The layout of a source; raises `DataError` when there is nothing to pack, `UsageError` for chunks too large."""
    num_samples = source.num_samples
    if num_samples < 1 or not source.fields:
        raise DataError(f"there is nothing to pack: {num_samples} samples, {len(source.fields)} fields")
    fields = {name: _stored_field(field, options) for name, field in source.fields.items()}
    dense_bytes = [field.sample_bytes for field in fields.values() if field.kind == "dense"]
    values = {name: source.num_values(name) for name, field in fields.items() if field.kind == "ragged"}
    ragged_bytes = [count * fields[name].dtype.itemsize for name, count in values.items()]
    raw_bytes = num_samples * sum(dense_bytes) + sum(ragged_bytes)
    mean_bytes = [-(-size // num_samples) for size in ragged_bytes]
    chunk_samples = _chunk_samples(
        options, num_samples, max(dense_bytes, default=1), max(mean_bytes, default=1)
    )
    chunk_raw_bytes = max(1.0, raw_bytes / num_samples * chunk_samples)
    shard_samples = chunk_samples * max(1, int(options.shard_mib * (1 << 20) / chunk_raw_bytes))
    return Layout(
        fields=fields,
        num_samples=num_samples,
        chunk_samples=chunk_samples,
        shard_samples=shard_samples,
        chunk_values={
            name: _chunk_values(count * chunk_samples // num_samples, fields[name])
            for name, count in values.items()
        },
        offsets_chunk=min(_OFFSETS_CHUNK, min(shard_samples, num_samples) + 1),
        raw_bytes=raw_bytes,
    )


def chunk_pipeline(field: Field, chunk_shape: tuple[int, ...]) -> FilterPipeline:
    """The pipeline that chunks of this shape are encoded with."""
    chunk_bytes = int(np.prod(chunk_shape, dtype=np.int64)) * field.dtype.itemsize
    return pipeline_for(field.codec, field.dtype, chunk_bytes, chunk_bytes // chunk_shape[0])


def _stored_field(field: Field, options: PackOptions) -> Field:
    dtype = np.dtype(options.store) if options.store and field.dtype.kind == "f" else field.dtype
    bits = [] if field.keep_bits is None else [field.keep_bits, mantissa_bits(dtype)]
    if options.keep_bits is not None and dtype.kind == "f":
        if options.keep_bits > mantissa_bits(dtype):
            raise UsageError(
                f"keep-bits is {options.keep_bits}, but field {field.name!r} is {dtype.name}, whose mantissa has "
                f"{mantissa_bits(dtype)} bits; give at most as many"
            )
        bits.append(options.keep_bits)
    keep_bits = min(bits, default=None)  # of a field that was rounded before no more can be kept
    return dataclasses.replace(
        field, dtype=dtype.newbyteorder("<"), codec=options.codec, keep_bits=keep_bits, mean=None, std=None
    )


def _chunk_samples(options: PackOptions, num_samples: int, dense_bytes: int, ragged_bytes: int) -> int:
    """Samples per chunk, at most as many as there are.

    `dense_bytes`: of one sample of the largest dense field; `ragged_bytes`: of a mean sample of the largest ragged one,
    whose flat dataset has chunks of its own, within their bound.
    """
    largest_bytes = max(dense_bytes, ragged_bytes)
    wanted_bytes = min(_CHUNK_BYTES, max(_MIN_CHUNK_BYTES, num_samples * largest_bytes // _MIN_CHUNKS))
    chosen = min(options.chunk_samples or -(-wanted_bytes // largest_bytes), num_samples)
    if chosen * dense_bytes > _MAX_CHUNK_BYTES:
        raise UsageError(
            f"a chunk of {chosen} samples is {chosen * dense_bytes} bytes, but the bound is {_MAX_CHUNK_BYTES}; "
            "give a smaller --chunk-samples, or smaller samples"
        )
    return chosen


def _chunk_values(mean_values: int, field: Field) -> int:
    """Values per chunk of a ragged field: about those of one sample chunk, so that few chunks are read twice."""
    return min(max(mean_values, _MIN_CHUNK_VALUES), _CHUNK_BYTES // field.dtype.itemsize)
