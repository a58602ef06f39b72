"""The plan: a pure function from (seed, epoch, chunk table, number of lanes) to the samples each lane sees, in order.

An epoch's chunks are permuted, and the samples within each; that sequence is cut into lanes by sample count, so that
at most `num_lanes - 1` chunks are shared by two lanes; each lane then shuffles its samples within windows of chunks.
Ranks do not occur here: dealing the same lanes to another number of ranks changes nothing.

What is lost: a lane mixes samples only within its window, not over the whole set; a wider window costs memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.permutation import mix_key, permutation

_CHUNKS, _SAMPLES, _WINDOWS = 1, 2, 3  # streams of random numbers


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The order of a run.

    Attributes:
        chunk_sizes: samples in each chunk of the set, in file order; int64, shape (num_chunks,), each at least 1.
        num_lanes: logical workers.
        lane_batch: samples per lane and step.
        seed: seed of the order.
        window_chunks: shuffle window of a lane, in chunks.
    """

    chunk_sizes: NDArray[np.int64]
    num_lanes: int
    lane_batch: int
    seed: int
    window_chunks: int

    def __post_init__(self) -> None:
        for name in ("num_lanes", "lane_batch", "window_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: at least 1 is needed")
        if len(self.chunk_sizes) == 0 or int(self.chunk_sizes.min()) < 1:
            raise ValueError("the chunk table is empty or holds a chunk without samples: nothing to plan")

    @cached_property
    def chunk_starts(self) -> NDArray[np.int64]:
        """Id of the first sample of each chunk, and the number of samples; shape (num_chunks + 1,)."""
        return np.concatenate(([0], np.cumsum(self.chunk_sizes)))

    @property
    def num_samples(self) -> int:
        """Samples per epoch."""
        return int(self.chunk_starts[-1])

    @property
    def global_batch(self) -> int:
        """Samples per full step over all lanes."""
        return self.num_lanes * self.lane_batch

    @property
    def steps_per_epoch(self) -> int:
        """Steps per epoch; every one but the last is full."""
        return -(-self.num_samples // self.global_batch)

    def lane_bounds(self) -> NDArray[np.int64]:
        """Where the epoch's sequence is cut: lane i takes [bounds[i], bounds[i + 1]); shape (num_lanes + 1,).

        Each lane gets the same number of full micro-batches; the remainder, less than one global batch, is spread as
        evenly as it goes and makes the last, short step.
        """
        full_steps, remainder = divmod(self.num_samples, self.global_batch)
        share, extra = divmod(remainder, self.num_lanes)
        sizes = np.full(self.num_lanes, full_steps * self.lane_batch + share, dtype=np.int64)
        sizes[:extra] += 1
        return np.concatenate(([0], np.cumsum(sizes)))

    def lane_samples(self, epoch: int, lane: int) -> NDArray[np.int64]:
        """Ids of the samples that `lane` sees in `epoch`, in order; shape (samples of the lane,)."""
        parts = self._lane_parts(epoch, lane)
        windows = []
        for window, start in enumerate(range(0, len(parts), self.window_chunks)):
            samples = np.concatenate(parts[start : start + self.window_chunks])
            key = mix_key(self.seed, epoch, _WINDOWS, lane, window)
            windows.append(samples[permutation(key, len(samples))])
        return np.concatenate(windows) if windows else np.zeros(0, dtype=np.int64)

    def lane_batches(self, epoch: int, lane: int) -> list[NDArray[np.int64]]:
        """`lane_samples` cut into the micro-batches of steps 0 .. steps_per_epoch - 1; the last may be empty."""
        samples = self.lane_samples(epoch, lane)
        cuts = range(0, self.steps_per_epoch * self.lane_batch, self.lane_batch)
        return [samples[cut : cut + self.lane_batch] for cut in cuts]

    def chunk_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The chunk that holds each sample; same shape."""
        return np.searchsorted(self.chunk_starts, samples, side="right").astype(np.int64) - 1

    def first_use(self, epoch: int, lanes: range) -> NDArray[np.int64]:
        """The chunks that `lanes` use in `epoch`, each once, by the step of their first use; shape (chunks used,)."""
        chunks = [self.chunk_of(self.lane_samples(epoch, lane)) for lane in lanes]
        steps = [np.arange(len(of_lane)) // self.lane_batch for of_lane in chunks]
        sequence = np.concatenate(chunks)[np.argsort(np.concatenate(steps), kind="stable")]
        _, first = np.unique(sequence, return_index=True)
        return sequence[np.sort(first)]

    def staging_order(self, epochs: range, lanes: range) -> Iterator[int]:
        """The chunks that `lanes` use in `epochs`, each once, in first-use order; ends when every chunk was named."""
        seen = np.zeros(len(self.chunk_sizes), dtype=bool)
        for epoch in epochs:
            if seen.all():
                return
            order = self.first_use(epoch, lanes)
            yield from order[~seen[order]].tolist()
            seen[order] = True

    def _lane_parts(self, epoch: int, lane: int) -> list[NDArray[np.int64]]:
        """The lane's part of the permuted sequence, one array of sample ids per chunk."""
        order, ends = _permuted_chunks(self, epoch)
        start, stop = self.lane_bounds()[lane : lane + 2]
        parts = []
        position = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            chunk, end = int(order[position]), int(ends[position])
            samples = self._chunk_samples(epoch, chunk)
            offset = int(start) - (end - len(samples))
            parts.append(samples[offset : offset + int(min(stop, end) - start)])
            start, position = min(stop, end), position + 1
        return parts

    def _chunk_samples(self, epoch: int, chunk: int) -> NDArray[np.int64]:
        size = int(self.chunk_sizes[chunk])
        key = mix_key(self.seed, epoch, _SAMPLES, chunk)
        samples: NDArray[np.int64] = permutation(key, size) + self.chunk_starts[chunk]
        return samples


@lru_cache(maxsize=4)
def _permuted_chunks(plan: Plan, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The epoch's chunk order and where each chunk ends in the sample sequence; shapes (num_chunks,)."""
    order = permutation(mix_key(plan.seed, epoch, _CHUNKS), len(plan.chunk_sizes))
    return order, np.cumsum(plan.chunk_sizes[order])
