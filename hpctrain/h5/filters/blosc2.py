"""Blosc2 (32026): a contiguous frame that holds one chunk (C-Blosc2, README_CFRAME_FORMAT, README_B2ND_METALAYER).

The frame header is MessagePack with everything at a fixed place, big-endian: at byte 11 u32 header bytes, 16 u64 frame
bytes, 30 i64 raw bytes, 39 i64 stored bytes of all chunks, 58 i32 raw bytes of a chunk; from byte 87 on the directory
of metalayers. Behind the header lies the chunk, behind that a chunk of i64 offsets: a negative one is a chunk that is
not stored, 0x81 in its top byte stands for zeros.

Chunks of two or more dimensions have a metalayer "b2nd": version, dimensions, and the extents of the array, of its
chunk (the same here) and of the blocks. The blocks follow each other, the last ones of each axis padded to full size.

imagecodecs decodes the chunk without the GIL; the frame is taken apart here, because the package blosc2 holds the GIL
while it decodes frames, takes 0.27 s to import, and brings a dozen packages with it.
"""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpctrain.h5.filters.base import SCRATCH, Buffer, Bytes, imagecodecs

_MAGIC: Final = b"\x9e\xa8b2frame\0"
_DIRECTORY_AT: Final = 87
_ONE_B2ND: Final = b"\xde\x00\x01\xa4b2nd\xd2"  # a map of one name, and where its content is
_CHUNK_HEADER_BYTES: Final = 32
_ZEROS: Final = 0x81
_MAX_DIMENSIONS: Final = 8
_MAX_PADDING: Final = 8  # padded size against the chunk's; c-blosc2 chooses blocks that stay below 4


@dataclass(frozen=True)
class _Frame:
    chunk: memoryview | None  # None: zeros
    raw_bytes: int
    extents: tuple[int, ...] = ()  # of the chunk; (): it is not in blocks
    block: tuple[int, ...] = ()


def decode_into(data: Buffer, cd_values: tuple[int, ...], out: Bytes) -> int:
    """Decode into the beginning of `out`; returns the number of bytes. Client data is not needed."""
    frame = _parse(memoryview(data))
    if not frame.extents:
        if frame.raw_bytes > len(out):
            raise ValueError(f"the Blosc2 frame says {frame.raw_bytes} raw bytes, more than {len(out)}")
        _decode_chunk(frame, out[: frame.raw_bytes])
        return frame.raw_bytes
    items, grid = math.prod(frame.extents), _grid(frame)
    item_bytes, rest = divmod(frame.raw_bytes, math.prod(grid) * math.prod(frame.block))
    if rest or item_bytes * items > len(out) or frame.raw_bytes > _MAX_PADDING * item_bytes * items:
        raise ValueError(
            f"the Blosc2 frame says {frame.raw_bytes} bytes in blocks {frame.block} of {frame.extents}"
        )
    if frame.block == frame.extents:
        _decode_chunk(frame, out[: frame.raw_bytes])
    else:
        padded = SCRATCH.bytes("blosc2", frame.raw_bytes)
        _decode_chunk(frame, padded)
        _place_blocks(frame, grid, padded, out[: items * item_bytes], item_bytes)
    return items * item_bytes


def _parse(data: memoryview) -> _Frame:
    if len(data) < _DIRECTORY_AT or data[: len(_MAGIC)].tobytes() != _MAGIC:
        raise ValueError(f"{len(data)} bytes are not a Blosc2 frame")
    (header_bytes,), (frame_bytes,) = struct.unpack_from(">I", data, 11), struct.unpack_from(">Q", data, 16)
    (raw_bytes,), (stored_bytes,) = struct.unpack_from(">q", data, 30), struct.unpack_from(">q", data, 39)
    (chunk_bytes,) = struct.unpack_from(">i", data, 58)
    index_at = header_bytes + stored_bytes
    if frame_bytes != len(data) or not _DIRECTORY_AT <= header_bytes <= index_at < len(data):
        raise ValueError(
            f"the Blosc2 frame of {len(data)} bytes says {frame_bytes}, with an index at {index_at}"
        )
    if raw_bytes != chunk_bytes or raw_bytes < 0:
        raise ValueError(f"the Blosc2 frame of {raw_bytes} raw bytes has chunks of {chunk_bytes}, not one")
    offset = _offset(data[index_at:])
    if offset < 0 and offset >> 56 & 0xFF != _ZEROS:
        raise ValueError(f"the Blosc2 chunk is a special one, {offset >> 56 & 0xFF:#x}")
    chunk = None if offset < 0 else data[header_bytes + offset : index_at]
    return _Frame(chunk, raw_bytes, *_b2nd(data[:header_bytes]))


