"""Chunks that are held in memory for a while, field by field, and the rows of batches made of them.

There are slots for so many sample chunks. A dense field whose samples can be decoded one by one keeps the *stored*
bytes: a sample is decoded straight into its row of the batch, so a shuffle window costs its compressed size. Others
keep decoded rows, all slots in one array: a batch is one `numpy.take`. Ragged fields keep values and offsets.

The memory of a slot is used again by the next chunk in it; pages that were never written take none.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from hpctrain.data.buffers import BufferPool
from hpctrain.errors import DataError
from hpctrain.h5.chunks import ChunkSource, read_flat
from hpctrain.h5.fields import Field
from hpctrain.h5.filters import Buffer
from hpctrain.h5.filters.blosc import BlockReader, room_bytes
from hpctrain.h5.index import ChunkIndex
from hpctrain.h5.packed import PackedSet, Shard
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.reader import RowReader
from hpctrain.h5.times import ReadTimes

MIN_SAMPLE_BYTES: Final = 16 << 10
"""Smaller samples are decoded with their chunk: a call of a codec takes as long as 10 KiB of decoding."""

IdArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class ChunkPlace:
    """Where a sample chunk comes from: `rows` samples of `shard`, from its sample `first` on."""

    shard: Shard
    first: int
    rows: int


def place_of(packed: PackedSet, chunk: int) -> ChunkPlace:
    """The place of a sample chunk of the set."""
    number, row = packed.locate(chunk)
    return ChunkPlace(packed.shards[number], row * packed.chunk_samples, int(packed.chunk_sizes[chunk]))


class HeldField(Protocol):
    """The held chunks of one field."""

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot, at most."""
        ...

    def reserve(self, slots: int) -> None:
        """Have so many slots; what was held is gone."""
        ...

    def load(self, place: ChunkPlace, slot: int) -> None:
        """Read a chunk into a slot. Raises what the source raises, and `DataError`."""
        ...


class HeldDense(HeldField, Protocol):
    """A field with rows of equal shape."""

    def gather(self, slots: IdArray, rows: IdArray, out: npt.NDArray[Any]) -> None:
        """Fill `out`, shape (B, *sample_shape), with these rows of the chunks in these slots; int64, shape (B,)."""
        ...


class DecodedRows:
    """A dense field whose chunks are held decoded, in native byte order."""

    def __init__(self, packed: PackedSet, field: Field, reader: RowReader, times: ReadTimes) -> None:
        self._field, self._reader, self._times = field, reader, times
        self._chunk_samples = packed.chunk_samples
        self._dtype = field.dtype.newbyteorder("=")
        self._rows = np.empty((0, *field.sample_shape), self._dtype)

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot."""
        return self._chunk_samples * self._field.sample_bytes

    def reserve(self, slots: int) -> None:
        """Have so many slots."""
        self._rows = np.empty((slots * self._chunk_samples, *self._field.sample_shape), self._dtype)

    def load(self, place: ChunkPlace, slot: int) -> None:
        """Read and decode a chunk into a slot."""
        begin = slot * self._chunk_samples
        held = self._rows[begin : begin + self._chunk_samples]
        library = place.shard.library.get(self._field.name)
        if library is None:
            self._reader.read(place.shard.dense[self._field.name], place.first, held)
            return
        begun_s = time.perf_counter()
        held[: place.rows] = library.read_rows(
            place.first, place.first + place.rows, None
        )  # libhdf5 reads itself
        self._times.add(
            read_s=time.perf_counter() - begun_s, decoded_bytes=held[: place.rows].nbytes, chunks=1
        )

    def gather(self, slots: IdArray, rows: IdArray, out: npt.NDArray[Any]) -> None:
        """Copy rows; in mode "clip": NumPy buffers the result where it checks, and these are good."""
        begun_s = time.perf_counter()
        np.take(self._rows, slots * self._chunk_samples + rows, axis=0, out=out, mode="clip")
        self._times.add(copy_s=time.perf_counter() - begun_s)


class StoredRows:
    """A dense field whose chunks are held as stored: Blosc frames in which a sample is whole blocks."""

    def __init__(self, packed: PackedSet, field: Field, source: ChunkSource, times: ReadTimes) -> None:
        self._name, self._source, self._times = field.name, source, times
        self._sample_bytes, self._native = field.sample_bytes, field.dtype.isnative
        self._chunk_bytes = packed.chunk_samples * self._sample_bytes
        # in front of a chunk its reader keeps a header for each sample
        self._room = room_bytes(self._sample_bytes, self._chunk_bytes)
        self._most = self._room + max(
            int(shard.dense[field.name].sizes.max(initial=0)) for shard in packed.shards
        )
        self._stored = np.empty((0, self._most), np.uint8)
        self._samples: list[BlockReader | _WholeChunk] = []

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot: the largest stored chunk."""
        return self._most

    def reserve(self, slots: int) -> None:
        """Have so many slots."""
        self._stored = np.empty((slots, self._most), np.uint8)
        self._samples = [BlockReader.nothing()] * slots

    def load(self, place: ChunkPlace, slot: int) -> None:
        """Read a chunk into a slot."""
        index = place.shard.dense[self._name]
        begun_s = time.perf_counter()
        number = place.first // index.chunk_shape[0]
        memory = self._stored[slot]
        stored = self._source.read(index, number, lambda size: memory[self._room : self._room + size])
        self._samples[slot] = self._samples_of(index, number, stored, memory)
        self._times.add(read_s=time.perf_counter() - begun_s, read_bytes=len(stored), chunks=1)

    def _samples_of(
        self, index: ChunkIndex, chunk: int, stored: Buffer, memory: npt.NDArray[np.uint8]
    ) -> BlockReader | _WholeChunk:
        if index.masks[chunk] or len(stored) == 0:  # the writer left the filter out, or never wrote the chunk
            return _WholeChunk(index, chunk, stored)
        try:
            frame = BlockReader.of(stored, self._sample_bytes, self._chunk_bytes, memory)
        except DataError as error:
            raise DataError(f"{index.describe(chunk)}: {error}; {index.mend}") from error
        return _WholeChunk(index, chunk, stored) if frame is None else frame

    def gather(self, slots: IdArray, rows: IdArray, out: npt.NDArray[Any]) -> None:
        """Decode each sample straight into its row."""
        begun_s = time.perf_counter()
        flat = out.reshape(-1).view(np.uint8).reshape(len(out), self._sample_bytes)  # B may be 0
        for number, (slot, row) in enumerate(zip(slots.tolist(), rows.tolist(), strict=True)):
            self._samples[slot].decode_sample(row, flat[number])
        if not self._native:
            out.byteswap(inplace=True)
        self._times.add(decode_s=time.perf_counter() - begun_s, decoded_bytes=out.nbytes)


