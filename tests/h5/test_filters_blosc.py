"""Blosc frames as a whole: those written here, and by the HDF5 filter."""

from __future__ import annotations

from pathlib import Path

import h5py
import hdf5plugin
import imagecodecs
import numcodecs.blosc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError
from hpctrain.h5.filters import BLOSC, Filter, FilterPipeline
from hpctrain.h5.filters.blosc import frame_block_bytes


def pipeline_of(item_bytes: int, chunk_bytes: int, block_items: int, level: int = 5) -> FilterPipeline:
    return FilterPipeline((Filter(BLOSC, (2, 2, item_bytes, chunk_bytes, level, 1, 1)),), block_items)


def smooth(num_bytes: int) -> bytes:
    values = np.cumsum(np.random.default_rng(0).normal(size=-(-num_bytes // 4)), dtype="<f4")
    return (values.view("<u4") & np.uint32(0xFFFFE000)).tobytes()[:num_bytes]


@given(
    length=st.integers(1, 40_000),
    item_bytes=st.integers(2, 16),
    block_items=st.integers(1, 9000),
    level=st.integers(1, 9),
    noise=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_unsplit_frames_are_read_by_c_blosc(
    length: int, item_bytes: int, block_items: int, level: int, noise: bool
) -> None:
    raw = np.random.default_rng(0).bytes(length) if noise else smooth(length)
    frame = pipeline_of(item_bytes, length, block_items, level).encode(raw)
    assert bytes(numcodecs.blosc.decompress(frame)) == raw
    assert len(frame) <= length + 16
    out = np.empty(length, np.uint8)
    pipeline_of(item_bytes, length, 0).decode(frame, 0, out)
    assert out.tobytes() == raw


def test_unsplit_frames_have_the_blocks_asked_for_and_are_smaller_than_raw() -> None:
    raw = smooth(1 << 20)
    frame = pipeline_of(4, len(raw), 16 << 10).encode(raw)
    assert frame_block_bytes(frame[:16]) == 64 << 10
    assert frame[2] == 0x31  # byte shuffle, not split, LZ4
    split = numcodecs.blosc.compress(raw, b"lz4", 5, 1, 16 << 10, 4)
    assert len(frame) < 1.1 * len(split)


def test_more_than_a_frame_can_hold_is_refused_before_it_is_encoded() -> None:
    raw = np.zeros((1 << 31) - 16, np.uint8)  # pages that are never touched
    with pytest.raises(DataError, match=r"2147483632 bytes are more than .* 2147483631"):
        pipeline_of(4, len(raw), 1 << 14).encode(raw)


def test_the_block_size_of_too_few_bytes_is_none() -> None:
    assert frame_block_bytes(b"") == frame_block_bytes(bytes(15)) == 0


def test_hdf5plugin_reads_what_is_written_here(tmp_path: Path) -> None:
    values = np.frombuffer(smooth(4 * 40_000), "<f4").reshape(4, 10_000)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        options = hdf5plugin.Blosc(cname="lz4", clevel=5, shuffle=1)
        dataset = file.create_dataset("x", (4, 10_000), "<f4", chunks=(2, 10_000), **options)
        for row in (0, 2):
            dataset.id.write_direct_chunk(
                (row, 0), pipeline_of(4, 80_000, 2500).encode(values[row : row + 2])
            )
    with h5py.File(tmp_path / "a.h5") as file:
        assert np.array_equal(file["x"][...], values)


def test_snappy() -> None:
    raw = smooth(100_000)
    frame = imagecodecs.blosc_encode(raw, compressor="snappy", typesize=4, blocksize=16 << 10)
    out = np.empty(len(raw), np.uint8)
    pipeline_of(4, len(raw), 0).decode(frame, 0, out)
    assert out.tobytes() == raw
