"""The loader: whole batches for this rank's lanes, made in threads ahead of their use.

The plan says which samples each lane sees; the assembler makes the batches. A batch is valid as long as somebody refers
to it (`hpctrain.data.buffers`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.assembler import AssembledStep, Assembler, rows_of
from hpctrain.data.batches import Fields
from hpctrain.data.plan import Plan
from hpctrain.data.preprocess import FieldPreprocessor
from hpctrain.data.requests import Requests
from hpctrain.h5.chunks import ChunkSource
from hpctrain.h5.packed import PackedSet
from hpctrain.h5.times import ReadTimes

__all__ = ["Fields", "LaneBatch", "Loader", "StepBatches"]

DEFAULT_BUDGET_BYTES: Final = 1 << 30


@dataclasses.dataclass(frozen=True)
class LaneBatch:
    """One micro-batch.

    Attributes:
        lane: the lane it belongs to.
        samples: global sample ids; int64, shape (B,). B may be 0 in the last step of an epoch.
        fields: by field name, an array of shape (B, ...), or a `Ragged` of B rows.
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
        lanes: Sequence[int],
        io_threads: int,
        prefetch_steps: int,
        memory_budget_bytes: int = DEFAULT_BUDGET_BYTES,
        preprocessors: Mapping[str, FieldPreprocessor] | None = None,
    ) -> None:
        self._plan, self._lanes = plan, lanes
        self._sizes = np.diff(plan.lane_bounds())
        self._assembler = Assembler(
            packed, source, io_threads, prefetch_steps, memory_budget_bytes, preprocessors
        )
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="plan")

    @property
    def times(self) -> ReadTimes:
        """Where the time went so far."""
        return self._assembler.times

    @property
    def dropped_chunks(self) -> int:
        """Chunks that were read twice in an epoch so far, because the memory budget does not hold the window."""
        return self._assembler.dropped_chunks

    def steps(self, epoch: int, step: int, epochs: int) -> Iterator[StepBatches]:
        """Steps from (epoch, step) to the end of epoch `epochs - 1`; once for a loader.

        An error of a reading thread (`DataError`, `StorageError`) is raised here, at the step that it hit. Raises
        `ConfigError` where the memory budget does not hold one step.
        """
        rows = len(self._lanes) * self._plan.lane_batch
        for assembled in self._assembler.run(self._requests(epoch, step, epochs), rows):
            yield self._split(assembled)

    def close(self) -> None:
        """End the threads; safe to call twice."""
        self._assembler.close()
        self._planner.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _requests(self, epoch: int, step: int, epochs: int) -> Iterator[Requests]:
        """One epoch's after the other; the next one's are made meanwhile, so that no epoch begins with a pause."""
        if epoch >= epochs:
            return
        ahead = self._planner.submit(lane_requests, self._plan, self._lanes, epoch, step)
        for following in range(epoch + 1, epochs):
            current = ahead.result()
            ahead = self._planner.submit(lane_requests, self._plan, self._lanes, following)
            yield current
        yield ahead.result()

    def _split(self, assembled: AssembledStep) -> StepBatches:
        """The lanes' parts of a step's batch, as views."""
        step, samples, batches, begin = assembled.step, assembled.samples, [], 0
        for lane in self._lanes:
            left = int(self._sizes[lane]) - step * self._plan.lane_batch
            end = begin + max(0, min(left, self._plan.lane_batch))
            fields = {name: rows_of(value, begin, end) for name, value in assembled.fields.items()}
            batches.append(LaneBatch(lane, samples[begin:end], fields))
            begin = end
        return StepBatches(assembled.epoch, step, batches)


def lane_requests(plan: Plan, lanes: Sequence[int], epoch: int, first_step: int = 0) -> Requests:
    """What these lanes see in an epoch from `first_step` on: step by step, lane after lane within a step."""
    of_lanes = [plan.lane_samples(epoch, lane) for lane in lanes]
    batch, num_steps = plan.lane_batch, plan.steps_per_epoch
    full_steps = min((len(samples) for samples in of_lanes), default=0) // batch
    full = np.stack(
        [samples[: full_steps * batch].reshape(full_steps, batch) for samples in of_lanes], axis=1
    )
    rest = [
        samples[step * batch : (step + 1) * batch]
        for step in range(full_steps, num_steps)
        for samples in of_lanes
    ]
    sizes = np.array([len(part) for part in rest], np.int64).reshape(-1, len(lanes)).sum(axis=1)
    sizes = np.concatenate((np.full(full_steps, len(lanes) * batch), sizes))[first_step:]
    samples = np.concatenate(
        (full[first_step:].reshape(-1), *rest[max(0, first_step - full_steps) * len(lanes) :])
    )
    bounds = np.concatenate(([0], np.cumsum(sizes)))
    return Requests(epoch, samples, bounds, plan.chunk_of(samples), first_step)
