"""Batches in memory: what of a set is held, what a batch is made of, and how its rows are filled. No threads here."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpctrain.data.buffers import BufferPool
from hpctrain.data.held import HeldDense, HeldField, RaggedRows, held_dense, place_of
from hpctrain.data.preprocess import FieldPreprocessor
from hpctrain.data.requests import IdArray, Requests
from hpctrain.h5.chunks import ChunkSource
from hpctrain.h5.fields import Field
from hpctrain.h5.packed import PackedSet
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.reader import RowReader
from hpctrain.h5.scratch import Scratch
from hpctrain.h5.times import ReadTimes

Fields = dict[str, npt.NDArray[Any] | Ragged]

_PART_BYTES: Final = 1 << 20
"""A batch is filled in parts of about so many bytes: fewer, and threads idle; more, and they wait for each other."""


def _locked() -> threading.Lock:
    """A lock that is taken: what `threading.Event` is made of, at a tenth of its cost."""
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclasses.dataclass(eq=False)
class Batch:
    """The samples of one step of some requests; the fields are there once it is done and `error` is None.

    Attributes:
        slots: where the chunk of each row is held; int64, shape (B,).
        rows: which row of its chunk each is; int64, shape (B,).
    """

    requests: Requests
    step: int
    chunks: list[int]
    chunks_missing: int = 0
    parts_missing: int = 0
    fields: Fields = dataclasses.field(default_factory=dict)
    slots: IdArray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    rows: IdArray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    error: BaseException | None = None
    done: threading.Lock = dataclasses.field(default_factory=_locked)

    @property
    def samples(self) -> IdArray:
        """Ids of the samples, in the order of the rows."""
        return self.requests.samples[self.requests.rows(self.step)]

    def fail(self, error: BaseException) -> None:
        """End it with an error, unless it has one."""
        if self.error is None:
            self.error = error
        self.finish()

    def finish(self) -> None:
        """Let the one go on who waits for it by `done.acquire()`."""
        with contextlib.suppress(RuntimeError):  # it has ended already, with an error
            self.done.release()


class BatchMemory:
    """The memory of a loader: slots for chunks, and buffers for batches."""

    def __init__(
        self,
        packed: PackedSet,
        source: ChunkSource,
        preprocessors: Mapping[str, FieldPreprocessor],
        times: ReadTimes,
    ) -> None:
        self._packed, self._preprocessors, self._times = packed, preprocessors, times
        reader = RowReader(source, times)
        self._dense: dict[str, HeldDense] = {
            name: held_dense(packed, field, source, reader, times)
            for name, field in packed.fields.items()
            if field.kind == "dense"
        }
        self._ragged = {
            name: RaggedRows(packed, field, source, times)
            for name, field in packed.fields.items()
            if field.kind == "ragged"
        }
        self._held: list[HeldField] = [*self._dense.values(), *self._ragged.values()]
        # What batches have as arrays, by the field that it is made of.
        self._outputs: dict[str, tuple[Field, ...]] = {
            name: preprocessors[name].outputs if name in preprocessors else (field,)
            for name, field in packed.fields.items()
            if name in preprocessors or name in self._dense
        }
        self._starts = np.concatenate(([0], np.cumsum(packed.chunk_sizes)))
        outputs = itertools.chain.from_iterable(self._outputs.values())
        self._buffers = {output.name: BufferPool() for output in outputs}
        self._scratch = Scratch()

    @property
    def slot_bytes(self) -> int:
        """Memory of a slot for one chunk."""
        return sum(held.slot_bytes for held in self._held)

    @property
    def row_bytes(self) -> int:
        """Memory of one sample in a batch; a mean one, where samples differ in size."""
        ragged = [held for name, held in self._ragged.items() if name not in self._outputs]
        mean_bytes = [-(-held.slot_bytes // self._packed.chunk_samples) for held in ragged]
        outputs = itertools.chain.from_iterable(self._outputs.values())
        return sum(output.sample_bytes for output in outputs) + sum(mean_bytes)

    def reserve(self, slots: int) -> None:
        """Have slots for so many chunks; pages take memory when they are first written to."""
        for held in self._held:
            held.reserve(slots)

    def load(self, chunk: int, slot: int) -> None:
        """Read a chunk of the set into a slot. Raises what the source raises, and `DataError`."""
        place = place_of(self._packed, chunk)
        for held in self._held:
            held.load(place, slot)

    def prepare(self, batch: Batch, slot_of: Mapping[int, int], threads: int) -> list[tuple[int, int]]:
        """Find the memory for a batch whose chunks are held; returns the parts of its rows, each for one `fill`."""
        wanted = batch.requests.rows(batch.step)
        chunks, count = batch.requests.chunks[wanted], wanted.stop - wanted.start
        batch.slots = np.fromiter(map(slot_of.__getitem__, chunks.tolist()), np.int64, count)
        batch.rows = batch.samples - self._starts[chunks]
        num_bytes = 0
        for output in itertools.chain.from_iterable(self._outputs.values()):
            shape, dtype = (count, *output.sample_shape), output.dtype.newbyteorder("=")
            out = self._buffers[output.name].empty(shape, dtype)
            batch.fields[output.name], num_bytes = out, num_bytes + out.nbytes
        self._times.add(used_bytes=count * self._stored_row_bytes)
        parts = max(1, min(num_bytes // _PART_BYTES, 2 * threads, count))
        bounds = [count * part // parts for part in range(parts + 1)]
        batch.parts_missing = parts
        return list(itertools.pairwise(bounds))

    def fill(self, batch: Batch, begin: int, end: int) -> None:
        """Fill the rows [begin, end) of a batch; with the first also the ragged fields, as a whole."""
        slots, rows = batch.slots[begin:end], batch.rows[begin:end]
        for name, dense in self._dense.items():
            if name not in self._preprocessors:
                dense.gather(slots, rows, _array(batch, name)[begin:end])
                continue
            field = self._packed.fields[name]
            shape = (end - begin, *field.sample_shape)
            stored = self._scratch.array(name, shape, field.dtype.newbyteorder("="))
            dense.gather(slots, rows, stored)
            self._preprocess(batch, name, stored, begin, end)
        for name, ragged in self._ragged.items():
            if name in self._preprocessors:
                self._preprocess(batch, name, ragged.gather(slots, rows), begin, end)
            elif begin == 0:
                batch.fields[name] = ragged.gather(batch.slots, batch.rows)

    def _preprocess(
        self, batch: Batch, name: str, stored: npt.NDArray[Any] | Ragged, begin: int, end: int
    ) -> None:
        outs = [_array(batch, output.name)[begin:end] for output in self._outputs[name]]
        begun_s = time.perf_counter()
        self._preprocessors[name].run(stored, batch.samples[begin:end], batch.requests.epoch, outs)
        self._times.add(convert_s=time.perf_counter() - begun_s)

    @cached_property
    def _stored_row_bytes(self) -> int:
        """Of one sample in stored types, a mean one where samples differ in size."""
        dense = sum(field.sample_bytes for field in self._packed.fields.values())
        ragged = sum(held.slot_bytes for held in self._ragged.values())
        return dense + -(-ragged // self._packed.chunk_samples)


def _array(batch: Batch, name: str) -> npt.NDArray[Any]:
    values = batch.fields[name]
    assert isinstance(values, np.ndarray)
    return values
