"""Encoding and decoding of chunk bytes, filter by filter."""

from __future__ import annotations

import pickle
import struct
import threading
import zlib
from pathlib import Path

import hdf5plugin
import numcodecs.zstd
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.codecs import CODECS, pipeline_for
from hpctrain.h5.filters import (
    BLOSC,
    DEFLATE,
    LZ4,
    LZF,
    SHUFFLE,
    ZSTD,
    Filter,
    FilterPipeline,
    filter_name,
    why_not,
)
from hpctrain.h5.filters.names import who_reads

DTYPES = ("u1", "<i4", "<f2", "<f4", "<f8", ">f4", ">i8")


def sample_array(dtype: str, length: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 50, length)
    return (np.cumsum(values) % 60_000).astype(dtype)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_encoded_is_decoded(codec: str, dtype: str) -> None:
    for length in (1, 2, 7, 1000, 70_001):
        raw = sample_array(dtype, length)
        pipeline = pipeline_for(codec, raw.dtype, raw.nbytes)
        out = np.empty_like(raw)
        pipeline.decode(pipeline.encode(raw), 0, out)
        assert out.tobytes() == raw.tobytes(), length


@pytest.mark.parametrize("codec", CODECS)
@given(raw=st.binary(min_size=1, max_size=3000), itemsize=st.sampled_from([1, 2, 3, 4, 8, 12]))
@settings(max_examples=40, deadline=None)
def test_any_bytes_and_leftovers_survive(codec: str, raw: bytes, itemsize: int) -> None:
    """Lengths that are no multiple of the item size: shuffle copies the rest."""
    pipeline = pipeline_for(codec, np.dtype((np.void, itemsize)), len(raw))
    out = np.empty(len(raw), np.uint8)
    pipeline.decode(pipeline.encode(raw), 0, out)
    assert out.tobytes() == raw


@pytest.mark.parametrize("codec", [name for name in CODECS if name != "none"])
def test_incompressible_bytes_grow_and_still_decode(codec: str) -> None:
    raw = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    pipeline = pipeline_for(codec, raw.dtype, raw.nbytes)
    stored = pipeline.encode(raw)
    out = np.empty_like(raw)
    pipeline.decode(stored, 0, out)
    assert len(stored) > raw.nbytes
    assert np.array_equal(out, raw)


def test_masked_filters_are_left_out() -> None:
    """Bit i of the mask: the filter at position i was skipped for this chunk."""
    raw = sample_array("<i4", 100)
    shuffle, deflate = Filter(SHUFFLE, (4,)), Filter(DEFLATE, (4,))
    both = FilterPipeline((shuffle, deflate))
    for mask, used in enumerate([(shuffle, deflate), (deflate,), (shuffle,), ()]):
        out = np.empty_like(raw)
        both.decode(FilterPipeline(used).encode(raw), mask, out)
        assert np.array_equal(out, raw), mask


def test_filters_below_others_are_decoded_too() -> None:
    raw = sample_array("<i4", 1000)
    for first in (Filter(ZSTD, (3,)), Filter(LZ4, (0,)), pipeline_for("blosc-lz4", "<i4", 4000).filters[0]):
        pipeline = FilterPipeline((Filter(SHUFFLE, (4,)), first))
        out = np.empty_like(raw)
        pipeline.decode(pipeline.encode(raw), 0, out)
        assert np.array_equal(out, raw), first
    pipeline = FilterPipeline((Filter(SHUFFLE, (4,)), Filter(BLOSC, (2, 2, 4, 4000, 5, 0, 5))))
    pipeline.decode(pipeline.encode(raw), 0, out)
    assert np.array_equal(out, raw)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("change", ["short", "empty", "long", "other size"])
def test_bytes_that_do_not_decode_are_a_data_error(codec: str, change: str) -> None:
    if (codec, change) == ("gzip", "long"):
        return  # as libhdf5, deflate does not look at what follows its stream
    raw = sample_array("<i4", 1000)
    pipeline = pipeline_for(codec, raw.dtype, raw.nbytes)
    stored = pipeline.encode(raw)
    damaged = {"short": stored[:-5], "empty": b"", "long": stored + b"12345", "other size": stored}[change]
    out = np.empty(1001 if change == "other size" else 1000, "<i4")
    with pytest.raises(DataError, match="do not decode to"):
        pipeline.decode(damaged, 0, out)


