"""Blosc (32001): frames of c-blosc 1, as a whole or sample by sample.

A frame, all integers little-endian (c-blosc, README_CHUNK_FORMAT): u8 version, u8 codec version, u8 flags, u8 type
size; u32 raw bytes, block bytes, frame bytes. Flag 0x02: the raw bytes follow as they are. Otherwise one u32 per block
follows, where the block begins in the frame; what a block decodes to depends on nothing but the block, the flags, the
type size and the block bytes. Blocks lie in any order: those of a writer with several threads as they became ready.

numcodecs decodes them straight into the target and without the GIL, at the rate of imagecodecs (the same c-blosc),
which is taken for Snappy: numcodecs' library was built without it. The HDF5 filter stores incompressible chunks
unfiltered. The package's `decompress` was preferred to blosc_getitem of the same library, called by ctypes: that one
decodes into memory of its own and copies, and took as long or longer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Self, cast

import numcodecs.blosc
import numpy as np

from hpctrain.errors import DataError
from hpctrain.h5.filters import blosc_lz4
from hpctrain.h5.filters.base import DECODE_ERRORS, Buffer, Bytes, imagecodecs

HEADER_BYTES: Final = 16

# Codec numbers as the filter keeps them in cd_values[6].
_CODECS: Final = {0: b"blosclz", 1: b"lz4", 2: b"lz4hc", 4: b"zlib", 5: b"zstd"}
_LZ4: Final = 1
_BYTE_SHUFFLE: Final = 1
_SNAPPY: Final = 2  # its number in the flags of a frame, bits 5 to 7
_MEMCPYED: Final = 0x02


def decode_into(data: Buffer, cd_values: tuple[int, ...], out: Bytes) -> int:
    """Decode one frame into the beginning of `out`; returns the number of bytes. Client data is not needed."""
    raw_bytes, _ = _checked_header(data)
    if raw_bytes > len(out):
        raise ValueError(f"the Blosc header says {raw_bytes} raw bytes, more than {len(out)}")
    if _is_snappy(data):
        return len(imagecodecs().blosc_decode(data, numthreads=1, out=out[:raw_bytes].data))
    if raw_bytes:
        _decompress(memoryview(data), out)
    return raw_bytes


def encode(data: Buffer, cd_values: tuple[int, ...], block_bytes: int) -> bytes:
    """Encode as the HDF5 filter would; `block_bytes` is what to ask the library for, 0 leaves it the choice.

    LZ4 with byte shuffle in blocks of a size asked for is encoded by `blosc_lz4`, to be decoded faster.
    """
    item_bytes, level, shuffle, codec = cd_values[2], cd_values[4], cd_values[5], cd_values[6]
    if block_bytes and codec == _LZ4 and shuffle == _BYTE_SHUFFLE and blosc_lz4.is_for(item_bytes, level):
        return blosc_lz4.encode(data, item_bytes, level, block_bytes)
    numcodecs.blosc.use_threads = False
    frame = numcodecs.blosc.compress(data, _CODECS[codec], level, shuffle, block_bytes, item_bytes)
    return cast(bytes, frame)


def frame_block_bytes(header: Buffer) -> int:
    """Raw bytes of a block, as the first 16 bytes of a frame say; 0 for fewer bytes than that."""
    return int(struct.unpack_from("<I", header, 8)[0]) if len(header) >= HEADER_BYTES else 0


def room_bytes(sample_bytes: int, chunk_bytes: int) -> int:
    """How many bytes `BlockReader` needs in front of a stored chunk."""
    return HEADER_BYTES * (chunk_bytes // sample_bytes - 1) if 0 < sample_bytes < chunk_bytes else 0


@dataclass(frozen=True, slots=True)
class BlockReader:
    """Decodes single samples out of one stored chunk, in which each sample is one or more whole blocks.

    In front of the blocks lie small headers, one per sample: its own frame header and block table, which points at the
    sample's blocks where they are. So each sample is a frame that an ordinary decoder takes, and no bytes are copied
    to decode it: copying the blocks of each sample behind a header of its own took 8 to 12 % longer. Threads may share
    a reader.
    """

    _frames: memoryview  # the headers, one after another, and the blocks
    _header_bytes: int  # of one sample; 0: raw samples, not frames
    sample_bytes: int
    num_samples: int

    @classmethod
    def nothing(cls) -> Self:
        """A reader of no samples."""
        return cls(memoryview(b""), 0, 0, 0)

    @classmethod
    def of(
        cls, stored: Buffer, sample_bytes: int, chunk_bytes: int, memory: Bytes | None = None
    ) -> Self | None:
        """A reader of a stored chunk, or None where its blocks are not parts of samples.

        Args:
            stored: the chunk as stored: one Blosc frame. One that was not compressed stays in use.
            sample_bytes: raw bytes of one sample.
            chunk_bytes: raw bytes of the chunk.
            memory: where to keep headers and blocks (default: memory of its own), shape (bytes,), uint8, at least
                `room_bytes(...) + len(stored)`. Nothing is copied where `stored` already lies in it, behind
                `room_bytes` bytes; its header and table are overwritten.

        Raises `DataError` for a frame that contradicts itself or `chunk_bytes`.
        """
        try:
            raw_bytes, block_bytes = _checked_header(stored)
            if raw_bytes != chunk_bytes:
                raise ValueError(f"the Blosc header says {raw_bytes} raw bytes")
            if sample_bytes <= 0 or raw_bytes == 0 or raw_bytes % sample_bytes:
                return None
            if stored[2] & _MEMCPYED:
                view = memoryview(stored)[HEADER_BYTES:]
                return cls(view, 0, sample_bytes, len(view) // sample_bytes)
            if sample_bytes % block_bytes or _is_snappy(stored):
                return None
            return cls._of_blocks(stored, sample_bytes, raw_bytes // sample_bytes, block_bytes, memory)
        except DECODE_ERRORS as error:
            raise _undecodable(len(stored), chunk_bytes, error) from error

    @classmethod
    def _of_blocks(
        cls, stored: Buffer, sample_bytes: int, num_samples: int, block_bytes: int, memory: Bytes | None
    ) -> Self:
        blocks = sample_bytes // block_bytes
        starts = _checked_starts(stored, num_samples * blocks).reshape(num_samples, blocks)
        room = room_bytes(sample_bytes, num_samples * sample_bytes)
        frames = _behind_room(stored, room, memory)
        headers = np.empty((num_samples, 4 + blocks), "<u4")
        header_bytes = headers.shape[1] * 4
        own_starts = np.arange(num_samples, dtype="<u4") * np.uint32(header_bytes)
        headers[:, 0] = np.frombuffer(stored, "<u4", 1)  # versions, flags and type size
        headers[:, 1] = sample_bytes
        headers[:, 2] = block_bytes
        headers[:, 3] = len(frames) - own_starts
        headers[:, 4:] = starts + (np.uint32(room) - own_starts)[:, None]
        frames[: headers.nbytes] = headers.reshape(-1).view(np.uint8)  # ends where the first block begins
        return cls(frames.data.toreadonly(), header_bytes, sample_bytes, num_samples)

    def decode_sample(self, number: int, out: Bytes) -> None:
        """Decode sample `number` into `out`, uint8 of shape (sample_bytes,), C-contiguous.

        Raises `DataError` when there is no such sample or its bytes do not decode.
        """
        if not 0 <= number < self.num_samples or len(out) != self.sample_bytes:
            raise DataError(
                f"sample {number} of {len(out)} bytes was asked for; the chunk holds {self.num_samples} of "
                f"{self.sample_bytes}"
            )
        if self._header_bytes == 0:
            begin = number * self.sample_bytes
            out[:] = np.frombuffer(self._frames, np.uint8, self.sample_bytes, begin)
            return
        try:
            _decompress(self._frames[number * self._header_bytes :], out)
        except DECODE_ERRORS as error:
            raise _undecodable(len(self._frames), self.sample_bytes, error) from error


def _decompress(frame: memoryview, out: Bytes) -> None:
    numcodecs.blosc.use_threads = False  # ranks share the node: the library's own pool would oversubscribe it
    numcodecs.blosc.decompress(frame, out)


def _is_snappy(frame: Buffer) -> bool:
    return frame[2] & _MEMCPYED == 0 and frame[2] >> 5 == _SNAPPY


def _checked_header(data: Buffer) -> tuple[int, int]:
    """Raw bytes and block bytes of a frame, after checking them against each other and the bytes there are."""
    if len(data) < HEADER_BYTES:
        raise ValueError(f"{len(data)} bytes are too few for a Blosc frame")
    _, _, flags, type_bytes, raw_bytes, block_bytes, frame_bytes = struct.unpack_from("<4B3I", data)
    if frame_bytes != len(data):
        raise ValueError(f"the Blosc header says {frame_bytes} stored and {raw_bytes} raw bytes")
    if flags & _MEMCPYED:
        if frame_bytes != raw_bytes + HEADER_BYTES:
            raise ValueError(f"the Blosc header says {raw_bytes} raw bytes stored as {frame_bytes}")
    elif raw_bytes and not (0 < block_bytes <= raw_bytes and type_bytes > 0):
        raise ValueError(f"the Blosc header says blocks of {block_bytes} bytes, items of {type_bytes}")
    return raw_bytes, block_bytes


def _checked_starts(data: Buffer, num_blocks: int) -> Bytes:
    """Where the blocks begin, u32 of shape (num_blocks,), each behind the table and before the end."""
    first = HEADER_BYTES + 4 * num_blocks
    if len(data) < first:
        raise ValueError(f"{len(data)} bytes are too few for a table of {num_blocks} Blosc blocks")
    starts = np.frombuffer(data, "<u4", num_blocks, HEADER_BYTES)
    if int(starts.min()) < first or int(starts.max()) >= len(data):
        raise ValueError(f"a Blosc block begins outside of the {len(data)} bytes of its frame")
    return starts


def _behind_room(stored: Buffer, room: int, memory: Bytes | None) -> Bytes:
    """`stored` behind `room` bytes, in `memory`; it may lie there already."""
    source = np.frombuffer(stored, np.uint8)
    frames = np.empty(room + len(source), np.uint8) if memory is None else memory[: room + len(source)]
    if len(frames) < room + len(source):
        raise ValueError(f"{len(frames)} bytes of memory are too few for {room} + {len(source)}")
    behind = frames[room:]
    if behind.ctypes.data != source.ctypes.data:
        behind[:] = source
    return frames


def _undecodable(stored_bytes: int, raw_bytes: int, error: Exception) -> DataError:
    return DataError(f"{stored_bytes} stored bytes do not decode to {raw_bytes} bytes: {error}")
