"""Class-balanced dealing: every lane's share of every class is the whole set's, within one sample.

How many: lanes' sizes differ by at most one (`Plan.lane_bounds`), so that lanes are of two kinds. The samples of each
class are first divided between the kinds, then within a kind dealt to its lanes like cards, class after class. Both
divisions round the exact share down or up: for the kinds it is a difference of two rounded cumulative shares, and
dealing cards gives each lane the same number or one more. Two roundings in a row still end at the floor or the ceiling
of the exact share, because a kind's number lies between (lanes of the kind) x floor and x ceiling of it. (That such a
table exists for any sizes is the theorem of controlled rounding: Bacharach, "Matrix rounding problems", 1966.)

Which: the samples of a class, in the order of the epoch's sequence of chunks, are cut into the lanes' stretches. So a
lane holds, class by class, neighbouring parts of the sequence, and shares chunks with few other lanes. The odd lanes
see their chunks backwards: what two neighbours share, both use at the end, or both at the beginning, of an epoch.

What it costs: a chunk is read by each lane that holds a sample of it. Where every chunk holds one class (a file sorted
by class) at most num_classes x (num_lanes - 1) reads are added. Where classes are mixed, the cuts of a class of n
samples lie up to some num_chunks / (2 sqrt(n)) chunks from those of the others, and the chunks between are shared:
12 % more reads for 10 classes of 5,000 samples in 8 lanes, but 4.5 reads of each chunk for 1,000 classes of 1,300
samples in 64 lanes (100 samples a chunk). Many rare classes in a shuffled file cost most and gain least: chance
balances them nearly as well. `hpctrain.data.mixing` gives the number for a plan.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.plan.orders import ChunkOrder
from hpctrain.data.plan.runs import (
    Ints,
    Pieces,
    Runs,
    Sequence,
    Table,
    chunk_words,
    expand,
    offsets_of,
    permuted,
)


@dataclasses.dataclass(frozen=True, eq=False)
class ByClass:
    """Deals each class of samples for itself.

    Attributes:
        table: chunks, lanes and seed.
        order: the epoch's sequence of chunks.
        labels: one integer a sample, each value a class, also one that stands for "none"; shape (num_samples,).
    """

    table: Table
    order: ChunkOrder
    labels: NDArray[np.integer]

    def lane_pieces(self, epoch: int, lane: int) -> Pieces:
        """What the lane sees, chunk after chunk."""
        groups = self._groups
        in_epoch = _class_epoch(self, epoch)
        starts, stops = (groups.class_starts + self._before(end) for end in (lane, lane + 1))
        runs = in_epoch.sequence.cut(starts, stops)
        samples, chunks = self._samples(epoch, runs)
        place = in_epoch.place[chunks]
        by_chunk = np.lexsort((self._words(epoch, samples, chunks), place))
        lengths = np.unique(place, return_counts=True)[1]
        pieces = Pieces(samples[by_chunk], lengths)
        arrangement = self.order.arrangement(epoch, lane, len(lengths))
        return pieces.arranged(arrangement[::-1] if lane % 2 else arrangement)

    def _samples(self, epoch: int, runs: Runs) -> tuple[Ints, Ints]:
        """The samples of the runs, and the chunk of each."""
        groups = self._groups
        sizes = groups.sizes[runs.groups].astype(np.int64)
        samples = groups.samples[expand(groups.starts[runs.groups], sizes)].astype(np.int64)
        chunks = np.repeat(groups.chunks[runs.groups], sizes).astype(np.int64)
        taken = permuted(self._words(epoch, samples, chunks), sizes, runs)
        return samples[taken], chunks[taken]

    def _words(self, epoch: int, samples: Ints, chunks: Ints) -> NDArray[np.uint64]:
        return chunk_words(self.table.seed, epoch, chunks, samples - self.table.starts[chunks])

    def _before(self, lane: int) -> Ints:
        """Samples of each class that go to the lanes before `lane`; shape (num_classes,)."""
        num_lanes, num_samples = len(self.table.bounds) - 1, int(self.table.bounds[-1])
        larger = num_samples % num_lanes  # the first so many lanes hold one sample more
        large, small = (offsets_of(part) for part in self._division(int(self.table.bounds[larger])))
        of_large = _dealt(large, larger, min(lane, larger))
        return of_large + _dealt(small, num_lanes - larger, max(lane - larger, 0))

    def _division(self, total: int) -> tuple[Ints, Ints]:
        """Each class divided between the lanes that hold one sample more, `total` samples, and the others."""
        starts = self._groups.class_starts
        ends = np.append(starts[1:], len(self.labels))
        large = ends * total // len(self.labels) - starts * total // len(self.labels)
        return large, ends - starts - large

    @cached_property
    def _groups(self) -> _Groups:
        _, classes, counts = np.unique(self.labels, return_inverse=True, return_counts=True)
        narrow = np.uint16 if len(counts) <= 2**16 else np.int64  # 16 bits are sorted by radix
        # The arrays here are as long as the set, so that half the bytes count.
        index: type[np.integer] = np.int32 if len(self.labels) < 2**31 else np.int64
        chunks = np.repeat(np.arange(len(self.table.sizes), dtype=index), self.table.sizes)
        by_class = np.argsort(classes.astype(narrow), kind="stable").astype(index)
        samples = by_class[np.argsort(chunks[by_class], kind="stable")]
        classes, chunks = classes.astype(narrow)[samples], chunks[samples]
        new = np.flatnonzero((np.diff(classes, prepend=classes[0]) != 0) | (np.diff(chunks, prepend=-1) != 0))
        sizes = np.diff(np.append(new, len(samples)))
        starts = offsets_of(counts)[:-1]
        return _Groups(samples, new.astype(index), sizes.astype(index), chunks[new], classes[new], starts)


class _Groups(NamedTuple):
    """The samples sorted by (chunk, class): a group is what one chunk holds of one class."""

    samples: NDArray[np.integer]
    starts: NDArray[np.integer]
    sizes: NDArray[np.integer]
    chunks: NDArray[np.integer]
    classes: NDArray[np.integer]
    class_starts: Ints


class _ClassEpoch(NamedTuple):
    """The groups by (class, place of the chunk in the epoch's sequence), and the place of each chunk."""

    sequence: Sequence
    place: Ints


@lru_cache(maxsize=2)
def _class_epoch(deal: ByClass, epoch: int) -> _ClassEpoch:
    groups, order = deal._groups, deal.order.chunk_order(epoch)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    first = np.searchsorted(groups.chunks, np.arange(len(order) + 1))
    by_place = expand(first[order], np.diff(first)[order])
    by_class = by_place[np.argsort(groups.classes[by_place], kind="stable")]
    return _ClassEpoch(Sequence(by_class, groups.sizes), place)


def _dealt(edges: Ints, lanes: int, first: int) -> Ints:
    """Of cards dealt to `lanes` in turn, how many of each class go to the first `first` lanes.

    Args:
        edges: class i holds the cards edges[i] .. edges[i + 1]; shape (num_classes + 1,).
        lanes: lanes dealt to; 0 where there is no card.
        first: the lanes counted, at most `lanes`.
    """
    before = edges // max(lanes, 1) * first + np.minimum(edges % max(lanes, 1), first)
    return np.diff(before)
