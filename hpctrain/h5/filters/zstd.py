"""Zstandard (32015): one or several plain frames (RFC 8878). Client data: the level.

imagecodecs decodes at the rate of numcodecs (both are the Zstandard library, without the GIL), and tells how many
bytes it was, also for several frames and for those that do not state their size.
"""

from __future__ import annotations

from typing import cast

import numcodecs.zstd

from hpctrain.h5.filters.base import Buffer, Bytes, imagecodecs


def decode_into(data: Buffer, cd_values: tuple[int, ...], out: Bytes) -> int:
    """Decode all frames into the beginning of `out`; returns the number of bytes."""
    return len(imagecodecs().zstd_decode(data, out=out.data))


def encode(data: Buffer, cd_values: tuple[int, ...], block_bytes: int) -> bytes:
    """Encode as one frame that states its size, at the level of the client data."""
    return cast(bytes, numcodecs.zstd.compress(data, cd_values[0]))
