"""Untrusted bytes: any chunk decodes to something, or is a `DataError`; nothing is written beside the target."""

from __future__ import annotations

import contextlib
from typing import Any

import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError
from hpctrain.h5.filters import FilterPipeline
from tests.h5.filter_files import one_chunk, smooth

OPTIONS: dict[str, dict[str, Any]] = {
    "shuffle, gzip, fletcher32": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "gzip": {"compression": "gzip"},
    "szip": {"compression": "szip", "compression_opts": ("nn", 8)},
    "scale-offset": {"scaleoffset": 0},
    "lzf": {"compression": "lzf"},
    "lz4": dict(hdf5plugin.LZ4(nbytes=512)),
    "zstd": dict(hdf5plugin.Zstd()),
    **{f"blosc {name}": dict(hdf5plugin.Blosc(cname=name)) for name in ("blosclz", "lz4", "zlib", "zstd")},
    **{f"blosc2 {name}": dict(hdf5plugin.Blosc2(cname=name)) for name in ("blosclz", "lz4", "zlib", "zstd")},
    **{
        f"bitshuffle {name}": dict(hdf5plugin.Bitshuffle(cname=name, nelems=64))
        for name in ("none", "lz4", "zstd")
    },
}
CHUNKS = {name: one_chunk(smooth("<i4", (23, 31)), **options) for name, options in OPTIONS.items()}
CHUNKS["decimal floats"] = one_chunk(smooth("<f4", (23, 31)), scaleoffset=2)
GUARD_BYTES = 64

flips = st.lists(
    st.tuples(st.integers(0, 99) | st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=6
)


def decode_guarded(name: str, stored: bytes) -> None:
    """Decode into the middle of an array whose ends must stay as they are."""
    chunk = CHUNKS[name]
    memory = np.full(chunk.values.nbytes + 2 * GUARD_BYTES, 0xA5, np.uint8)
    with contextlib.suppress(DataError):
        FilterPipeline(chunk.filters).decode(stored, chunk.mask, memory[GUARD_BYTES:-GUARD_BYTES])
    assert (memory[:GUARD_BYTES] == 0xA5).all()
    assert (memory[-GUARD_BYTES:] == 0xA5).all()


@pytest.mark.parametrize("name", CHUNKS)
@given(changes=flips)
@settings(max_examples=40, deadline=None)
def test_changed_bytes(name: str, changes: list[tuple[int, int]]) -> None:
    stored = bytearray(CHUNKS[name].stored)
    for position, value in changes:
        stored[position % len(stored)] = value
    decode_guarded(name, bytes(stored))


@pytest.mark.parametrize("name", CHUNKS)
@given(cut=st.integers(0, 3000), tail=st.binary(max_size=40))
@settings(max_examples=25, deadline=None)
def test_other_ends(name: str, cut: int, tail: bytes) -> None:
    decode_guarded(name, CHUNKS[name].stored[:cut] + tail)


@pytest.mark.parametrize("name", CHUNKS)
@given(stored=st.binary(max_size=200))
@settings(max_examples=25, deadline=None)
def test_any_bytes(name: str, stored: bytes) -> None:
    decode_guarded(name, stored)
