"""The codec itself: a bare loop over whole chunks on all cores, which no reader that decodes them can beat.

The chunks are encoded anew, with the codec's own block sizes, of which the fastest is taken. Every thread decodes into
one buffer that it uses again and again: nothing is shuffled, gathered or kept.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import h5py
import hdf5plugin  # noqa: F401 - importing it is what makes h5py read Blosc
import numpy as np
from numcodecs import blosc

from benchmarks.harness import Values
from benchmarks.reader_base import Batches, Side, Stopwatch
from benchmarks.reader_data import CODECS, Array, DataSet

LEVEL: Final = 5
BLOCK_BYTES: Final = (0, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20)
"""Asked for; 0 leaves it to the codec."""
TRIAL_CHUNKS: Final = 8


def sides(data: DataSet) -> dict[str, Callable[[], Side]]:
    """Every codec, from memory and by pread."""
    found: dict[str, Callable[[], Side]] = {}
    for codec in CODECS:
        in_memory = _Once(lambda codec=codec: MemoryLoop(data, codec))  # type: ignore[misc]
        found[f"{codec} in memory, {data.name}"] = in_memory
        found[f"{codec} by pread, {data.name}"] = lambda loop=in_memory: FileLoop(loop())  # type: ignore[misc]
    return found


class _Once:
    """Makes a loop at the first call."""

    def __init__(self, make: Callable[[], MemoryLoop]) -> None:
        self._make = make
        self._made: MemoryLoop | None = None

    def __call__(self) -> MemoryLoop:
        if self._made is None:
            self._made = self._make()
        return self._made


class CodecLoop(Side):
    """All chunks, each decoded whole by one of the threads."""

    def __init__(self, data: DataSet) -> None:
        super().__init__(data)
        blosc.use_threads = False  # one chunk per thread is faster than many threads per chunk
        self.threads = len(os.sched_getaffinity(0))
        self.pool = ThreadPoolExecutor(self.threads)
        self._local = threading.local()

    @property
    def num_chunks(self) -> int:
        """Chunks of the part that is read."""
        return -(-self.samples // self.data.chunk_samples)

    @abstractmethod
    def stored(self, chunk: int) -> Any:
        """A stored chunk."""

    def batches(self, epoch: int, epochs: int) -> Batches:
        """The chunks in order."""
        size = self.data.chunk_samples
        for chunk in range(self.num_chunks):
            ids = np.arange(chunk * size, min((chunk + 1) * size, self.data.num_samples))
            yield ids, self._decode(chunk)[: len(ids)]

    def read(self, epoch: int, epochs: int) -> Values:
        """Every thread has every n-th chunk."""
        watch = Stopwatch()
        list(self.pool.map(lambda thread: self._loop(thread, epochs), range(self.threads)))
        return watch.values(
            epochs
            * min(self.num_chunks * self.data.chunk_samples, self.data.num_samples)
            * self.data.sample_bytes
        )

    def trial(self, option: str, seconds: float) -> float:
        """The rate of a part of the chunks, once to warm up and once measured."""
        self.use(option, min(self.data.num_samples, TRIAL_CHUNKS * self.data.chunk_samples))
        epochs = max(1, round(seconds / self.read(0, 1)["seconds"]))
        return self.read(0, epochs)["gb_per_s"]

    def _loop(self, thread: int, epochs: int) -> None:
        for _ in range(epochs):
            for chunk in range(thread, self.num_chunks, self.threads):
                self._decode(chunk)

    def _decode(self, chunk: int) -> Array:
        """One chunk in this thread's buffer."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = np.empty((self.data.chunk_samples, *self.data.sample_shape), self.data.dtype)
        buffer: Array = self._local.buffer
        blosc.decompress(self.stored(chunk), buffer)
        return buffer

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown()


class MemoryLoop(CodecLoop):
    """Stored chunks in memory."""

    def __init__(self, data: DataSet, codec: str) -> None:
        super().__init__(data)
        self._codec = codec.removeprefix("blosc-").encode()
        self.option = ""
        self.shard = data.shard(codec)
        self.frames: list[bytes] = []

    def files(self) -> list[Path]:
        """None."""
        return []

    def options(self) -> list[str]:
        """Block sizes."""
        return [f"blocks of {size >> 10} KiB" if size else "automatic blocks" for size in BLOCK_BYTES]

    def use(self, option: str, samples: int) -> None:
        """Encode as much as is read."""
        super().use(option, samples)
        self.option = option
        block_bytes = BLOCK_BYTES[self.options().index(option)]

        def encoded(chunk: Array) -> bytes:
            found: bytes = blosc.compress(chunk, self._codec, LEVEL, blosc.SHUFFLE, block_bytes)
            return found

        self.frames = list(self.pool.map(encoded, self._chunks()))

    def stored(self, chunk: int) -> bytes:
        """The frame."""
        return self.frames[chunk]

    def _chunks(self) -> Iterator[Array]:
        """Whole chunks, the last one filled up, from the packed set."""
        size = self.data.chunk_samples
        with h5py.File(self.shard, "r") as file:
            for start in range(0, self.samples, size):
                chunk = np.zeros((size, *self.data.sample_shape), self.data.dtype)
                rows = file[self.data.name][start : start + size]
                chunk[: len(rows)] = rows
                yield chunk


class FileLoop(CodecLoop):
    """The stored chunks of a `MemoryLoop`, behind one another in a file, read by pread into a buffer per thread."""

    def __init__(self, loop: MemoryLoop) -> None:
        super().__init__(loop.data)
        self._loop_in_memory = loop
        self._path = loop.shard.with_suffix(".frames")
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._ends = np.zeros(1, np.int64)

    def files(self) -> list[Path]:
        """The file."""
        return [self._path]

    def options(self) -> list[str]:
        """What the other chose."""
        return [self._loop_in_memory.option]

    def use(self, option: str, samples: int) -> None:
        """Write the other's frames."""
        super().use(option, samples)
        if len(self._ends) == 1:
            frames = self._loop_in_memory.frames
            self._path.write_bytes(b"".join(frames))
            self._ends = np.cumsum([0, *map(len, frames)])

    def stored(self, chunk: int) -> memoryview:
        """Read it."""
        if not hasattr(self._local, "stored"):
            self._local.stored = memoryview(bytearray(int(np.diff(self._ends).max())))
        start, end = self._ends[chunk : chunk + 2].tolist()
        view: memoryview = self._local.stored[: end - start]
        os.preadv(self._descriptor, [view], start)
        return view

    def close(self) -> None:
        """Close the file too."""
        super().close()
        os.close(self._descriptor)
