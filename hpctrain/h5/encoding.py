"""From samples of a source to encoded chunks: conversion to the stored type, rounding, statistics, compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError
from hpctrain.h5.cleaning import sample_numbers
from hpctrain.h5.fields import Field
from hpctrain.h5.layout import Layout, chunk_pipeline
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.rounding import round_mantissa
from hpctrain.h5.sources import Columns, Source
from hpctrain.h5.stats import Moments, channels_of


@dataclass(frozen=True)
class EncodedChunk:
    """One sample chunk, ready to be written; the values of ragged fields are encoded by the writer, which cuts them."""

    rows: int
    raw_bytes: int
    dense: dict[str, bytes]
    ragged: dict[str, Ragged]
    moments: dict[str, Moments]


class Encoder:
    """Reads and encodes the sample chunks of a layout; used by several threads at once."""

    def __init__(self, source: Source, layout: Layout) -> None:
        self._source, self._layout = source, layout
        self._pipelines = {
            name: chunk_pipeline(item, (layout.chunk_samples, *item.sample_shape))
            for name, item in layout.fields.items()
            if item.kind == "dense"
        }

    def encode(self, start: int) -> EncodedChunk:
        """The sample chunk that begins at sample `start`."""
        layout = self._layout
        stop = min(start + layout.chunk_samples, layout.num_samples)
        columns = stored_columns(self._source, layout.fields, start, stop)
        raw_bytes, dense, ragged, moments = 0, {}, {}, {}
        for name, values in columns.items():
            if isinstance(values, Ragged):
                raw_bytes += values.values.nbytes
                ragged[name] = values
            else:
                raw_bytes += values.nbytes
                moments[name] = Moments.of(values, channels_of(layout.fields[name].sample_shape))
                dense[name] = self._pipelines[name].encode(padded(values, layout.chunk_samples))
        return EncodedChunk(stop - start, raw_bytes, dense, ragged, moments)


def stored_columns(source: Source, fields: dict[str, Field], start: int, stop: int) -> Columns:
    """Samples [start, stop) as they are stored; `fields` are those of the layout.

    Raises `DataError` for values that the stored type cannot hold.
    """
    columns = source.read(start, stop)
    numbers = sample_numbers(source, start, stop)
    for name, item in fields.items():
        values = columns[name]
        if not isinstance(values, Ragged):
            columns[name] = _stored(values, item, numbers)
    return {name: columns[name] for name in fields}


def padded(values: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """`values`, contiguous, with zeros after them up to `rows` along axis 0: edge chunks are stored full size."""
    if len(values) == rows:
        return np.ascontiguousarray(values)
    full = np.zeros((rows, *values.shape[1:]), values.dtype)
    full[: len(values)] = values
    return full


def _stored(values: npt.NDArray[Any], item: Field, numbers: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """`values` in the stored type, rounded. `numbers`: of the samples."""
    with np.errstate(over="ignore"):
        stored = values.astype(item.dtype, copy=False)
    _refuse_overflow(values, stored, item, numbers, "scale the field or leave out --store")
    if item.keep_bits is not None:
        stored = round_mantissa(stored, item.keep_bits)
        _refuse_overflow(values, stored, item, numbers, "keep more bits with --keep-bits, or scale the field")
    return stored


def _refuse_overflow(
    values: npt.NDArray[Any],
    stored: npt.NDArray[Any],
    item: Field,
    numbers: npt.NDArray[np.int64],
    mend: str,
) -> None:
    """Refuse finite values that have become infinite."""
    if stored is values or item.dtype.kind != "f":
        return
    lost = np.isinf(stored) & np.isfinite(values)
    if lost.any():
        where = np.argwhere(lost)[0]
        raise DataError(
            f"field {item.name!r}, sample {numbers[where[0]]}: {values[tuple(where)]} is beyond {item.dtype.name} "
            f"(largest {np.finfo(item.dtype).max}); {mend}"
        )
