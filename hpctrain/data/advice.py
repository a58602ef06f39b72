"""What the times of an epoch say: one sentence where a limit is clear, nothing where it is not."""

from __future__ import annotations

import dataclasses
from typing import Final

from hpctrain.h5.times import ReadTimes

_WAITING: Final = 0.05
"""Waiting for data is worth a word from this share of the epoch on."""
_CLEAR: Final = 0.5
"""A part is the limit when it takes at least this share of the threads' time."""
_AMPLIFIED: Final = 2.0
_SHORTEST_EPOCH_S: Final = 5.0
"""Of a shorter epoch, start-up is a part that will not come again."""
_MB: Final = 1e6


@dataclasses.dataclass(frozen=True)
class EpochReading:
    """How one rank read one epoch: seconds summed over `io_threads`, of an epoch that took `epoch_s`."""

    times: ReadTimes
    epoch_s: float
    io_threads: int
    dropped_chunks: int = 0

    @property
    def waiting(self) -> float:
        """Share of the epoch in which the rank waited for data."""
        return self.times.wait_s / self.epoch_s if self.epoch_s > 0 else 0.0

    @property
    def amplification(self) -> float:
        """Bytes decoded per byte used."""
        return self.times.decoded_bytes / self.times.used_bytes if self.times.used_bytes else 0.0


def slowest(readings: list[EpochReading]) -> int:
    """The rank that waited longest for its data."""
    return max(range(len(readings)), key=lambda rank: readings[rank].times.wait_s)


def summarize(epoch: int, readings: list[EpochReading]) -> str:
    """The epoch in one line, over all ranks; empty for a short one, of which start-up is the greater part."""
    longest = readings[slowest(readings)]
    if longest.epoch_s < _SHORTEST_EPOCH_S:
        return ""
    total = {
        field.name: sum(getattr(reading.times, field.name) for reading in readings)
        for field in dataclasses.fields(ReadTimes)
    }
    parts = ", ".join(f"{part} {total[part + '_s']:.3g} s" for part in ("read", "decode", "convert", "copy"))
    amplified = total["decoded_bytes"] / total["used_bytes"] if total["used_bytes"] else 0.0
    return (
        f"epoch {epoch}, {longest.epoch_s:.3g} s: rank {slowest(readings)} waited longest for data, "
        f"{longest.times.wait_s:.3g} s; all threads: {parts}; {total['read_bytes'] / _MB:.4g} MB read, "
        f"{amplified:.3g} bytes decoded for each used"
    )


def advise(readings: list[EpochReading]) -> str:
    """What would help the rank that waits longest; empty where nobody waits, or no limit is clear."""
    rank = slowest(readings)
    reading = readings[rank]
    if reading.waiting < _WAITING or reading.epoch_s < _SHORTEST_EPOCH_S:
        return ""
    found = f"rank {rank} waited for data in {reading.waiting:.0%} of the epoch: "
    if reading.dropped_chunks:
        return (
            f"{found}{reading.dropped_chunks} chunks were read twice because data.memory_budget_mib does not hold "
            "the shuffle window; raise it, or lower data.window_chunks"
        )
    if reading.amplification >= _AMPLIFIED:
        return (
            f"{found}{reading.amplification:.1f} bytes were decoded for each that was used; pack with a smaller "
            "--chunk-samples, or raise data.window_chunks"
        )
    times = reading.times
    parts = {"read": times.read_s, "decode": times.decode_s, "convert": times.convert_s, "copy": times.copy_s}
    largest = max(parts, key=lambda name: parts[name])
    busy_s = sum(parts.values())
    if busy_s == 0 or parts[largest] < _CLEAR * busy_s:
        return ""
    return f"{found}{_MENDS[largest]}".format(
        share=parts[largest] / busy_s,
        rate=times.read_bytes / _MB / max(times.read_s, 1e-9),
        threads=reading.io_threads,
    )


_MENDS: Final = {
    "read": "{share:.0%} of the threads' time is reading, at {rate:.0f} MB/s a thread; pack the data and set "
    "staging.dir to the node's SSD, raise data.io_threads, or pack with a codec that compresses more",
    "decode": "{share:.0%} of the time of its {threads} threads is decoding; give it more cores (data.io_threads), or "
    "pack with --codec blosc-lz4",
    "convert": "{share:.0%} of the time of its {threads} threads is preprocessing; do part of it when packing, or give "
    "it more cores (data.io_threads)",
    "copy": "{share:.0%} of the time of its {threads} threads is gathering rows; give it more cores (data.io_threads)",
}
