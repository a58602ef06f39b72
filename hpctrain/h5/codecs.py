"""The codecs that sets are packed with: which filters a codec name stands for, with which client data.

All filters are registered ones, so that any HDF5 program with hdf5plugin reads the sets. Values of more than one byte
are shuffled, by the codec itself (Blosc) or by a filter before it: without, LZ4 stores float32 fields of 10 kept bits
at a ratio of 1.17 instead of 1.91, Zstandard at 1.85 instead of 2.54 and decodes half as fast.

`blosc-lz4-bit` shuffles bits instead of bytes, which pays where mantissas are rounded: 2.40 instead of 1.78 for those
fields, at 0.7 of the rate. With the other inner codecs it gained under 5 %, so it is not offered there.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from hpctrain.errors import UsageError
from hpctrain.h5.filters import BLOSC, DEFLATE, LZ4, SHUFFLE, ZSTD, Filter, FilterPipeline

_BYTE_SHUFFLE: Final = 1
_BIT_SHUFFLE: Final = 2
_BLOSC_ZSTD: Final = 5
# Shuffle and inner codec, by the numbers of the c-blosc 1 format.
_BLOSC: Final = {
    "blosc-lz4": (_BYTE_SHUFFLE, 1),
    "blosc-lz4-bit": (_BIT_SHUFFLE, 1),
    "blosc-lz4hc": (_BYTE_SHUFFLE, 2),
    "blosc-zstd": (_BYTE_SHUFFLE, _BLOSC_ZSTD),
    "blosc-zlib": (_BYTE_SHUFFLE, 4),
    "blosc-blosclz": (_BYTE_SHUFFLE, 0),
}

CODECS: Final = ("none", "gzip", *_BLOSC, "lz4", "zstd")
"""Codecs that `pipeline_for` knows."""

_DEFLATE_LEVEL: Final = 4
_BLOSC_LEVEL: Final = 5
_ZSTD_LEVEL: Final = 3
_LZ4_BLOCK_BYTES: Final = 1 << 30
_MAX_BLOSC_ITEM_BYTES: Final = 255

_BLOCK_BYTES: Final = 256 << 10
"""Largest Blosc block asked for: it stays in the caches of a core; four times the size gains Zstandard 3 % of ratio."""
_MIN_ZSTD_BLOCK_BYTES: Final = 128 << 10
"""Blocks of half this size take Zstandard twice as long to decode."""
# What c-blosc does with the block size asked for, where it splits blocks by byte plane (all codecs but Zstandard).
_SPLIT_MAX_ITEM_BYTES: Final = 16
_SPLIT_MIN_BLOCK_BYTES: Final = 64 << 10


def pipeline_for(codec: str, dtype: npt.DTypeLike, chunk_bytes: int, sample_bytes: int = 0) -> FilterPipeline:
    """The pipeline of a codec, for chunks of `chunk_bytes` raw bytes of `dtype`.

    With `sample_bytes`, Blosc blocks are aligned with samples (`aligned_block`). Raises `UsageError` for an unknown
    codec.
    """
    itemsize = np.dtype(dtype).itemsize
    shuffle = (Filter(SHUFFLE, (itemsize,)),) if itemsize > 1 else ()
    if codec == "none":
        return FilterPipeline()
    if codec == "gzip":
        return FilterPipeline((*shuffle, Filter(DEFLATE, (_DEFLATE_LEVEL,))))
    if codec == "lz4":
        return FilterPipeline((*shuffle, Filter(LZ4, (min(chunk_bytes, _LZ4_BLOCK_BYTES),))))
    if codec == "zstd":
        return FilterPipeline((*shuffle, Filter(ZSTD, (_ZSTD_LEVEL,))))
    if codec in _BLOSC:
        mode, number = _BLOSC[codec]
        item_bytes = itemsize if itemsize <= _MAX_BLOSC_ITEM_BYTES else 1
        cd_values = (2, 2, item_bytes, chunk_bytes, _BLOSC_LEVEL, mode, number)
        splits = number != _BLOSC_ZSTD and item_bytes <= _SPLIT_MAX_ITEM_BYTES
        block_bytes = aligned_block(sample_bytes, chunk_bytes, item_bytes, splits)
        # c-blosc multiplies the size asked for by the item size where it splits.
        return FilterPipeline(
            (Filter(BLOSC, cd_values),), block_bytes // item_bytes if splits else block_bytes
        )
    raise UsageError(f"codec {codec!r} is unknown; choose one of: {', '.join(CODECS)}")


def known_filters(codec: str, dtype: npt.DTypeLike, chunk_bytes: int) -> tuple[tuple[Filter, ...], ...]:
    """The filters a codec name may stand for in a packed set, those written today first.

    Sets packed before `lz4` and `zstd` were given the shuffle are read as well.
    """
    filters = pipeline_for(codec, dtype, chunk_bytes).filters
    if codec in ("lz4", "zstd") and len(filters) > 1:
        return filters, filters[1:]
    return (filters,)


def aligned_block(sample_bytes: int, chunk_bytes: int, item_bytes: int, splits: bool) -> int:
    """Bytes of the Blosc blocks that fit samples of `sample_bytes`; 0 leaves the choice to c-blosc.

    Large samples are divided evenly, into the largest blocks of at most 256 KiB, so that each can be decoded by itself;
    smaller ones lie in whole numbers in blocks of about 256 KiB. A chunk of one sample needs no alignment. `splits`:
    c-blosc splits the blocks by byte plane, and makes none below 64 KiB then.
    """
    if not 0 < sample_bytes < chunk_bytes or sample_bytes % item_bytes:
        return 0
    least = _SPLIT_MIN_BLOCK_BYTES if splits else _MIN_ZSTD_BLOCK_BYTES
    if sample_bytes < least:
        return sample_bytes * (_BLOCK_BYTES // sample_bytes)
    items = sample_bytes // item_bytes
    for parts in range(-(-sample_bytes // _BLOCK_BYTES), sample_bytes // least + 1):
        if items % parts == 0:
            return sample_bytes // parts
    return 0
