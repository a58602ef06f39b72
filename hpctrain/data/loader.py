"""The loader: whole batches for this rank's lanes, decoded in threads ahead of their use.

Threads only: nothing is forked beside MPI. The future is known (the plan), so a chunk is decoded once, kept decoded
while a batch of this rank still needs it, and dropped after its last use. Batches are made `prefetch_steps` ahead,
over the ends of epochs, so that no epoch begins with a pause.

What is held: the shuffle windows of the rank's lanes, decoded, plus `prefetch_steps` steps of batches.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.plan import Plan
from hpctrain.h5.packed import PackedSet
from hpctrain.h5.reader import ChunkSource, Ragged, read_sample_chunk

Fields = dict[str, NDArray[np.generic] | Ragged]

_POLL_S = 0.1
"""How often a blocked producer looks whether it was closed."""


@dataclasses.dataclass(frozen=True)
class LaneBatch:
    """One micro-batch.

    Attributes:
        lane: the lane it belongs to.
        samples: global sample ids; int64, shape (B,). B may be 0 in the last step of an epoch.
        fields: by field name, an array of shape (B, ...) in the stored dtype, or a `Ragged` of B rows.
    """

    lane: int
    samples: NDArray[np.int64]
    fields: Fields


@dataclasses.dataclass(frozen=True)
class StepBatches:
    """The micro-batches of this rank's lanes for one step, in lane order."""

    epoch: int
    step: int
    """Step within the epoch."""
    lanes: list[LaneBatch]