def _offset(index: memoryview) -> int:
    """Where the only chunk begins, from the chunk of offsets."""
    if len(index) < _CHUNK_HEADER_BYTES or struct.unpack_from("<i", index, 4)[0] != 8:
        raise ValueError("the Blosc2 frame does not have an index of one chunk")
    (index_bytes,) = struct.unpack_from("<i", index, 12)
    decoded = imagecodecs().blosc2_decode(index[:index_bytes], numthreads=1, out=bytearray(8))
    return int.from_bytes(decoded, "little", signed=True)


def _b2nd(header: memoryview) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Extents of the array and of its blocks; ((), ()) without that metalayer."""
    directory = bytes(header[_DIRECTORY_AT:])
    if directory[4:7] == b"\xde\x00\x00":
        return (), ()
    if directory[4 : 4 + len(_ONE_B2ND)] != _ONE_B2ND:
        raise ValueError("the Blosc2 frame has other metalayers than b2nd")
    (at,) = struct.unpack_from(">I", directory, 4 + len(_ONE_B2ND))
    content = bytes(header[at + 5 :])  # behind the type and length of a byte string
    dimensions = content[2] if len(content) > 2 else 0
    if not 0 < dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"the Blosc2 frame has {dimensions} dimensions")
    each = f">x{'xq' * dimensions}x{'xi' * dimensions}x{'xi' * dimensions}"
    numbers = struct.unpack_from(each, content, 3)
    shape, chunk, block = (numbers[i * dimensions : (i + 1) * dimensions] for i in range(3))
    if shape != chunk or any(not 0 < b <= c for b, c in zip(block, chunk, strict=True)):
        raise ValueError(f"the Blosc2 frame is an array {shape} in chunks {chunk} and blocks {block}")
    return shape, block


def _grid(frame: _Frame) -> tuple[int, ...]:
    """Number of blocks along each axis."""
    return tuple(-(-extent // step) for extent, step in zip(frame.extents, frame.block, strict=True))


def _decode_chunk(frame: _Frame, out: Bytes) -> None:
    if frame.chunk is None:
        out[:] = 0
        return
    if len(frame.chunk) < _CHUNK_HEADER_BYTES or struct.unpack_from("<i", frame.chunk, 4)[0] != len(out):
        raise ValueError(f"the Blosc2 chunk does not hold {len(out)} bytes")
    found = len(imagecodecs().blosc2_decode(frame.chunk, numthreads=1, out=out.data))
    if found != len(out):
        raise ValueError(f"the Blosc2 chunk holds {found} bytes, not {len(out)}")


def _place_blocks(frame: _Frame, grid: tuple[int, ...], padded: Bytes, out: Bytes, item_bytes: int) -> None:
    """Copy each block to its place, without its padding."""
    item = np.dtype(f"u{item_bytes}" if item_bytes in (1, 2, 4, 8) else (np.void, item_bytes))
    blocks = padded.view(item).reshape(-1, *frame.block)
    whole = out.view(item).reshape(frame.extents)
    for block, at in zip(blocks, itertools.product(*map(range, grid)), strict=True):
        place = tuple(slice(i * step, (i + 1) * step) for i, step in zip(at, frame.block, strict=True))
        part = whole[place]
        part[...] = block[tuple(slice(0, extent) for extent in part.shape)]
