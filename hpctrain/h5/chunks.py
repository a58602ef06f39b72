"""Where stored chunks come from: `ChunkSource`, and the one that reads the shards by pread."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.filters import Buffer
from hpctrain.h5.index import REPACK, ChunkIndex, digest_of


class ChunkSource(Protocol):
    """Where stored chunks come from: the shard itself, or a mirror of it."""

    def read(self, index: ChunkIndex, chunk: int) -> Buffer:
        """The stored bytes of one chunk, verified against `index.digests`; called from several threads at once."""
        ...


class FileSource:
    """Reads chunks from the shards themselves.

    Files are opened on first use, once each, and closed by `close` (or on leaving the `with` block). Safe to
    share between threads: pread has no file position.
    """

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, index: ChunkIndex, chunk: int) -> bytes:
        """The stored bytes of one chunk.

        Raises `DataError` when the file is too short or the bytes do not match their digest, `StorageError`
        when reading fails.
        """
        size = int(index.sizes[chunk])
        try:
            stored = _pread(self._descriptor(index.path), size, int(index.offsets[chunk]))
        except FileNotFoundError as error:
            raise DataError(f"{index.path}: there is no such file any more; {REPACK}") from error
        except OSError as error:
            reason = (
                f"cannot be read: {error.strerror} (errno {error.errno}); check the filesystem and run again"
            )
            raise StorageError(f"{index.describe(chunk)} {reason}") from error
        if len(stored) != size:
            raise DataError(
                f"{index.describe(chunk)}: the file ends after {len(stored)} of these bytes; {REPACK}"
            )
        found, wanted = digest_of(stored), int(index.digests[chunk])
        if found != wanted:
            raise DataError(
                f"{index.describe(chunk)}: the digest is {found:016x} but should be {wanted:016x}; {REPACK}"
            )
        return stored

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        with self._lock:
            descriptors, self._descriptors = self._descriptors, {}
        for descriptor in descriptors.values():
            os.close(descriptor)

    def __enter__(self) -> FileSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            descriptor = self._descriptors.get(path)
            if descriptor is None:
                descriptor = self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return descriptor


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    """`size` bytes at `offset`, fewer only at the end of the file: one pread may return less than was asked for."""
    data = os.pread(descriptor, size, offset)
    while len(data) < size:
        more = os.pread(descriptor, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def read_flat(index: ChunkIndex, source: ChunkSource, start: int, stop: int) -> npt.NDArray[Any]:
    """Elements [start, stop) of a 1-D dataset, in native byte order; errors as for `ChunkSource.read`."""
    out = np.empty(stop - start, index.dtype.newbyteorder("="))
    step = index.chunk_shape[0]
    for chunk in range(start // step, -(-stop // step) if stop > start else start // step):
        begin, end = max(start, chunk * step), min(stop, (chunk + 1) * step)
        part = index.decode(chunk, source.read(index, chunk))
        out[begin - start : end - start] = part[begin - chunk * step : end - chunk * step]
    return out
