"""Reading rows of datasets: stored bytes by pread, verified by digest, decoded outside libhdf5 and outside the GIL."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.h5.chunks import ChunkSource, FileSource, read_flat
from hpctrain.h5.index import ChunkIndex
from hpctrain.h5.packed import PackedSet, Shard
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.scratch import Scratch
from hpctrain.h5.times import ReadTimes

__all__ = [
    "ChunkSource",
    "FileSource",
    "Ragged",
    "RowReader",
    "read_field",
    "read_sample",
    "read_sample_chunk",
]


class RowReader:
    """Reads rows (indices along axis 0) of dense datasets; safe to use from several threads.

    Memory for stored bytes and for chunks that are only partly wanted is kept per thread and used again.
    """

    def __init__(self, source: ChunkSource, times: ReadTimes | None = None) -> None:
        self._source = source
        self._times = times or ReadTimes()
        self._scratch = Scratch()

    def read(self, index: ChunkIndex, first: int, out: npt.NDArray[Any]) -> None:
        """Fill `out`, shape (rows, *sample_shape) in native byte order, with the rows from `first` on.

        Where `out` is longer than what is left of the dataset, its last rows stay or become padding. Raises what the
        source raises, and `DataError` for bytes that do not decode.
        """
        if _is_one_chunk(index, first, len(out)):
            self._decode(index, first // index.chunk_shape[0], out)
        else:
            self._read_parts(index, first, min(first + len(out), index.shape[0]), out)

    def _read_parts(self, index: ChunkIndex, first: int, stop: int, out: npt.NDArray[Any]) -> None:
        """Rows that lie in several chunks, or in parts of some."""
        for chunk, corner in _chunks_of_rows(index, first, stop):
            whole = self._scratch.array("chunk", index.chunk_shape, index.dtype.newbyteorder("="))
            self._decode(index, chunk, whole)
            begun_s = time.perf_counter()
            _copy_overlap(index, corner, whole, first, stop, out)
            self._times.add(copy_s=time.perf_counter() - begun_s)

    def _decode(self, index: ChunkIndex, chunk: int, out: npt.NDArray[Any]) -> None:
        begun_s = time.perf_counter()
        stored = self._source.read(index, chunk, lambda size: self._scratch.bytes("stored", size))
        read_s = time.perf_counter()
        index.decode_into(chunk, stored, out.view(index.dtype))
        if not index.dtype.isnative:
            out.byteswap(inplace=True)
        self._times.add(
            read_s=read_s - begun_s,
            decode_s=time.perf_counter() - read_s,
            read_bytes=len(stored),
            decoded_bytes=out.nbytes,
            chunks=1,
        )


def _is_one_chunk(index: ChunkIndex, first: int, rows: int) -> bool:
    shape = index.chunk_shape
    return rows == shape[0] and first % shape[0] == 0 and shape[1:] == index.shape[1:]


def _chunks_of_rows(index: ChunkIndex, first: int, stop: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Number and corner of every chunk that holds some of the rows [first, stop)."""
    shape = index.chunk_shape
    grid = [-(-extent // step) for extent, step in zip(index.shape, shape, strict=True)]
    rows = range(first // shape[0], -(-stop // shape[0]))
    for at in itertools.product(rows, *map(range, grid[1:])):
        number = 0
        for position, extent in zip(at, grid, strict=True):
            number = number * extent + position
        yield number, tuple(position * step for position, step in zip(at, shape, strict=True))


def _copy_overlap(
    index: ChunkIndex,
    corner: tuple[int, ...],
    chunk: npt.NDArray[Any],
    first: int,
    stop: int,
    out: npt.NDArray[Any],
) -> None:
    """Copy what a chunk and the rows [first, stop) have in common; `out` begins at row `first`."""
    begin, end = max(first, corner[0]), min(stop, corner[0] + len(chunk))
    taken: list[slice] = [slice(begin - corner[0], end - corner[0])]
    placed: list[slice] = [slice(begin - first, end - first)]
    for start, step, extent in zip(corner[1:], index.chunk_shape[1:], index.shape[1:], strict=True):
        length = min(step, extent - start)
        taken.append(slice(0, length))
        placed.append(slice(start, start + length))
    out[tuple(placed)] = chunk[tuple(taken)]


def read_sample_chunk(
    packed: PackedSet, source: ChunkSource, chunk: int
) -> dict[str, npt.NDArray[Any] | Ragged]:
    """All fields of the samples of one sample chunk, decoded and without padding, in native byte order.

    Dense fields have shape (rows, *sample_shape), ragged ones are `Ragged` of `rows` rows; `rows` is
    `packed.chunk_sizes[chunk]`. Raises what `source` raises, and `DataError` for bytes that do not decode.
    """
    number, row = packed.locate(chunk)
    shard, first = packed.shards[number], row * packed.chunk_samples
    rows = int(packed.chunk_sizes[chunk])
    reader = RowReader(source)
    fields: dict[str, npt.NDArray[Any] | Ragged] = {}
    for name, field in packed.fields.items():
        if field.kind == "ragged":
            fields[name] = _read_rows(shard, name, source, first, rows)
        elif name in shard.library:
            fields[name] = shard.library[name].read_rows(first, first + rows, source)
        else:
            whole = np.empty((packed.chunk_samples, *field.sample_shape), field.dtype.newbyteorder("="))
            reader.read(shard.dense[name], first, whole)
            fields[name] = whole[:rows]
    return fields


def read_field(packed: PackedSet, source: ChunkSource, name: str) -> npt.NDArray[Any]:
    """A dense field of all samples, shape (num_samples, *sample_shape), native; errors as for `read_sample_chunk`."""
    field, reader = packed.fields[name], RowReader(source)
    out = np.empty((packed.num_samples, *field.sample_shape), field.dtype.newbyteorder("="))
    begin = 0
    for shard in packed.shards:
        part = out[begin : begin + shard.num_samples]
        if name in shard.library:
            part[:] = shard.library[name].read_rows(0, shard.num_samples, source)
        else:
            reader.read(shard.dense[name], 0, part)
        begin += shard.num_samples
    return out


def read_sample(packed: PackedSet, source: ChunkSource, name: str, sample: int) -> npt.NDArray[Any]:
    """One field of one sample: its array, or the 1-D row of a ragged field; errors as for `read_sample_chunk`."""
    starts = np.concatenate(([0], np.cumsum(packed.chunk_sizes)))
    chunk = int(np.searchsorted(starts, sample, side="right")) - 1
    values = read_sample_chunk(packed, source, chunk)[name]
    row = sample - int(starts[chunk])
    return np.asarray(values.row(row) if isinstance(values, Ragged) else values[row])


def _read_rows(shard: Shard, name: str, source: ChunkSource, first: int, rows: int) -> Ragged:
    index = shard.flat[name]
    offsets = shard.offsets[name][first : first + rows + 1]
    return Ragged(read_flat(index, source, int(offsets[0]), int(offsets[-1])), offsets - offsets[0])
