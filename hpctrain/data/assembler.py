"""Batches made ahead of their use, in threads: nothing is forked beside MPI.

One thread runs ahead through the requests and sees to it that the chunks of the next batches are read; a few
workers read and decode them, and fill a batch as soon as all its chunks are there. Memory is bounded: by the
budget's slots for chunks (`hpctrain.data.window`), and by the number of batches ahead.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Final

import numpy.typing as npt

from hpctrain.data.batches import Batch, BatchMemory, Fields
from hpctrain.data.preprocess import FieldPreprocessor
from hpctrain.data.requests import IdArray, Requests
from hpctrain.data.window import Window
from hpctrain.data.workers import Workers
from hpctrain.errors import ConfigError
from hpctrain.h5.chunks import ChunkSource
from hpctrain.h5.packed import PackedSet
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.times import ReadTimes

_POLL_S: Final = 0.1
"""How often a blocked thread looks whether it is to end."""
_GROUP_BYTES: Final = 4 << 20
"""Small steps are made several at a time, up to so many bytes: each batch costs some 0.3 ms of bookkeeping."""
_AHEAD_BYTES: Final = 16 << 20
"""So much is made ahead where nothing else is asked for: more would leave the processor's cache before its use."""
_LEAST_AHEAD: Final = 4
_MOST_AHEAD: Final = 64
_BATCH_SHARE: Final = 0.25
"""Of the memory budget, for batches ahead of their use."""
_MIB: Final = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class AssembledStep:
    """All that was asked for in one step: `samples` (ids) and their `fields`, row by row."""

    epoch: int
    step: int
    """Within the epoch."""
    samples: IdArray
    fields: Fields


