"""Single samples out of Blosc frames: `BlockReader`."""

from __future__ import annotations

import struct
import threading

import imagecodecs
import numcodecs.blosc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError
from hpctrain.h5.filters.blosc import BlockReader, room_bytes

SAMPLE_BYTES = 128 << 10


def smooth(num_bytes: int, seed: int = 0) -> bytes:
    """Float32 values with ten kept bits, which compress."""
    steps = np.random.default_rng(seed).normal(size=num_bytes // 4).astype("<f4")
    values = np.cumsum(steps, dtype="<f4")
    return (values.view("<u4") & np.uint32(0xFFFFE000)).tobytes()


def frame_of(
    raw: bytes, codec: str = "lz4", block_bytes: int = 16 << 10, shuffle: int = 1, typesize: int = 4
) -> bytes:
    return bytes(numcodecs.blosc.compress(raw, codec.encode(), 5, shuffle, block_bytes, typesize))


def starts_of(frame: bytes) -> list[int]:
    raw_bytes, block_bytes = struct.unpack_from("<II", frame, 4)
    return list(struct.unpack_from(f"<{raw_bytes // block_bytes}I", frame, 16))


def sample_of(reader: BlockReader, number: int) -> bytes:
    out = np.full(reader.sample_bytes, 7, np.uint8)
    reader.decode_sample(number, out)
    return out.tobytes()


@pytest.mark.parametrize("codec", ["blosclz", "lz4", "lz4hc", "zlib", "zstd"])
@pytest.mark.parametrize("shuffle", [0, 1, 2])
@pytest.mark.parametrize(
    ("typesize", "block_bytes"), [(4, 16 << 10), (1, 64 << 10), (8, 16 << 10), (255, 8 << 10)]
)
def test_each_sample_is_decoded_by_itself(codec: str, shuffle: int, typesize: int, block_bytes: int) -> None:
    raw = smooth(4 * SAMPLE_BYTES)
    if typesize == 255:  # c-blosc makes blocks of whole items
        raw = raw[: 4 * 255 * 512]
    frame = frame_of(raw, codec, block_bytes, shuffle, typesize)
    (block,) = struct.unpack_from("<I", frame, 8)
    sample_bytes = len(raw) // 4
    reader = BlockReader.of(frame, sample_bytes, len(raw))
    if sample_bytes % block:
        assert reader is None
        return
    assert reader is not None
    assert reader.num_samples == 4
    for number in (2, 0, 3, 1):
        assert sample_of(reader, number) == raw[number * sample_bytes : (number + 1) * sample_bytes]


@given(
    blocks=st.integers(1, 3),
    samples=st.integers(1, 5),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 9),
)
@settings(max_examples=30, deadline=None)
def test_blocks_may_lie_in_any_order(blocks: int, samples: int, order: object, seed: int) -> None:
    """A writer with several threads leaves them as they became ready."""
    block_bytes = 4 << 10
    raw = smooth(blocks * samples * block_bytes, seed)
    frame = frame_of(raw, "zstd", block_bytes)
    starts = starts_of(frame)
    if len(starts) != blocks * samples:
        return  # kept raw: too small to gain
    ends = [*starts[1:], len(frame)]
    places = list(range(len(starts)))
    order.shuffle(places)  # type: ignore[attr-defined]
    moved, payload = [0] * len(starts), b""
    for place in places:
        moved[place] = starts[0] + len(payload)
        payload += frame[starts[place] : ends[place]]
    frame = frame[:16] + struct.pack(f"<{len(moved)}I", *moved) + payload
    reader = BlockReader.of(frame, blocks * block_bytes, len(raw))
    assert reader is not None
    assert b"".join(sample_of(reader, i) for i in range(samples)) == raw


def test_incompressible_chunks_are_copied() -> None:
    raw = np.random.default_rng(0).integers(0, 256, 4 * 5000, dtype=np.uint8).tobytes()
    frame = frame_of(raw)
    assert frame[2] & 2
    reader = BlockReader.of(frame, 5000, len(raw))
    assert reader is not None
    assert [sample_of(reader, i) for i in range(4)] == [raw[i * 5000 : (i + 1) * 5000] for i in range(4)]


def test_chunks_whose_blocks_are_no_parts_of_samples_have_no_reader() -> None:
    raw = smooth(4 * SAMPLE_BYTES)
    frame = frame_of(raw, "zstd", 64 << 10)
    assert BlockReader.of(frame, 32 << 10, len(raw)) is None  # several samples a block
    assert BlockReader.of(frame, 96 << 10, len(raw)) is None  # no whole number of samples
    assert BlockReader.of(frame, 0, len(raw)) is None
    snappy = imagecodecs.blosc_encode(raw, compressor="snappy", typesize=4, blocksize=64 << 10)
    assert BlockReader.of(snappy, SAMPLE_BYTES, len(raw)) is None  # numcodecs cannot decode it
    odd = frame_of(raw[: 3 * SAMPLE_BYTES], "zstd", 80 << 10)
    assert BlockReader.of(odd, SAMPLE_BYTES, 3 * SAMPLE_BYTES) is None


