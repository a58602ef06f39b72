"""Bitshuffle (32008): all first bits of the items of a block, then all second bits, and so on; then LZ4 or Zstandard.

Client data: two version numbers, item size, items of a block (0: as many as 8 KiB hold), compression (0: none, 2: LZ4,
3: Zstandard), level. Later ones may be missing.

Not compressed, there is no header: whole blocks, a last one of the largest multiple of eight items left, and the items
left over as they are. Compressed, there is LZ4's header (see `lz4`; its block size is in bytes) and per block u32
stored bytes and the compressed block; a block is never stored as it is, and the left over bytes follow the last.

imagecodecs has bitshuffle's own routine, without the GIL, and nothing else here has one. All blocks of a chunk are
decompressed by one call, as the LZ4 filter's format or as Zstandard frames in a row. A call for each block of 8 KiB
took 1.7 times as long with LZ4 and 3.6 times with Zstandard, and takes the GIL 256 times for 2 MiB.
"""

from __future__ import annotations

import struct
from typing import Final

from hpctrain.h5.filters.base import SCRATCH, Buffer, Bytes, copy_into, imagecodecs
from hpctrain.h5.filters.lz4 import HEADER_BYTES, block_parts, header_of

_NONE: Final = 0
_LZ4: Final = 2
_ZSTD: Final = 3
_ITEMS_MULTIPLE: Final = 8


def decode_into(data: Buffer, cd_values: tuple[int, ...], out: Bytes) -> int:
    """Decode into the beginning of `out`; returns the number of bytes."""
    item_bytes, block_items, compression = (*cd_values[2:], 0, 0)[:3]
    if compression == _NONE:
        return _unshuffle(memoryview(data), item_bytes, block_items, out)
    raw_bytes, block_bytes = header_of(data, len(out))
    if raw_bytes == 0:
        return 0
    if raw_bytes % item_bytes or block_bytes % (item_bytes * _ITEMS_MULTIPLE):
        raise ValueError(f"bitshuffle blocks of {block_bytes} bytes do not hold items of {item_bytes}")
    shuffled = SCRATCH.bytes("bitshuffle", raw_bytes)
    _decompress(memoryview(data), compression, item_bytes, block_bytes, shuffled)
    return _unshuffle(shuffled.data, item_bytes, block_bytes // item_bytes, out)


def why_not(cd_values: tuple[int, ...]) -> str | None:
    """Client data that cannot be decoded with, in words."""
    item_bytes, block_items, compression = (*cd_values[2:], 0, 0, 0)[:3]
    if item_bytes == 0:
        return "the bitshuffle filter comes without its item size"
    if compression not in (_NONE, _LZ4, _ZSTD) or block_items % _ITEMS_MULTIPLE:
        return (
            f"bitshuffle with compression {compression} in blocks of {block_items} items is not decoded here"
        )
    return None


def _unshuffle(data: memoryview, item_bytes: int, block_items: int, out: Bytes) -> int:
    if len(data) > len(out):
        raise ValueError(f"{len(data)} bytes where {len(out)} were expected")
    if not len(data):
        return 0
    target = out[: len(data)].data
    return len(imagecodecs().bitshuffle_decode(data, itemsize=item_bytes, blocksize=block_items, out=target))


def _decompress(data: memoryview, compression: int, item_bytes: int, block_bytes: int, out: Bytes) -> None:
    """Decompress all blocks into `out`, and copy the bytes left over."""
    left_bytes = len(out) % (item_bytes * _ITEMS_MULTIPLE)
    blocks = out[: len(out) - left_bytes]
    parts = block_parts(data, -(-len(blocks) // block_bytes))
    end = parts[-1].stop if parts else HEADER_BYTES
    if len(data) - end != left_bytes:
        raise ValueError(f"{len(data) - end} bytes follow the last bitshuffle block, not {left_bytes}")
    if parts:
        if compression == _LZ4:
            _decompress_lz4(data, parts, block_bytes, blocks)
        else:
            _decompress_zstd(data, parts, blocks)
    copy_into(data[end:], out[len(blocks) :])


def _decompress_lz4(data: memoryview, parts: list[slice], block_bytes: int, out: Bytes) -> None:
    last_bytes = len(out) - (len(parts) - 1) * block_bytes
    if all(part.stop - part.start != block_bytes for part in parts) and (
        parts[-1].stop - parts[-1].start != last_bytes
    ):
        head = struct.pack(">QI", len(out), block_bytes)
        stored = data[: parts[-1].stop]
        if stored[:HEADER_BYTES].tobytes() != head:
            stored = memoryview(head + stored[HEADER_BYTES:])
        imagecodecs().lz4h5_decode(stored, out=out.data)
        return
    # The LZ4 filter would take a block of this stored size for one that was not compressed.
    for number, part in enumerate(parts):
        block = out[number * block_bytes : (number + 1) * block_bytes]
        found = len(imagecodecs().lz4_decode(data[part], out=block.data))
        if found != len(block):
            raise ValueError(f"a bitshuffle block holds {found} bytes, not {len(block)}")


def _decompress_zstd(data: memoryview, parts: list[slice], out: Bytes) -> None:
    found = len(imagecodecs().zstd_decode(b"".join(data[part] for part in parts), out=out.data))
    if found != len(out):
        raise ValueError(f"the bitshuffle blocks hold {found} bytes, not {len(out)}")
