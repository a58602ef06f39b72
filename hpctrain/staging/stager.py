"""The stager: a thread that copies this rank's chunks to the mirror while training runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from hpctrain.h5.index import ChunkIndex
from hpctrain.h5.packed import PackedSet
from hpctrain.staging.source import StagedSource


def stored_chunks(packed: PackedSet, chunk: int) -> Iterator[tuple[ChunkIndex, int]]:
    """The stored chunks of all fields that hold the samples of one sample chunk."""
    shard_number, row = packed.locate(chunk)
    shard = packed.shards[shard_number]
    for index in shard.dense.values():
        yield index, row
    for name, index in shard.flat.items():
        offsets = shard.offsets[name]
        first = row * packed.chunk_samples
        begin, end = int(offsets[first]), int(offsets[min(first + packed.chunk_samples, shard.num_samples)])
        if begin < end:
            for flat_chunk in range(begin // index.chunk_shape[0], (end - 1) // index.chunk_shape[0] + 1):
                yield index, flat_chunk


class Stager:
    """Stages sample chunks in the order given (`Plan.staging_order`) until the last one or a full disk."""

    def __init__(
        self, packed: PackedSet, source: StagedSource, chunks: Iterable[int], done: Callable[[], None]
    ) -> None:
        self._packed, self._source, self._chunks, self._done = packed, source, chunks, done
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stager", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; what is staged stays."""
        self._closed.set()
        self._thread.join()

    def join(self, timeout_s: float) -> bool:
        """Wait until everything is staged; False if the time ran out."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            for chunk in self._chunks:
                for index, stored in stored_chunks(self._packed, chunk):
                    if self._closed.is_set() or not self._source.writable:
                        return
                    self._source.stage(index, stored)
            self._done()
        except Exception as error:  # noqa: BLE001 - training goes on without staging, or meets the same error itself
            self._source.stop_writing(f"reading ahead failed: {error}")