class Loader:
    """Iterates over the steps of a run from a cursor on; a context manager that ends its threads."""

    def __init__(
        self,
        packed: PackedSet,
        source: ChunkSource,
        plan: Plan,
        lanes: range,
        io_threads: int,
        prefetch_steps: int,
    ) -> None:
        self._packed, self._source, self._plan, self._lanes = packed, source, plan, lanes
        self._pool = ThreadPoolExecutor(io_threads, thread_name_prefix="decode")
        self._prefetch_steps = prefetch_steps
        self._ready: queue.Queue[StepBatches | BaseException | None] = queue.Queue(prefetch_steps)
        self._closed = threading.Event()
        self._producer: threading.Thread | None = None

    def steps(self, epoch: int, step: int, epochs: int) -> Iterator[StepBatches]:
        """Steps from (epoch, step) to the end of epoch `epochs - 1`.

        An error of a reading thread (`DataError`, `StorageError`) is raised here, in the order of the steps.
        """
        self._producer = threading.Thread(
            target=self._produce, args=(epoch, step, epochs), name="loader", daemon=True
        )
        self._producer.start()
        while (item := self._ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """End the threads; safe to call twice."""
        self._closed.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._producer is not None:
            self._producer.join()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _produce(self, epoch: int, step: int, epochs: int) -> None:
        try:
            for batches in self._assembled(epoch, step, epochs):
                if not self._put(batches):
                    return
            self._put(None)
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
            self._put(error)

    def _put(self, item: StepBatches | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def _assembled(self, epoch: int, step: int, epochs: int) -> Iterator[StepBatches]:
        """Steps in order; the chunks of the next `prefetch_steps` are always under way."""
        ahead: collections.deque[_StepJob] = collections.deque()
        for job in self._jobs(epoch, step, epochs):
            job.request()
            ahead.append(job)
            if len(ahead) > self._prefetch_steps:
                yield ahead.popleft().assemble()
        while ahead:
            yield ahead.popleft().assemble()

    def _jobs(self, epoch: int, step: int, epochs: int) -> Iterator[_StepJob]:
        for current in range(epoch, epochs):
            lanes = {lane: self._plan.lane_batches(current, lane) for lane in self._lanes}
            first = step if current == epoch else 0
            window = _ChunkWindow(self._pool, self._packed, self._source)
            jobs = [
                _StepJob(
                    current,
                    at,
                    {lane: lanes[lane][at] for lane in self._lanes},
                    self._plan,
                    self._packed,
                    window,
                )
                for at in range(first, self._plan.steps_per_epoch)
            ]
            window.expect(collections.Counter(chunk for job in jobs for chunk in job.chunks))
            yield from jobs


class _ChunkWindow:
    """The decoded chunks of one epoch: each decoded at its first use and dropped after its last."""

    def __init__(self, pool: ThreadPoolExecutor, packed: PackedSet, source: ChunkSource) -> None:
        self._pool, self._packed, self._source = pool, packed, source
        self._uses_left: collections.Counter[int] = collections.Counter()
        self._decoded: dict[int, Future[Fields]] = {}

    def expect(self, uses: collections.Counter[int]) -> None:
        self._uses_left = uses

    def request(self, chunk: int) -> None:
        if chunk not in self._decoded:
            self._decoded[chunk] = self._pool.submit(read_sample_chunk, self._packed, self._source, chunk)

    def get(self, chunk: int) -> Fields:
        return self._decoded[chunk].result()

    def release(self, chunk: int) -> None:
        self._uses_left[chunk] -= 1
        if self._uses_left[chunk] == 0:
            del self._decoded[chunk]


class _StepJob:
    """One step of this rank: which chunks it needs, and the batches made of them."""

    def __init__(
        self,
        epoch: int,
        step: int,
        lanes: dict[int, NDArray[np.int64]],
        plan: Plan,
        packed: PackedSet,
        window: _ChunkWindow,
    ) -> None:
        self._epoch, self._step, self._lanes, self._plan = epoch, step, lanes, plan
        self._packed, self._window = packed, window
        samples = np.concatenate(list(lanes.values()))
        self.chunks: list[int] = np.unique(plan.chunk_of(samples)).tolist()

    def request(self) -> None:
        for chunk in self.chunks:
            self._window.request(chunk)

    def assemble(self) -> StepBatches:
        lanes = [LaneBatch(lane, samples, self._gather(samples)) for lane, samples in self._lanes.items()]
        for chunk in self.chunks:
            self._window.release(chunk)
        return StepBatches(self._epoch, self._step, lanes)

    def _gather(self, samples: NDArray[np.int64]) -> Fields:
        pieces = [
            (self._window.get(chunk), samples[positions] - self._plan.chunk_starts[chunk], positions)
            for chunk, positions in by_chunk(self._plan.chunk_of(samples))
        ]
        return gather(self._packed, pieces, len(samples))


def by_chunk(chunk_of: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each chunk that occurs, ascending, and the positions at which it does; one sort for all of them."""
    order = np.argsort(chunk_of, kind="stable")
    chunks, starts = np.unique(chunk_of[order], return_index=True)
    ends = [*starts[1:], len(order)]
    for chunk, start, end in zip(chunks.tolist(), starts, ends, strict=False):  # no chunk: one end too many
        yield chunk, order[start:end]


Piece = tuple[Fields, NDArray[np.int64], NDArray[np.int64]]
"""A decoded chunk, the rows wanted from it, and where each goes in the batch."""


def gather(packed: PackedSet, pieces: list[Piece], count: int) -> Fields:
    """A batch of `count` samples from rows of decoded chunks."""
    batch: Fields = {}
    for name, field in packed.fields.items():
        if field.kind == "ragged":
            batch[name] = _gather_ragged(name, field.dtype, pieces, count)
            continue
        out = np.empty((count, *field.sample_shape), dtype=field.dtype)
        for fields, rows, positions in pieces:
            source = fields[name]
            assert isinstance(source, np.ndarray)
            out[positions] = source[rows]
        batch[name] = out
    return batch


def _gather_ragged(name: str, dtype: np.dtype[np.generic], pieces: list[Piece], count: int) -> Ragged:
    lengths = np.zeros(count, dtype=np.int64)
    taken = []
    for fields, rows, positions in pieces:
        source = fields[name]
        assert isinstance(source, Ragged)
        part = source.take(rows)
        lengths[positions] = np.diff(part.offsets)
        taken.append((part, positions))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    values = np.empty(int(offsets[-1]), dtype=dtype)
    for part, positions in taken:
        # each value moves by the distance between its row's start in the batch and in the piece
        shift = np.repeat(offsets[positions] - part.offsets[:-1], np.diff(part.offsets))
        values[np.arange(len(part.values)) + shift] = part.values
    return Ragged(values, offsets)
