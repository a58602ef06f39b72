"""Bitshuffle: all item sizes, blocks and leftovers."""

from __future__ import annotations

import io
import struct

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError
from hpctrain.h5.filters import BITSHUFFLE, Filter, FilterPipeline, why_not
from tests.h5.filter_files import bits, noise, one_chunk, smooth, stored_chunks

CODECS = ("none", "lz4", "zstd")


@pytest.mark.parametrize("codec", CODECS)
@given(
    items=st.integers(1, 3000),
    item_bytes=st.sampled_from([1, 2, 3, 4, 7, 8, 10, 16, 33]),
    block_items=st.sampled_from([0, 8, 64, 1024]),
    compressible=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_items_blocks_and_leftovers(
    codec: str, items: int, item_bytes: int, block_items: int, compressible: bool
) -> None:
    raw = smooth("u1", (items * item_bytes,)) if compressible else noise(items * item_bytes)
    values = raw.view(f"V{item_bytes}")
    chunk = one_chunk(values, **hdf5plugin.Bitshuffle(nelems=block_items, cname=codec))
    assert bits(chunk.decode()) == bits(chunk.values) == bits(values)


def test_a_block_may_be_stored_in_as_many_bytes_as_it_has() -> None:
    """The LZ4 filter would take it for a block that was not compressed."""
    literals = noise(123).tobytes()
    # LZ4: a token, 115 literals, a match of 5 bytes 5 bytes back; a token, 8 literals.
    block = bytes([0xF1, 100]) + literals[:115] + bytes([5, 0, 8 << 4]) + literals[115:]
    assert len(block) == 128
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        options = hdf5plugin.Bitshuffle(nelems=128, cname="lz4")
        dataset = file.create_dataset("x", (256,), "u1", chunks=(256,), **options)
        stored = struct.pack(">QI", 256, 128) + (struct.pack(">I", 128) + block) * 2
        dataset.id.write_direct_chunk((0,), stored)
    with h5py.File(buffer, "r") as file:
        (chunk,) = stored_chunks(file["x"])
    assert bits(chunk.decode()) == bits(chunk.values)
    assert len(np.unique(chunk.values)) > 60


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("damage", ["short", "long", "raw bytes", "block bytes", "block length"])
def test_damaged_chunks(codec: str, damage: str) -> None:
    chunk = one_chunk(smooth("<i4", (1003,)), **hdf5plugin.Bitshuffle(nelems=64, cname=codec))
    head = {
        "raw bytes": struct.pack(">QI", 1 << 50, 256),
        "block bytes": struct.pack(">QI", 4012, 0),
        "block length": struct.pack(">QII", 4012, 256, 1 << 31),
    }.get(damage, b"")
    stored = head + chunk.stored[len(head) :]
    stored = {"short": stored[:-1], "long": stored + b"1"}.get(damage, stored)
    if codec == "none" and damage not in ("short", "long"):
        return  # there is no header
    with pytest.raises(DataError):
        FilterPipeline(chunk.filters).decode(stored, chunk.mask, np.empty(1003, "<i4"))


def test_client_data_may_end_early() -> None:
    values = smooth("<i4", (1000,))
    chunk = one_chunk(values, **hdf5plugin.Bitshuffle(cname="lz4"))
    (item,) = chunk.filters
    for numbers in (item.cd_values[:5], (0, 2, 4, 0, 2)):
        out = np.empty_like(values)
        FilterPipeline((Filter(BITSHUFFLE, numbers),)).decode(chunk.stored, 0, out)
        assert bits(out) == bits(values)
    plain = one_chunk(values, **hdf5plugin.Bitshuffle(cname="none"))
    FilterPipeline((Filter(BITSHUFFLE, (0, 2, 4)),)).decode(plain.stored, 0, out)
    assert bits(out) == bits(values)


def test_client_data_that_make_no_sense() -> None:
    assert "without its item size" in (why_not((Filter(BITSHUFFLE, (0, 4)),)) or "")
    assert "compression 9" in (why_not((Filter(BITSHUFFLE, (0, 4, 4, 0, 9)),)) or "")
    assert "blocks of 12 items" in (why_not((Filter(BITSHUFFLE, (0, 4, 4, 12, 2)),)) or "")
