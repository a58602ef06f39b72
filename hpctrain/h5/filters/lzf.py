"""LZF (32000): a bare LibLZF stream, without a header (h5py's lzf filter).

Client data: filter version, library version, raw bytes. Incompressible chunks are stored unfiltered. imagecodecs
decodes without the GIL, and refuses streams that run past the target; no other library here knows the format.
"""

from __future__ import annotations

from hpctrain.h5.filters.base import Buffer, Bytes, imagecodecs


def decode_into(data: Buffer, cd_values: tuple[int, ...], out: Bytes) -> int:
    """Decode into the beginning of `out`; returns the number of bytes."""
    return len(imagecodecs().lzf_decode(data, out=out.data))
