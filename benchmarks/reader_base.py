"""What every side of a comparison is: something that reads a `DataSet`, and the clock that it is measured with."""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.harness import Values
from benchmarks.reader_data import DataSet

GB: Final = 1e9
_FIRST_BATCHES: Final = 4

Batches = Generator[tuple[Any, Any], None, None]
"""(ids, values) of shapes (B,) and (B, ...): NumPy arrays, or torch tensors where a side makes them."""


class Side(ABC):
    """Something that reads a `DataSet`.

    Attributes:
        bounded: whether it can read a part of an epoch.
        samples: of an epoch, that it reads.
        epoch_s: about how long that takes.
    """

    bounded = False

    def __init__(self, data: DataSet) -> None:
        self.data = data
        self.samples = data.num_samples
        self.epoch_s = 0.0

    def options(self) -> list[str]:
        """The settings among which the fastest is taken."""
        return [""]

    def use(self, option: str, samples: int) -> None:
        """Take one of `options`, and read `samples` of an epoch."""
        self.samples = samples

    @abstractmethod
    def files(self) -> list[Path]:
        """The files that an epoch reads; none where it reads memory."""

    @abstractmethod
    def batches(self, epoch: int, epochs: int) -> Batches:
        """The batches of some epochs, from `epoch` on."""

    def trial(self, option: str, seconds: float) -> float:
        """GB/s with an option, of as much of an epoch as comes in some seconds after the first batches.

        Those wait for the workers to begin; where there are hardly more, they count all the same.
        """
        self.use(option, self.data.num_samples)
        arrivals, num_bytes, batches = [(time.perf_counter(), 0)], 0, self.batches(0, 1)
        for _, values in batches:
            num_bytes += values.nbytes
            arrivals.append((time.perf_counter(), num_bytes))
            if len(arrivals) > 2 * _FIRST_BATCHES and arrivals[-1][0] - arrivals[_FIRST_BATCHES][0] > seconds:
                break
        batches.close()
        first = _FIRST_BATCHES if len(arrivals) > 2 * _FIRST_BATCHES else 0
        (begun_s, before), (ended_s, after) = arrivals[first], arrivals[-1]
        return (after - before) / GB / (ended_s - begun_s)

    def read(self, epoch: int, epochs: int) -> Values:
        """Read epochs, and say how fast."""
        watch = Stopwatch()
        return watch.values(sum(values.nbytes for _, values in self.batches(epoch, epochs)))

    @abstractmethod
    def close(self) -> None:
        """End what it started."""


class Stopwatch:
    """Wall time, and CPU time of this process and its children, since it was made."""

    def __init__(self) -> None:
        self._cpu_s = cpu_seconds()
        self._begun_s = time.perf_counter()

    def values(self, num_bytes: int) -> Values:
        """The rates at which that many raw bytes came."""
        elapsed_s = time.perf_counter() - self._begun_s
        cpu_s = max(cpu_seconds() - self._cpu_s, 1e-3)
        gigabytes = num_bytes / GB
        return {"gb_per_s": gigabytes / elapsed_s, "gb_per_core_s": gigabytes / cpu_s, "seconds": elapsed_s}


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children, those that were waited for included."""
    seconds = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            seconds += sum(child.cpu_times()[:2])
    return seconds


def device_bytes() -> int | None:
    """Bytes that this process and its children fetched from a device; None where that is not counted."""
    try:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        return sum(int(process.io_counters().read_bytes) for process in processes)
    except (AttributeError, psutil.Error, OSError):
        return None