def test_nothing_is_copied_where_the_chunk_lies_behind_its_room() -> None:
    raw = smooth(4 * SAMPLE_BYTES)
    frame = frame_of(raw)
    room = room_bytes(SAMPLE_BYTES, len(raw))
    memory = np.zeros(room + len(frame) + 100, np.uint8)
    stored = memory[room : room + len(frame)]
    stored[:] = np.frombuffer(frame, np.uint8)
    reader = BlockReader.of(stored.data, SAMPLE_BYTES, len(raw), memory)
    assert reader is not None
    assert np.shares_memory(np.frombuffer(reader._frames, np.uint8), memory)
    assert [sample_of(reader, i) for i in range(4)] == [
        raw[i * SAMPLE_BYTES : (i + 1) * SAMPLE_BYTES] for i in range(4)
    ]
    assert not memory[-100:].any()
    copied = BlockReader.of(frame, SAMPLE_BYTES, len(raw), memory[: room + len(frame)])
    assert copied is not None
    assert sample_of(copied, 3) == raw[3 * SAMPLE_BYTES :]
    with pytest.raises(DataError, match="bytes of memory are too few"):
        BlockReader.of(frame, SAMPLE_BYTES, len(raw), memory[:1000])


def test_the_stored_chunk_stays_as_it_is_without_memory() -> None:
    raw = smooth(4 * SAMPLE_BYTES)
    stored = bytearray(frame_of(raw))
    before = bytes(stored)
    reader = BlockReader.of(stored, SAMPLE_BYTES, len(raw))
    assert bytes(stored) == before
    stored[:] = bytes(len(stored))  # it may be used for something else now
    assert reader is not None
    assert sample_of(reader, 1) == raw[SAMPLE_BYTES : 2 * SAMPLE_BYTES]


def test_samples_that_are_not_there_are_refused() -> None:
    reader = BlockReader.of(frame_of(smooth(4 * SAMPLE_BYTES)), SAMPLE_BYTES, 4 * SAMPLE_BYTES)
    assert reader is not None
    for number, length in (
        (4, SAMPLE_BYTES),
        (-1, SAMPLE_BYTES),
        (0, SAMPLE_BYTES - 1),
        (0, SAMPLE_BYTES + 1),
    ):
        with pytest.raises(DataError, match=f"sample {number} of {length} bytes was asked for"):
            reader.decode_sample(number, np.empty(length, np.uint8))
    with pytest.raises(DataError, match="the chunk holds 0"):
        BlockReader.nothing().decode_sample(0, np.empty(0, np.uint8))


def with_u32(frame: bytes, position: int, value: int) -> bytes:
    return frame[:position] + struct.pack("<I", value) + frame[position + 4 :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: b"", "too few for a Blosc frame"),
        (lambda f: f[:15], "too few for a Blosc frame"),
        (lambda f: f[:-1], "the Blosc header says"),
        (lambda f: f + b"1", "the Blosc header says"),
        (lambda f: with_u32(f, 4, 1 << 17), "says 131072 raw bytes"),
        (lambda f: with_u32(f, 8, 0), "says blocks of 0 bytes"),
        (lambda f: with_u32(f, 8, 1 << 31), "says blocks of 2147483648 bytes"),
        (lambda f: with_u32(f, 8, 1), "too few for a table of 524288 Blosc blocks"),
        (lambda f: with_u32(f, 16, 0), "a Blosc block begins outside"),
        (lambda f: with_u32(f, 20, 40), "a Blosc block begins outside"),
        (lambda f: with_u32(f, 24, len(f)), "a Blosc block begins outside"),
        (lambda f: with_u32(f, 28, 1 << 31), "a Blosc block begins outside"),
        (lambda f: f[:2] + bytes([f[2] | 2]) + f[3:], "stored as"),
        (lambda f: f[:3] + b"\0" + f[4:], "items of 0"),
    ],
)
def test_frames_that_contradict_themselves_are_a_data_error(damage: object, message: str) -> None:
    frame = damage(frame_of(smooth(4 * SAMPLE_BYTES)))  # type: ignore[operator]
    with pytest.raises(DataError, match=message):
        BlockReader.of(frame, SAMPLE_BYTES, 4 * SAMPLE_BYTES)


@given(data=st.data(), codec=st.sampled_from(["blosclz", "lz4", "zlib", "zstd"]))
@settings(max_examples=80, deadline=None)
def test_damaged_chunks_decode_to_something_or_are_a_data_error(data: st.DataObject, codec: str) -> None:
    raw = smooth(4 * 16384)
    frame = bytearray(frame_of(raw, codec, 4096, typesize=1))
    for _ in range(data.draw(st.integers(1, 8))):
        position = data.draw(st.integers(0, 200) | st.integers(0, len(frame) - 1))
        frame[position % len(frame)] ^= data.draw(st.integers(1, 255))
    out = np.empty(16384, np.uint8)
    try:
        reader = BlockReader.of(frame, 16384, len(raw))
        for number in range(4 if reader else 0):
            reader.decode_sample(number, out)
    except DataError:
        pass


def test_threads_share_a_reader() -> None:
    raw = smooth(8 * SAMPLE_BYTES)
    reader = BlockReader.of(frame_of(raw), SAMPLE_BYTES, len(raw))
    assert reader is not None
    right: list[int] = []

    def work(first: int) -> None:
        for number in range(first, first + 40):
            wanted = raw[number % 8 * SAMPLE_BYTES : (number % 8 + 1) * SAMPLE_BYTES]
            right.append(sample_of(reader, number % 8) == wanted)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(right) == 160
    assert all(right)