@pytest.mark.parametrize("block", [1, 100, 4096])
def test_lz4_blocks(block: int) -> None:
    """Several blocks per chunk, a short last one, and blocks stored raw because they did not shrink."""
    compressible = np.zeros(1000, np.uint8)
    noise = np.random.default_rng(1).integers(0, 256, 1050, dtype=np.uint8)
    raw = np.concatenate([compressible, noise])
    pipeline = FilterPipeline((Filter(LZ4, (block,)),))
    stored = pipeline.encode(raw)
    assert struct.unpack_from(">QI", stored) == (2050, min(block, 2050))
    out = np.empty_like(raw)
    pipeline.decode(stored, 0, out)
    assert np.array_equal(out, raw)


def test_zstd_in_several_frames() -> None:
    raw = sample_array("<i4", 1000).view(np.uint8)
    stored = numcodecs.zstd.compress(raw[:1000], 3) + numcodecs.zstd.compress(raw[1000:], 3)
    out = np.empty_like(raw)
    FilterPipeline((Filter(ZSTD),)).decode(stored, 0, out)
    assert np.array_equal(out, raw)


@pytest.mark.parametrize("length", [999, 1001, 3999, 4001])
def test_zstd_frames_of_another_length_in_all(length: int) -> None:
    stored = numcodecs.zstd.compress(bytes(1000), 3) + numcodecs.zstd.compress(bytes(3000), 3)
    with pytest.raises(DataError, match=f"do not decode to {length} bytes"):
        FilterPipeline((Filter(ZSTD),)).decode(stored, 0, np.empty(length, np.uint8))


def zstd_zeros(num_bytes: int) -> bytes:
    """A frame that does not state its size, of run-length blocks of 128 KiB (RFC 8878, section 3.1.1)."""
    blocks = num_bytes >> 17
    header = b"\x28\xb5\x2f\xfd\x00\x58"
    return header + b"".join(
        struct.pack("<I", (block == blocks - 1) | 1 << 1 | 1 << 17 << 3)[:3] + b"\0"
        for block in range(blocks)
    )


ZSTD_CLAIM = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 44) + b"\x01\0\0"
BOMBS = {
    "deflate": (Filter(DEFLATE, (9,)), zlib.compress(bytes(64 << 20), 9)),
    "zstd, size stated": (Filter(ZSTD), numcodecs.zstd.compress(bytes(64 << 20), 3)),
    "zstd, no size stated": (Filter(ZSTD), zstd_zeros(64 << 20)),
    "zstd, size only claimed": (Filter(ZSTD), ZSTD_CLAIM),
    "zstd, size claimed by the second frame": (
        Filter(ZSTD),
        numcodecs.zstd.compress(bytes(50), 3) + ZSTD_CLAIM,
    ),
    "lz4": (Filter(LZ4), FilterPipeline((Filter(LZ4, (0,)),)).encode(bytes(64 << 20))),
    "blosc": (Filter(BLOSC), pipeline_for("blosc-lz4", "u1", 64 << 20).encode(bytes(64 << 20))),
}


@pytest.mark.parametrize("below", [(), (Filter(SHUFFLE, (4,)),)], ids=["alone", "below shuffle"])
@pytest.mark.parametrize("name", BOMBS)
def test_chunks_that_grow_beyond_their_size_are_refused_before_they_do(
    name: str, below: tuple[Filter, ...]
) -> None:
    item, stored = BOMBS[name]
    out = np.empty(100, np.uint8)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    before_kib = peak_memory_kib()
    with pytest.raises(DataError, match="do not decode to 100 bytes"):
        FilterPipeline((*below, item)).decode(stored, 0, out)
    assert peak_memory_kib() - before_kib < 16 << 10


