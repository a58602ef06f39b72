"""Advice is given where a limit is clear, names the rank and the mend, and is silent otherwise."""

from __future__ import annotations

import pytest

from hpctrain.data.advice import EpochReading, advise, slowest, summarize
from hpctrain.h5.times import ReadTimes


def reading(wait_s: float = 5.0, dropped: int = 0, decoded: int = 10**9, **seconds: float) -> EpochReading:
    times = ReadTimes(wait_s=wait_s, decoded_bytes=decoded, used_bytes=10**9, read_bytes=10**8, **seconds)
    return EpochReading(times, epoch_s=10.0, io_threads=3, dropped_chunks=dropped)


@pytest.mark.parametrize(
    ("readings", "words"),
    [
        ([reading(read_s=8, decode_s=1)], ("rank 0 waited", "50%", "reading", "12 MB/s", "staging.dir")),
        ([reading(decode_s=8)], ("3 threads", "decoding", "data.io_threads", "blosc-lz4")),
        ([reading(convert_s=8)], ("preprocessing",)),
        ([reading(copy_s=8)], ("gathering",)),
        ([reading(read_s=9, dropped=7)], ("7 chunks were read twice", "memory_budget_mib")),
        ([reading(decode_s=9, decoded=5 * 10**9)], ("5.0 bytes were decoded", "--chunk-samples")),
        ([reading(wait_s=0.1, read_s=1), reading(wait_s=4, decode_s=8)], ("rank 1 waited", "40%")),
    ],
)
def test_a_clear_limit(readings: list[EpochReading], words: tuple[str, ...]) -> None:
    advice = advise(readings)
    for word in words:
        assert word in advice


@pytest.mark.parametrize(
    "readings", [[reading(wait_s=0.4, read_s=9)], [reading(read_s=3, decode_s=3, convert_s=3)], [reading()]]
)
def test_silence(readings: list[EpochReading]) -> None:
    assert advise(readings) == ""


def test_the_slowest_rank_is_the_one_that_waits() -> None:
    assert slowest([reading(wait_s=1), reading(wait_s=3), reading(wait_s=2)]) == 1


def test_an_epoch_in_one_line() -> None:
    line = summarize(3, [reading(wait_s=1, read_s=2), reading(wait_s=4, read_s=1, decode_s=6)])
    assert line == (
        "epoch 3, 10 s: rank 1 waited longest for data, 4 s; all threads: read 3 s, decode 6 s, convert 0 s, copy 0 s; "
        "200 MB read, 1 bytes decoded for each used"
    )
    assert summarize(0, [EpochReading(ReadTimes(), 0.5, 1)]) == ""


def test_times_add_up_and_begin_anew() -> None:
    times = ReadTimes()
    times.add(read_bytes=3, decode_s=0.5)
    times.add(read_bytes=4)
    assert times.take() == ReadTimes(read_bytes=7, decode_s=0.5)
    assert times.take() == ReadTimes()
