"""What all filters share: their numbers and names, buffers, the errors of the libraries, and the memory of threads."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpctrain.h5.scratch import Scratch

Buffer = bytes | bytearray | memoryview
Bytes = npt.NDArray[np.uint8]

DEFLATE: Final = 1
SHUFFLE: Final = 2
FLETCHER32: Final = 3
SZIP: Final = 4
NBIT: Final = 5
SCALE_OFFSET: Final = 6
LZF: Final = 32000
BLOSC: Final = 32001
LZ4: Final = 32004
BITSHUFFLE: Final = 32008
ZSTD: Final = 32015
BLOSC2: Final = 32026

_KEPT_BYTES: Final = 16 << 20

DECODE_ERRORS: Final[tuple[type[Exception], ...]] = (
    RuntimeError,
    ValueError,
    TypeError,
    OverflowError,
    struct.error,
)
"""What decoders and the libraries below them raise for bytes that they cannot decode."""

DecodeInto = Callable[[Buffer, tuple[int, ...], Bytes], int]
"""Decodes stored bytes, with the filter's client data, into the beginning of an array; returns the bytes it filled."""

Encode = Callable[[Buffer, tuple[int, ...], int], Buffer]
"""Encodes bytes, with the filter's client data and the block size to ask the library for (0: it chooses)."""


@dataclass(frozen=True)
class Filter:
    """One HDF5 filter: its registered number and its client data (`cd_values`)."""

    id: int
    cd_values: tuple[int, ...] = ()


def imagecodecs() -> Any:
    """The package, imported on first use: it takes 60 ms. Untyped: its types leave out the memoryviews it does take."""
    import imagecodecs as package

    return package


def copy_into(data: Buffer, out: Bytes) -> int:
    """Copy all of `data` into the beginning of `out`. Raises `ValueError` where it does not fit."""
    if len(data) > len(out):
        raise ValueError(f"{len(data)} bytes where {len(out)} were expected")
    out[: len(data)] = np.frombuffer(data, np.uint8)
    return len(data)


class _Scratch(Scratch):
    """`Scratch` that does not keep large buffers: a thread holds at most 3 of `_KEPT_BYTES`."""

    def bytes(self, purpose: str, num_bytes: int) -> Bytes:
        return np.empty(num_bytes, np.uint8) if num_bytes > _KEPT_BYTES else super().bytes(purpose, num_bytes)


SCRATCH: Final = _Scratch()
"""Memory of each thread for what lies between two filters."""