def peak_memory_kib() -> int:
    """The most memory that this process has held."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0])


def test_a_zstd_frame_that_does_not_state_its_size() -> None:
    out = np.ones(256 << 10, np.uint8)
    FilterPipeline((Filter(ZSTD),)).decode(zstd_zeros(256 << 10), 0, out)
    assert not out.any()


@pytest.mark.parametrize("codec", ["blosc-lz4", "blosc-zstd"])
@pytest.mark.parametrize(("dtype", "sample"), [("u1", 3072), ("<f4", 4000), ("<f2", 1002)])
def test_blosc_blocks_hold_whole_samples(codec: str, dtype: str, sample: int) -> None:
    raw = np.resize(sample_array(dtype, 5000), 100 * sample // np.dtype(dtype).itemsize)
    pipeline = pipeline_for(codec, dtype, raw.nbytes, sample)
    (block,) = struct.unpack_from("<I", pipeline.encode(raw), 8)
    assert block % sample == 0
    assert block >= 64 << 10


def test_pipelines_travel_and_compare() -> None:
    pipeline = pipeline_for("blosc-zstd", "<f4", 4096, 64)
    assert pickle.loads(pickle.dumps(pipeline)) == pipeline == pipeline_for("blosc-zstd", "<f4", 4096)
    assert hash(pipeline) == hash(pipeline_for("blosc-zstd", "<f4", 4096))


def test_unknown_codecs_and_filters_are_named() -> None:
    with pytest.raises(UsageError, match="'lzma' is unknown; choose one of: none, gzip"):
        pipeline_for("lzma", "u1", 10)
    with pytest.raises(DataError, match=r"filter 32013 \(ZFP\) is not decoded here"):
        FilterPipeline((Filter(32013, (1,)),))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (307, "filter 307 (bzip2) is not decoded here; hdf5plugin reads it through libhdf5"),
        (5, "filter 5 (n-bit) is not decoded here; libhdf5 reads it itself"),
        (305, "filter 305 (LZO) is not decoded here; PyTables"),
        (32019, "filter 32019 (JPEG) is not decoded here; libhdf5 reads it with the plugin of that name"),
        (300, "filter 300 (unregistered) is not decoded here; ask whoever wrote the file"),
        (40000, "filter 40000 (private) is not decoded here; ask whoever wrote the file"),
    ],
)
def test_why_not_says_who_reads_a_filter(number: int, words: str) -> None:
    reason = why_not((Filter(SHUFFLE, (4,)), Filter(number)))
    assert reason is not None
    assert reason.startswith(words)
    assert why_not((Filter(SHUFFLE, (4,)), Filter(DEFLATE, (4,)))) is None


def test_hdf5plugin_has_what_is_said_of_it() -> None:
    for number in hdf5plugin.FILTERS.values():
        assert who_reads(number) == "hdf5plugin reads it through libhdf5"
        assert filter_name(number) != "unregistered"
    for number in (307, 32013, 32017, 32018, 32024, 32028):
        assert number in hdf5plugin.FILTERS.values()


def test_only_what_is_written_here_is_encoded() -> None:
    with pytest.raises(DataError, match=r"filter 32000 \(LZF\) is not written here"):
        FilterPipeline((Filter(LZF),)).encode(b"1234")


def test_shuffle_without_its_item_size_is_refused() -> None:
    with pytest.raises(DataError, match="shuffle filter comes without its item size"):
        FilterPipeline((Filter(SHUFFLE), Filter(DEFLATE, (4,))))


def test_threads_share_a_pipeline() -> None:
    raw = sample_array("<f4", 20_000)
    pipelines = [pipeline_for(codec, raw.dtype, raw.nbytes) for codec in CODECS]
    wrong: list[str] = []

    def work() -> None:
        for pipeline in pipelines * 5:
            out = np.empty_like(raw)
            pipeline.decode(pipeline.encode(raw), 0, out)
            if not np.array_equal(out, raw):
                wrong.append(str(pipeline))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_deflate_is_a_zlib_stream() -> None:
    raw = sample_array("u1", 500)
    assert zlib.decompress(pipeline_for("gzip", "u1", 500).encode(raw)) == raw.tobytes()
