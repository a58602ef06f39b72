"""The reader alone: shuffled batches through the loader, with nothing to train.

I/O and decoding are told apart, because they are mended apart: seconds that the reading threads spend in `read` (pread
and digest), and CPU seconds of the whole process (decoding, digest, gathering), both per decoded GB.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Final

from benchmarks.harness import Values
from hpctrain.data.loader import Loader
from hpctrain.data.plan import Plan
from hpctrain.h5.chunks import Allocate, fresh
from hpctrain.h5.filters import Buffer
from hpctrain.h5.index import ChunkIndex
from hpctrain.h5.packed import PackedSet
from hpctrain.h5.reader import FileSource, Ragged

BATCH: Final = 128
WINDOW_SAMPLES: Final = 2048
"""Shuffle window; the same number of samples whatever the chunk size, so that the order is equally well mixed."""
PREFETCH_STEPS: Final = 4
_GB: Final = 1e9
_COLD_SHARE: Final = 0.9
"""A reading is cold when at least this share of the stored bytes came from the device."""


class TimedSource(FileSource):
    """A `FileSource` that adds up the seconds its callers spend in `read`, over all threads."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._adding = threading.Lock()

    def read(self, index: ChunkIndex, chunk: int, allocate: Allocate = fresh) -> Buffer:
        """As `FileSource.read`."""
        begun_s = time.perf_counter()
        stored = super().read(index, chunk, allocate)
        with self._adding:
            self.seconds += time.perf_counter() - begun_s
        return stored


def read_warm(packed: PackedSet, min_s: float) -> Values:
    """Whole shuffled epochs for at least `min_s` seconds, after one that is not counted and fills the page cache.

    Each has a loader of its own: one that goes on would keep chunks in its memory, and nothing would be read.
    """
    source = TimedSource()
    with source:
        _read_anew(packed, source, 0)
        begun_s, cpu_s, io_s = time.perf_counter(), time.process_time(), source.seconds
        epochs = num_bytes = 0
        while (elapsed_s := time.perf_counter() - begun_s) < min_s or epochs == 0:
            num_bytes += _read_anew(packed, source, epochs + 1)
            epochs += 1
        gigabytes = num_bytes / _GB
        return {
            "warm_gb_per_s": gigabytes / elapsed_s,
            "warm_samples_per_s": epochs * packed.num_samples / elapsed_s,
            "cpu_s_per_gb": (time.process_time() - cpu_s) / gigabytes,
            "io_s_per_gb": (source.seconds - io_s) / gigabytes,
        }


def read_cold(packed: PackedSet) -> Values:
    """One shuffled epoch after the kernel was asked to forget the files.

    Gives nothing where the bytes did not come from a device (a filesystem in memory, no such counter): a figure that
    is not cold must not be called so.
    """
    stored = sum(forget(shard.path) for shard in packed.shards)
    before = device_bytes()
    source = TimedSource()
    with source:
        begun_s = time.perf_counter()
        num_bytes = _read_anew(packed, source, 0)
        elapsed_s = time.perf_counter() - begun_s
    after = device_bytes()
    if before is None or after is None or after - before < _COLD_SHARE * stored:
        return {}
    return {"cold_gb_per_s": num_bytes / _GB / elapsed_s}


def forget(path: Path) -> int:
    """Drop a file from the page cache (as far as the kernel agrees); returns its size in bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)  # dirty pages are not dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def device_bytes(counters: Path = Path("/proc/self/io")) -> int | None:
    """Bytes that this process caused to be fetched from a device; None where that is not counted."""
    try:
        lines = dict(line.split(": ") for line in counters.read_text(encoding="ascii").splitlines())
        return int(lines["read_bytes"])
    except (OSError, KeyError, ValueError):
        return None


def _loader(packed: PackedSet, source: FileSource) -> Loader:
    plan = Plan(
        packed.chunk_sizes, 1, BATCH, seed=1, window_chunks=max(1, WINDOW_SAMPLES // packed.chunk_samples)
    )
    return Loader(packed, source, plan, range(1), len(os.sched_getaffinity(0)), PREFETCH_STEPS)


def _read_anew(packed: PackedSet, source: FileSource, epoch: int) -> int:
    """Take one epoch's batches of a loader that begins with nothing in memory; returns their decoded bytes."""
    num_bytes = 0
    with _loader(packed, source) as loader:
        for step in loader.steps(epoch, 0, epoch + 1):
            for lane in step.lanes:
                for values in lane.fields.values():
                    num_bytes += values.values.nbytes if isinstance(values, Ragged) else values.nbytes
    return num_bytes
