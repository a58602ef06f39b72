"""Blosc2 frames: flat ones, and arrays whose blocks are reordered and padded."""

from __future__ import annotations

import struct
from typing import Any

import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError
from hpctrain.h5.filters import BLOSC2, Filter, FilterPipeline
from tests.h5.filter_files import StoredChunk, bits, noise, one_chunk, smooth

PIPELINE = FilterPipeline((Filter(BLOSC2),))


def stored_as(values: np.ndarray, **options: Any) -> StoredChunk:
    return one_chunk(values, **hdf5plugin.Blosc2(**{"cname": "lz4", **options}))


@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=5).map(tuple),
    dtype=st.sampled_from(["u1", "<i2", "<f4", "<f8", "S5"]),
    compressible=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_arrays_of_any_shape(shape: tuple[int, ...], dtype: str, compressible: bool) -> None:
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = smooth("u1", (num_bytes,)) if compressible else noise(num_bytes)
    values = raw.view(dtype).reshape(shape)
    chunk = stored_as(values)
    assert bits(chunk.decode()) == bits(chunk.values)


@pytest.mark.parametrize("shape", [(8, 100, 130), (900, 1000), (3, 300, 5, 70), (301_003,)])
@pytest.mark.parametrize("dtype", ["<f4", "S3"])
def test_arrays_of_several_blocks(shape: tuple[int, ...], dtype: str) -> None:
    values = smooth("<i4", shape).astype(dtype)
    chunk = stored_as(values)
    assert chunk.mask == 0
    assert bits(chunk.decode()) == bits(values)


def test_items_larger_than_blosc_knows() -> None:
    """More than 255 bytes: single bytes to the codec. (Of two dimensions, hdf5plugin does not read what it writes.)"""
    chunk = stored_as(np.full(400, b"ab" * 150, "S300"))
    assert bits(chunk.decode()) == bits(chunk.values)


def test_zeros_are_not_stored() -> None:
    for shape in ((100,), (1000, 1000)):
        chunk = stored_as(np.zeros(shape, "<f4"))
        assert len(chunk.stored) < 300
        assert not chunk.decode().any()


def changed(stored: bytes, position: int, layout: str, value: int) -> bytes:
    return stored[:position] + struct.pack(layout, value) + stored[position + struct.calcsize(layout) :]


@pytest.mark.parametrize(
    ("position", "layout", "value", "message"),
    [
        (0, ">B", 0, "not a Blosc2 frame"),
        (11, ">I", 1 << 31, "with an index at"),
        (11, ">I", 0, "with an index at"),
        (16, ">Q", 1 << 40, "Blosc2 frame of"),
        (30, ">q", 1 << 40, "has chunks of"),
        (39, ">q", -1, "with an index at"),
        (58, ">i", 100, "not one"),
        (92, ">H", 7, "other metalayers"),
        (114, ">B", 9, "9 dimensions"),
        (117, ">q", 1 << 60, "is an array"),
        (135, ">i", 0, "is an array"),
    ],
)
def test_frames_that_contradict_themselves(position: int, layout: str, value: int, message: str) -> None:
    chunk = stored_as(smooth("<f4", (500, 600)))
    with pytest.raises(DataError, match=message):
        PIPELINE.decode(changed(chunk.stored, position, layout, value), 0, np.empty((500, 600), "<f4"))


def test_a_negative_size() -> None:
    chunk = stored_as(smooth("<f4", (5000,)))
    negative = changed(changed(chunk.stored, 30, ">q", -5), 58, ">i", -5)
    with pytest.raises(DataError, match="frame of -5 raw bytes"):
        PIPELINE.decode(negative, 0, np.empty(5000, "<f4"))


def test_frames_of_another_size() -> None:
    for shape in ((5000,), (50, 100)):
        chunk = stored_as(smooth("<f4", shape))
        for length in (4999, 5001):
            with pytest.raises(DataError):
                PIPELINE.decode(chunk.stored, 0, np.empty(length, "<f4"))
