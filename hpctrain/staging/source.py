"""The source of chunks during training: the mirror where a chunk is present and verified, the shared file before that.

Every chunk is verified against its digest wherever it comes from. A damaged mirror chunk is read from the shared file
again and replaced; a disk that takes no more ends the copying with one warning, not the training.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from hpctrain.errors import DataError
from hpctrain.h5.chunks import Allocate, ChunkSource, fresh, verify
from hpctrain.h5.filters import Buffer
from hpctrain.h5.index import ChunkIndex
from hpctrain.resilience.faults import fault_point
from hpctrain.staging.mirror import Mirror

Warn = Callable[[str], None]


@dataclasses.dataclass
class StagingCounters:
    """Bytes and chunks so far, in this process."""

    shared_bytes: int = 0
    local_bytes: int = 0
    written_chunks: int = 0
    damaged_chunks: int = 0


class StagedSource:
    """A `ChunkSource` that reads through a mirror; safe to use from several threads."""

    def __init__(self, shared: ChunkSource, mirror: Mirror, warn: Warn) -> None:
        self._shared, self._mirror, self._warn = shared, mirror, warn
        self._lock = threading.Lock()
        self.counters = StagingCounters()
        self.writable = True
        """False once the mirror took no more."""

    def read(self, index: ChunkIndex, chunk: int, allocate: Allocate = fresh) -> Buffer:
        """The stored bytes of a chunk, verified. Raises what the shared source raises."""
        local = self._read_local(index, chunk, allocate)
        if local is not None:
            return local
        stored = self._shared.read(index, chunk, allocate)
        with self._lock:
            self.counters.shared_bytes += len(stored)
        self._write_local(index, chunk, stored)
        return stored

    def stage(self, index: ChunkIndex, chunk: int) -> None:
        """Bring a chunk into the mirror if it is not there."""
        if self.writable and not self._mirror.has(index, chunk):
            self.read(index, chunk)

    def _read_local(self, index: ChunkIndex, chunk: int, allocate: Allocate) -> Buffer | None:
        try:
            if not self._mirror.has(index, chunk):
                return None
            stored = self._mirror.read(index, chunk, allocate)
        except OSError as error:
            self.stop_writing(f"reading the mirror failed: {error}")
            return None
        try:
            verify(index, chunk, stored)
        except DataError:
            self._damaged(index, chunk)
            return None
        with self._lock:
            self.counters.local_bytes += len(stored)
        return stored

    def _damaged(self, index: ChunkIndex, chunk: int) -> None:
        with self._lock:
            self.counters.damaged_chunks += 1
            first = self.counters.damaged_chunks == 1
        if first:
            self._warn(
                f"the mirror {self._mirror.path} holds damaged bytes for chunk {chunk} of {index.dataset} in "
                f"{index.path.name}; read again from the shared file (further ones are counted, not shown)"
            )
        if self.writable:
            try:
                self._mirror.forget(index, chunk)
            except OSError as error:
                self.stop_writing(f"marking a chunk failed: {error}")

    def _write_local(self, index: ChunkIndex, chunk: int, stored: Buffer) -> None:
        if not self.writable:
            return
        try:
            fault_point("staging.write")
            self._mirror.write(index, chunk, stored)
        except OSError as error:
            self.stop_writing(f"writing failed: {error}")
            return
        with self._lock:
            self.counters.written_chunks += 1

    def stop_writing(self, reason: str) -> None:
        """End the copying, and say so once; reading goes on."""
        with self._lock:
            first, self.writable = self.writable, False
        if first:
            self._warn(f"staging to {self._mirror.path} ended: {reason}; reading on from the shared file")
