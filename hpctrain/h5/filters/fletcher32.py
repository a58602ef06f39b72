"""Fletcher32 (3): four bytes after the data, a little-endian check sum over them (HDF5 file format specification).

The sums run over big-endian words of two bytes; an odd last byte is the upper half of a word. libhdf5 before 1.6.3
wrote the sum with the bytes of each half swapped; both are accepted, as libhdf5 does. What is summed is whatever the
filters before this one left: raw or compressed bytes.

imagecodecs sums without the GIL, at 2 to 3 GB/s on one core; numcodecs' holds the GIL and knows one byte order only.
"""

from __future__ import annotations

import struct
from typing import Final

from hpctrain.h5.filters.base import Buffer, Bytes, copy_into, imagecodecs

SUM_BYTES: Final = 4


def decode_into(data: Buffer, cd_values: tuple[int, ...], out: Bytes) -> int:
    """Copy all but the sum into the beginning of `out`, after checking it; returns the number of bytes."""
    return copy_into(checked(data), out)


def checked(data: Buffer) -> memoryview:
    """The data without the sum. Raises `ValueError` where the sum is another one."""
    view = memoryview(data)
    if len(view) < SUM_BYTES:
        raise ValueError(f"{len(view)} bytes are too few for a Fletcher32 sum")
    body, tail = view[:-SUM_BYTES], bytes(view[-SUM_BYTES:])
    found = struct.pack("<I", imagecodecs().h5checksum_fletcher32(body) if body else 0)
    if tail not in (found, found[1::-1] + found[:1:-1]):
        raise ValueError(f"the Fletcher32 sum is {tail.hex()} but should be {found.hex()}")
    return body


def encode(data: Buffer, cd_values: tuple[int, ...], block_bytes: int) -> bytes:
    """`data` and its sum."""
    return bytes(data) + struct.pack("<I", imagecodecs().h5checksum_fletcher32(data) if data else 0)
