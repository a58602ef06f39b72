"""Szip (4): u32 raw bytes, little-endian, and a stream of adaptive entropy coding (CCSDS 121.0-B).

Client data: option mask, pixels per block, bits per pixel, pixels per scan line. libaec (by imagecodecs), the library
that libhdf5 is built with too, decodes without the GIL. It does not tell a stream that ends early from a short one:
the number of bytes does.
"""

from __future__ import annotations

import struct
from typing import Final

from hpctrain.h5.filters.base import Buffer, Bytes, imagecodecs

_HEADER_BYTES: Final = 4


def decode_into(data: Buffer, cd_values: tuple[int, ...], out: Bytes) -> int:
    """Decode into the beginning of `out`; returns the number of bytes."""
    raw_bytes: int = struct.unpack_from("<I", data)[0]
    if raw_bytes > len(out):
        raise ValueError(f"the szip header says {raw_bytes} raw bytes, more than {len(out)}")
    stream, target = memoryview(data)[_HEADER_BYTES:], out[:raw_bytes].data
    found = len(imagecodecs().szip_decode(stream, *cd_values[:4], out=target)) if raw_bytes else 0
    if found != raw_bytes:
        raise ValueError(f"the szip stream ends after {found} of {raw_bytes} bytes")
    return raw_bytes


def why_not(cd_values: tuple[int, ...]) -> str | None:
    """Client data that cannot be decoded with, in words."""
    return None if len(cd_values) >= 4 else f"the szip filter comes with {len(cd_values)} of its 4 numbers"
