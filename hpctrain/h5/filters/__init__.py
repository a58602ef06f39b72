"""Chunk filters: encode and decode HDF5 chunk bytes outside libhdf5, in threads.

One module per family, which documents its byte format and the library that does the work: all of them release the
GIL. `pipeline` puts them together.
"""

from hpctrain.h5.filters.base import (
    BITSHUFFLE,
    BLOSC,
    BLOSC2,
    DEFLATE,
    FLETCHER32,
    LZ4,
    LZF,
    NBIT,
    SCALE_OFFSET,
    SHUFFLE,
    SZIP,
    ZSTD,
    Buffer,
    Bytes,
    Filter,
)
from hpctrain.h5.filters.names import filter_name
from hpctrain.h5.filters.pipeline import FilterPipeline, why_not

__all__ = [
    "BITSHUFFLE",
    "BLOSC",
    "BLOSC2",
    "DEFLATE",
    "FLETCHER32",
    "LZ4",
    "LZF",
    "NBIT",
    "SCALE_OFFSET",
    "SHUFFLE",
    "SZIP",
    "ZSTD",
    "Buffer",
    "Bytes",
    "Filter",
    "FilterPipeline",
    "filter_name",
    "why_not",
]