class Assembler:
    """Makes the batches of a sequence of requests; `close` ends its threads."""

    def __init__(
        self,
        packed: PackedSet,
        source: ChunkSource,
        io_threads: int,
        prefetch_steps: int,
        memory_budget_bytes: int,
        preprocessors: Mapping[str, FieldPreprocessor] | None = None,
    ) -> None:
        self.times = ReadTimes()
        self._num_chunks = len(packed.chunk_sizes)
        self._threads, self._prefetch_steps, self._budget_bytes = (
            io_threads,
            prefetch_steps,
            memory_budget_bytes,
        )
        self._memory = BatchMemory(packed, source, preprocessors or {}, self.times)
        self._window = Window(0)
        self._grouped = self._ahead = 1
        self._workers = Workers(io_threads, "decode")
        self._changed = threading.Condition()  # its lock can be taken again by the thread that has it
        # Under its lock: what is handed to the consumer, in order; batches that are not yet filled.
        self._handed_over: collections.deque[Batch | BaseException | None] = collections.deque()
        self._unfilled = 0
        self._closed = False
        self._producer: threading.Thread | None = None

    @property
    def dropped_chunks(self) -> int:
        """Chunks that were read twice in an epoch, because the memory budget does not hold the window."""
        return self._window.dropped_chunks

    def run(self, requests: Iterable[Requests], rows_per_step: int) -> Iterator[AssembledStep]:
        """The steps of the requests in order, each with its batch; only once for an assembler.

        `rows_per_step`: samples in a step, at most. An error of a reading thread (`DataError`, `StorageError`) is
        raised at the step that it hit. Raises `ConfigError` where the memory budget does not hold one batch, and
        `RuntimeError` once the assembler is closed.
        """
        self._reserve(rows_per_step)
        self._producer = threading.Thread(target=self._produce, args=(requests,), name="loader", daemon=True)
        self._producer.start()
        while (batch := self._next()) is not None:
            yield from _steps_of(batch)

    def close(self) -> None:
        """End the threads; safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._workers.close()
        if self._producer is not None:
            self._producer.join()

    def __enter__(self) -> Assembler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reserve(self, rows_per_step: int) -> None:
        """Share the budget out: batches ahead and the ones in use, and slots for chunks."""
        step_bytes = max(1, rows_per_step * self._memory.row_bytes)
        wanted = self._prefetch_steps or max(_LEAST_AHEAD, min(_AHEAD_BYTES // step_bytes, _MOST_AHEAD))
        steps_ahead = max(1, min(wanted, int(self._budget_bytes * _BATCH_SHARE) // step_bytes))
        self._grouped = max(1, min(_GROUP_BYTES // step_bytes, steps_ahead // 2))
        self._ahead = -(-steps_ahead // self._grouped)
        kept_bytes = (self._ahead + 2) * self._grouped * step_bytes  # and one in use, and one being made
        slot_bytes = max(1, self._memory.slot_bytes)
        slots = min((self._budget_bytes - kept_bytes) // slot_bytes, self._num_chunks)
        if slots < 1:
            raise ConfigError(
                f"data.memory_budget_mib = {self._budget_bytes / _MIB:.3g}: {self._ahead + 2} batches take "
                f"{kept_bytes / _MIB:.3g} MiB and each chunk {slot_bytes / _MIB:.3g} MiB; raise it"
            )
        self._window = Window(slots)
        self._memory.reserve(slots)

    def _next(self) -> Batch | None:
        begun_s = time.perf_counter()
        with self._changed:
            while not self._handed_over:
                self._refuse_closed()
                self._changed.wait()
            batch = self._handed_over.popleft()
            self._changed.notify_all()
        if isinstance(batch, BaseException):
            raise batch
        if batch is not None:
            while not batch.done.acquire(timeout=_POLL_S):
                self._refuse_closed()
            if batch.error is not None:
                raise batch.error
        self.times.add(wait_s=time.perf_counter() - begun_s)
        return batch

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the loader was closed while somebody waited for its next batch")

    # The thread that runs ahead.

    def _produce(self, requests: Iterable[Requests]) -> None:
        try:
            for request in _first_alone(requests):
                if not self._begin_batches(request.grouped(self._grouped)):
                    return
            self._hand_over(None)
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
            self._hand_over(error)

    def _begin_batches(self, requests: Requests) -> bool:
        """Begin the batch of each step; False when closed."""
        for step in range(requests.num_steps):
            batch = Batch(requests, step, requests.chunks_of(step).tolist())
            if not self._begin(batch):
                return False
        return True

    def _begin(self, batch: Batch) -> bool:
        """Wait for the batch's turn and for room, then have its chunks loaded; False when closed."""
        with self._changed:
            while not self._closed:
                if len(self._handed_over) < self._ahead:
                    missing = self._window.acquire(batch)
                    if missing is not None:
                        self._hand_over(batch)
                        self._unfilled += 1
                        self._submit(batch, missing)
                        return True
                    if self._unfilled == 0:
                        raise self._no_room(batch)
                self._changed.wait(_POLL_S)
        return False

    def _submit(self, batch: Batch, missing: list[int]) -> None:
        for chunk in missing:
            self._workers.submit(partial(self._load, chunk))
        if batch.chunks_missing == 0:  # under the lock: afterwards the last load could have begun to fill it
            self._workers.submit(partial(self._fill, batch))

    def _no_room(self, batch: Batch) -> ConfigError:
        return ConfigError(
            f"data.memory_budget_mib = {self._budget_bytes / _MIB:.3g}: a batch needs {len(batch.chunks)} chunks, and "
            f"{self._window.slots} fit; raise it, lower data.window_chunks, or pack with a smaller --chunk-samples"
        )

    def _hand_over(self, item: Batch | BaseException | None) -> None:
        with self._changed:
            self._handed_over.append(item)
            self._changed.notify_all()

    # In the workers.

    def _load(self, chunk: int) -> None:
        try:
            self._memory.load(chunk, self._window[chunk].slot)
        except BaseException as failure:  # noqa: BLE001 - raised by the consumer, at the first step that needs the chunk
            with self._changed:  # not `loaded`: later batches must not be made of what lies in the slot
                for batch in self._window[chunk].waiting:
                    batch.fail(failure)
            return
        with self._changed:
            waiting = self._window.loaded(chunk)
            for batch in waiting:
                batch.chunks_missing -= 1
            ready = [batch for batch in waiting if batch.chunks_missing == 0]
        for batch in ready:
            self._fill(batch)

    def _fill(self, batch: Batch) -> None:
        """Fill a batch whose chunks are there: one part here, the others wherever there is a thread."""
        try:
            slot_of = {chunk: self._window[chunk].slot for chunk in batch.chunks}
            parts = self._memory.prepare(batch, slot_of, self._threads)
        except BaseException as failure:  # noqa: BLE001 - raised by the consumer
            batch.fail(failure)
            return
        for begin, end in parts[1:]:
            self._workers.submit(partial(self._fill_part, batch, begin, end))
        self._fill_part(batch, *parts[0])

    def _fill_part(self, batch: Batch, begin: int, end: int) -> None:
        try:
            self._memory.fill(batch, begin, end)
        except BaseException as failure:  # noqa: BLE001 - raised by the consumer
            batch.fail(failure)
        with self._changed:
            batch.parts_missing -= 1
            if batch.parts_missing > 0:
                return
            self._unfilled -= 1
            self._window.release(batch)
            self._changed.notify_all()
        batch.finish()


def _first_alone(requests: Iterable[Requests]) -> Iterator[Requests]:
    """The first step by itself: grouped with others it would wait for all of their chunks."""
    for number, request in enumerate(requests):
        if number == 0 and request.num_steps > 1:
            yield request.part(0, 1)
            yield request.part(1, request.num_steps)
        else:
            yield request


def _steps_of(batch: Batch) -> Iterator[AssembledStep]:
    """The steps that were made as one batch."""
    first_row = batch.requests.rows(batch.step).start
    for step, begin, end in batch.requests.steps_within(batch.step):
        fields = {
            name: rows_of(value, begin - first_row, end - first_row) for name, value in batch.fields.items()
        }
        yield AssembledStep(batch.requests.epoch, step, batch.requests.samples[begin:end], fields)


def rows_of(value: npt.NDArray[Any] | Ragged, begin: int, end: int) -> npt.NDArray[Any] | Ragged:
    """Rows [begin, end) of a field, as a view."""
    if not isinstance(value, Ragged):
        return value[begin:end]
    offsets = value.offsets[begin : end + 1]
    return Ragged(value.values[offsets[0] : offsets[-1]], offsets - offsets[0])
