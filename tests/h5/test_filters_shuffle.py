"""Shuffle and deflate, the pipeline of most users' files, and what lies between two filters."""

from __future__ import annotations

import subprocess
import sys
import threading
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError
from hpctrain.h5.filters import DEFLATE, SHUFFLE, Filter, FilterPipeline
from hpctrain.h5.filters.base import SCRATCH
from tests.h5.filter_files import bits, noise, one_chunk, smooth


def pipeline_of(item_bytes: int) -> FilterPipeline:
    return FilterPipeline((Filter(SHUFFLE, (item_bytes,)), Filter(DEFLATE, (4,))))


@given(length=st.integers(0, 30_000), item_bytes=st.integers(1, 300), alone=st.booleans())
@settings(max_examples=80, deadline=None)
def test_items_of_any_size_and_leftovers(length: int, item_bytes: int, alone: bool) -> None:
    """Sizes around those from which on c-blosc unshuffles, and items larger than it can."""
    raw = noise(length)
    pipeline = FilterPipeline(pipeline_of(item_bytes).filters[: 1 if alone else 2])
    out = np.empty_like(raw)
    pipeline.decode(pipeline.encode(raw), 0, out)
    assert np.array_equal(out, raw)


@pytest.mark.parametrize("item_bytes", [2, 4, 8, 16, 12, 10, 1000])
def test_large_chunks(item_bytes: int) -> None:
    values = np.resize(smooth("<u2", (50_000,)), 9 << 19).view(
        np.uint8
    )  # 9 MiB: beyond what c-blosc is given
    for raw in (values, values[: (1 << 20) + 3]) if item_bytes == 4 else (values[: (1 << 20) + 3],):
        stored = pipeline_of(item_bytes).encode(raw)
        out = np.empty_like(raw)
        pipeline_of(item_bytes).decode(stored, 0, out)
        assert np.array_equal(out, raw)


@pytest.mark.parametrize("shape", [(5000,), (70, 71)])
def test_libhdf5_shuffles_alike(shape: tuple[int, ...]) -> None:
    for dtype in ("<f4", "<f8", "S7", "V300"):
        values = noise(int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
        chunk = one_chunk(values, shuffle=True, compression="gzip")
        assert bits(chunk.decode()) == bits(chunk.values)


def test_a_deflate_stream_is_read_to_its_end_as_libhdf5_does() -> None:
    raw = smooth("u1", (1000,))
    stored = zlib.compress(raw, 4)
    pipeline = FilterPipeline((Filter(DEFLATE, (4,)),))
    out = np.empty_like(raw)
    pipeline.decode(stored + b"what follows is not looked at", 0, out)
    assert np.array_equal(out, raw)
    with pytest.raises(DataError):
        pipeline.decode(stored[:-1] + bytes([stored[-1] ^ 1]), 0, out)  # its check sum is wrong


def test_decoding_does_not_touch_the_stored_bytes() -> None:
    raw = smooth("<f4", (5000,))
    stored = bytearray(pipeline_of(4).encode(raw))
    before = bytes(stored)
    out = np.empty_like(raw)
    pipeline_of(4).decode(stored, 0, out)
    pipeline_of(4).decode(stored, 2, np.empty(len(stored), np.uint8))  # shuffle alone
    assert bytes(stored) == before


def test_memory_between_filters_is_kept_per_thread_up_to_a_bound() -> None:
    small, large = SCRATCH.bytes("test", 1000), SCRATCH.bytes("test", 17 << 20)
    assert np.shares_memory(SCRATCH.bytes("test", 900), small)
    assert not np.shares_memory(SCRATCH.bytes("test", 900), large)
    other: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: other.append(SCRATCH.bytes("test", 900)))
    thread.start()
    thread.join(timeout=30)
    assert not np.shares_memory(other[0], small)


def test_imagecodecs_is_imported_on_first_use_only() -> None:
    code = "import hpctrain.h5.filters, sys; sys.exit('imagecodecs' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
