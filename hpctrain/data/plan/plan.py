"""The class `Plan`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.permutation import mix_key, permutation
from hpctrain.data.plan.balance import ByClass
from hpctrain.data.plan.orders import ChunkOrder, GlobalOrder, NodeLocalOrder
from hpctrain.data.plan.runs import WINDOWS, Pieces, Table, chunk_entries, offsets_of
from hpctrain.data.plan.weighted import Weighted
from hpctrain.errors import DataError


class _Deal(Protocol):
    """A way of dealing an epoch to lanes."""

    def lane_pieces(self, epoch: int, lane: int) -> Pieces: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The order of a run.

    Every sample comes exactly once in an epoch, unless `weights` are given.

    Attributes:
        chunk_sizes: samples in each chunk of the set, in file order; int64, shape (num_chunks,), each at least 1.
        num_lanes: logical workers.
        lane_batch: samples per lane and step.
        seed: seed of the order.
        window_chunks: shuffle window of a lane, in chunks.
        order: "global": the epoch's permuted chunks are cut into lanes anew; "node_local": each lane keeps its own
            chunks for the whole run (see `plan.orders.NodeLocalOrder`).
        exchange: share of a lane's chunks that change places in each epoch but the first, 0 .. 1; only "node_local".
        labels: class of each sample; integers, shape (num_samples,). Given, every lane gets its share of every class
            within one sample, at the cost of chunks shared by lanes (see `plan.balance`).
        weights: sampling weights; shape (num_samples,). Given, an epoch is that many draws with replacement, *not*
            every sample once (see `plan.weighted`).

    Raises:
        DataError: labels or weights that do not fit the set, or cannot be used.
        ValueError: any other value out of its bounds, or weights together with labels or "node_local".
    """

    chunk_sizes: NDArray[np.int64]
    num_lanes: int
    lane_batch: int
    seed: int
    window_chunks: int
    order: str = "global"
    exchange: float = 0.1
    labels: NDArray[np.integer] | None = None
    weights: NDArray[np.floating] | None = None

    def __post_init__(self) -> None:
        for name in ("num_lanes", "lane_batch", "window_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: at least 1 is needed")
        if len(self.chunk_sizes) == 0 or int(self.chunk_sizes.min()) < 1:
            raise ValueError("the chunk table is empty or holds a chunk without samples: nothing to plan")
        if self.order not in ("global", "node_local"):
            raise ValueError(f'order = "{self.order}": "global" or "node_local" is needed')
        if not 0 <= self.exchange <= 1:
            raise ValueError(f"exchange = {self.exchange}: a share between 0 and 1 is needed")
        if self.weights is not None and (self.labels is not None or self.order != "global"):
            raise ValueError('weights draw from the whole set: they need order = "global" and no labels')
        _check_labels(self.labels, self.num_samples)
        _check_weights(self.weights, self.num_samples)

    @cached_property
    def chunk_starts(self) -> NDArray[np.int64]:
        """Id of the first sample of each chunk, and the number of samples; shape (num_chunks + 1,)."""
        return offsets_of(self.chunk_sizes)

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
        evenly as it goes and makes the last, short step. So lanes differ by at most one sample, the first being
        larger.
        """
        full_steps, remainder = divmod(self.num_samples, self.global_batch)
        share, extra = divmod(remainder, self.num_lanes)
        sizes = np.full(self.num_lanes, full_steps * self.lane_batch + share, dtype=np.int64)
        sizes[:extra] += 1
        return offsets_of(sizes)

    def lane_samples(self, epoch: int, lane: int) -> NDArray[np.int64]:
        """Ids of the samples that `lane` sees in `epoch`, in order; shape (samples of the lane,)."""
        samples, lengths = self._deal.lane_pieces(epoch, lane)
        ends = offsets_of(lengths)
        cuts = [*ends[: -1 : self.window_chunks].tolist(), len(samples)]
        windows = []
        for window, (start, stop) in enumerate(itertools.pairwise(cuts)):
            key = mix_key(self.seed, epoch, WINDOWS, lane, window)
            windows.append(samples[start:stop][permutation(key, stop - start)])
        return np.concatenate(windows) if windows else samples

    def lane_batches(self, epoch: int, lane: int) -> list[NDArray[np.int64]]:
        """`lane_samples` cut into the micro-batches of steps 0 .. steps_per_epoch - 1; the last may be empty."""
        samples = self.lane_samples(epoch, lane)
        cuts = range(0, self.steps_per_epoch * self.lane_batch, self.lane_batch)
        return [samples[cut : cut + self.lane_batch] for cut in cuts]

    def chunk_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The chunk that holds each sample; same shape."""
        return np.searchsorted(self.chunk_starts, samples, side="right").astype(np.int64) - 1

    def first_steps(self, epoch: int, lanes: Sequence[int], from_step: int = 0) -> NDArray[np.int64]:
        """The step within `epoch`, from `from_step` on, at which `lanes` first use each chunk; shape (num_chunks,).

        `steps_per_epoch` for a chunk that they do not use.
        """
        found = np.full(len(self.chunk_sizes), self.steps_per_epoch, np.int64)
        for lane in lanes:
            chunks = self.chunk_of(self.lane_samples(epoch, lane)[from_step * self.lane_batch :])
            of_lane = np.full_like(found, self.steps_per_epoch)
            steps = from_step + np.arange(len(chunks)) // self.lane_batch
            of_lane[chunks[::-1]] = steps[::-1]  # of several the last one stays: the earliest
            np.minimum(found, of_lane, out=found)
        return found

    @cached_property
    def _deal(self) -> _Deal:
        table = Table(self.seed, self.chunk_sizes, self.lane_bounds())
        if self.weights is not None:
            return Weighted(table, self.weights.astype(np.float64))
        order = GlobalOrder(table) if self.order == "global" else NodeLocalOrder(table, self.exchange)
        return _BySamples(table, order) if self.labels is None else ByClass(table, order, self.labels)


@dataclasses.dataclass(frozen=True, eq=False)
class _BySamples:
    """Cuts the epoch's sequence by sample count."""

    table: Table
    order: ChunkOrder

    def lane_pieces(self, epoch: int, lane: int) -> Pieces:
        runs = self.order.runs(epoch, lane)
        pieces = Pieces(chunk_entries(self.table.seed, epoch, runs, self.table.starts), runs.lengths)
        return pieces.arranged(self.order.arrangement(epoch, lane, len(runs.groups)))


def _check_labels(labels: NDArray[np.integer] | None, num_samples: int) -> None:
    if labels is None:
        return
    if labels.shape != (num_samples,):
        raise DataError(f"labels of shape {labels.shape} for {num_samples} samples: one a sample is needed")
    if labels.dtype.kind not in "iu":
        raise DataError(f"labels of type {labels.dtype}: classes to balance are integers")


def _check_weights(weights: NDArray[np.floating] | None, num_samples: int) -> None:
    if weights is None:
        return
    if weights.shape != (num_samples,):
        raise DataError(f"weights of shape {weights.shape} for {num_samples} samples: one a sample is needed")
    if weights.dtype.kind not in "fiub":
        raise DataError(f"weights of type {weights.dtype}: numbers are needed")
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(bad):
        one = f"weight {weights[bad[0]]} of sample {bad[0]}"
        raise DataError(f"{one} ({len(bad)} such of {num_samples}): finite and at least 0 is needed")
    if not weights.any():
        raise DataError(f"the weights of all {num_samples} samples are 0: nothing can be drawn")
