"""What codec names stand for, and Blosc blocks that fit the samples."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import UsageError
from hpctrain.h5 import layout
from hpctrain.h5.codecs import CODECS, aligned_block, known_filters, pipeline_for
from hpctrain.h5.filters import LZ4, SHUFFLE, ZSTD, FilterPipeline
from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.h5.packed import open_packed
from hpctrain.h5.reader import FileSource, read_sample_chunk

BLOSC_CODECS = [name for name in CODECS if name.startswith("blosc")]
KIB = 1 << 10


def block_bytes_of(frame: bytes) -> int:
    """The block size in a c-blosc frame's header."""
    return int(struct.unpack_from("<I", frame, 8)[0])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["u1", "<f2", "<f4", "<f8", ">i8"])
def test_what_is_encoded_is_decoded(codec: str, dtype: str) -> None:
    raw = (np.cumsum(np.random.default_rng(0).integers(0, 50, 5001)) % 60_000).astype(dtype)
    pipeline = pipeline_for(codec, raw.dtype, raw.nbytes)
    out = np.empty_like(raw)
    pipeline.decode(pipeline.encode(raw), 0, out)
    assert out.tobytes() == raw.tobytes()


@given(
    codec=st.sampled_from(BLOSC_CODECS),
    item_bytes=st.sampled_from([1, 2, 3, 4, 8, 12, 16, 17, 32]),
    items=st.one_of(st.integers(1, 300), st.integers(1, 100_000)),
    rows=st.integers(1, 9),
)
@settings(max_examples=150, deadline=None)
def test_blocks_divide_samples_or_hold_whole_ones(codec: str, item_bytes: int, items: int, rows: int) -> None:
    """In the frames themselves: c-blosc has rules of its own for the size asked for."""
    sample_bytes = items * item_bytes
    chunk_bytes = rows * sample_bytes
    pipeline = pipeline_for(codec, np.dtype((np.void, item_bytes)), chunk_bytes, sample_bytes)
    block = block_bytes_of(pipeline.encode(bytes(chunk_bytes)))
    if pipeline.block_bytes and block > 1:  # 1: too small for a block, stored plainly
        assert sample_bytes % block == 0 or block % sample_bytes == 0
        assert block <= 256 * KIB or block == sample_bytes


@pytest.mark.parametrize(
    ("sample_bytes", "item_bytes", "splits", "wanted"),
    [
        (4 * 128 * 128 * 4, 4, True, 256 * KIB),  # the field that the benchmarks use: one block
        (4 * 128 * 128 * 4, 4, False, 256 * KIB),
        (8 * 128 * 128 * 4, 4, True, 256 * KIB),
        (64 * KIB, 4, True, 64 * KIB),
        (64 * KIB, 4, False, 256 * KIB),  # Zstandard: four samples a block
        (224 * 224 * 3, 1, True, 224 * 224 * 3),
        (299 * 299 * 3, 1, True, 299 * 299),
        (300 * 200 * 4, 4, False, 300 * 200 * 4),
        (32 * 32 * 3, 1, True, 85 * 3072),
        (1, 1, True, 256 * KIB),
        (300_007, 1, True, 0),  # a prime: nothing divides it
    ],
)
def test_block_sizes(sample_bytes: int, item_bytes: int, splits: bool, wanted: int) -> None:
    assert aligned_block(sample_bytes, 1000 * sample_bytes, item_bytes, splits) == wanted


@pytest.mark.parametrize("codec", BLOSC_CODECS)
def test_large_samples_lie_in_blocks_of_their_own(codec: str) -> None:
    sample_bytes = 4 * 128 * 128 * 4
    pipeline = pipeline_for(codec, "<f4", 4 * sample_bytes, sample_bytes)
    raw = np.tile(np.arange(sample_bytes // 4, dtype="<f4"), 4)
    assert block_bytes_of(pipeline.encode(raw)) == sample_bytes


def test_a_chunk_of_one_sample_and_no_sample_leave_the_block_to_the_codec() -> None:
    assert aligned_block(100 * KIB, 100 * KIB, 4, True) == 0
    assert aligned_block(0, 100 * KIB, 4, True) == 0
    assert pipeline_for("blosc-lz4", "<f4", 1 << 20).block_bytes == 0


def test_values_of_several_bytes_are_shuffled() -> None:
    for codec, last in (("lz4", LZ4), ("zstd", ZSTD)):
        assert [item.id for item in pipeline_for(codec, "<f4", 100).filters] == [SHUFFLE, last]
        assert [item.id for item in pipeline_for(codec, "u1", 100).filters] == [last]


def test_known_filters() -> None:
    assert [len(filters) for filters in known_filters("zstd", "<f4", 100)] == [2, 1]
    for codec in CODECS:
        assert known_filters(codec, "u1", 100) == (pipeline_for(codec, "u1", 100).filters,)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_sets_packed_without_the_shuffle_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """Written as it was done before: the filters without the shuffle."""

    def without_shuffle(*arguments: object) -> FilterPipeline:
        filters = pipeline_for(*arguments).filters  # type: ignore[arg-type]
        return FilterPipeline(tuple(item for item in filters if item.id != SHUFFLE))

    wave = np.arange(100.0)
    monkeypatch.setattr(layout, "pipeline_for", without_shuffle)
    pack_arrays({"wave": wave}, tmp_path / "set", PackOptions(codec))
    packed = open_packed(tmp_path / "set")
    with FileSource() as source:
        assert np.array_equal(read_sample_chunk(packed, source, 0)["wave"], wave)
    assert SHUFFLE not in [item.id for item in packed.shards[0].dense["wave"].pipeline.filters]


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(UsageError, match="codec 'lzma' is unknown; choose one of: none, gzip, blosc-lz4, "):
        pipeline_for("lzma", "u1", 10)