class RaggedRows:
    """A ragged field: values as they are, and the offsets of the rows in them."""

    def __init__(self, packed: PackedSet, field: Field, source: ChunkSource, times: ReadTimes) -> None:
        self._name, self._source, self._times = field.name, source, times
        self._dtype = field.dtype.newbyteorder("=")
        self._most = max(_most_values(packed, shard, field.name) for shard in packed.shards)
        self._values = np.empty((0, self._most), self._dtype)
        self._offsets: list[IdArray] = []
        self._pool = BufferPool()

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot: the largest chunk."""
        return self._most * self._dtype.itemsize

    def reserve(self, slots: int) -> None:
        """Have so many slots."""
        self._values = np.empty((slots, self._most), self._dtype)
        self._offsets = [np.zeros(1, np.int64)] * slots

    def load(self, place: ChunkPlace, slot: int) -> None:
        """Read and decode a chunk into a slot."""
        index = place.shard.flat[self._name]
        offsets = place.shard.offsets[self._name][place.first : place.first + place.rows + 1]
        begin, end = int(offsets[0]), int(offsets[-1])
        begun_s = time.perf_counter()
        read_flat(index, self._source, begin, end, self._values[slot, : end - begin])
        self._offsets[slot] = offsets - begin
        step = index.chunk_shape[0]
        self._times.add(
            read_s=time.perf_counter() - begun_s,
            read_bytes=int(index.sizes[begin // step : -(-end // step)].sum()),
            decoded_bytes=(end - begin) * self._dtype.itemsize,
            chunks=1,
        )

    def gather(self, slots: IdArray, rows: IdArray) -> Ragged:
        """These rows of the chunks in these slots."""
        begun_s = time.perf_counter()
        places = [
            (slot, self._offsets[slot][row], self._offsets[slot][row + 1])
            for slot, row in zip(slots.tolist(), rows.tolist(), strict=True)
        ]
        offsets = np.zeros(len(places) + 1, np.int64)
        np.cumsum([end - begin for _, begin, end in places], out=offsets[1:])
        values = self._pool.empty((int(offsets[-1]),), self._dtype)
        for (slot, begin, end), at in zip(places, offsets.tolist(), strict=False):
            values[at : at + end - begin] = self._values[slot, begin:end]
        self._times.add(copy_s=time.perf_counter() - begun_s)
        return Ragged(values, offsets)


def held_dense(
    packed: PackedSet, field: Field, source: ChunkSource, reader: RowReader, times: ReadTimes
) -> HeldDense:
    """How a dense field is held: stored where its samples can be decoded one by one, else decoded."""
    sample_bytes, block_bytes = field.sample_bytes, packed.block_bytes.get(field.name, 0)
    if sample_bytes >= MIN_SAMPLE_BYTES and block_bytes and sample_bytes % block_bytes == 0:
        return StoredRows(packed, field, source, times)
    return DecodedRows(packed, field, reader, times)


@dataclasses.dataclass(frozen=True)
class _WholeChunk:
    """A chunk that is not stored as the set's first one is, so that its samples do not decode alone."""

    index: ChunkIndex
    chunk: int
    stored: Buffer

    def decode_sample(self, row: int, out: npt.NDArray[np.uint8]) -> None:
        whole = np.empty(self.index.chunk_shape, self.index.dtype)
        self.index.decode_into(self.chunk, self.stored, whole)
        out[:] = whole[row].reshape(-1).view(np.uint8)


def _most_values(packed: PackedSet, shard: Shard, name: str) -> int:
    """Values of the fullest sample chunk of a shard."""
    offsets = shard.offsets[name]
    bounds = offsets[np.append(np.arange(0, shard.num_samples, packed.chunk_samples), shard.num_samples)]
    return int(np.diff(bounds).max(initial=0))
