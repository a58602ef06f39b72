"""Runs: parts of groups of samples (a group is a chunk, or the samples of one class in a chunk), as flat arrays.

An epoch is a sequence of groups laid end to end; a lane is an interval of it. What the lane holds of a group is a run:
the entries `offset .. offset + length` of the group in the epoch's random order of the group's entries. Groups are
never stored permuted: a lane permutes those that it touches, all at once.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.permutation import mix_keys, words_at

Ints = NDArray[np.int64]

# Streams of random numbers. A number is for ever: another one is another order.
CHUNKS, SAMPLES, WINDOWS, HOME, EXCHANGE, SWAP, ARRANGE, DRAWS = range(1, 9)


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """What every way of dealing starts from.

    Attributes:
        seed: seed of the order.
        sizes: samples in each chunk, in file order; shape (num_chunks,).
        bounds: lane i gets as many samples as lie in [bounds[i], bounds[i + 1]); shape (num_lanes + 1,).
    """

    seed: int
    sizes: Ints
    bounds: Ints

    @cached_property
    def starts(self) -> Ints:
        """Id of the first sample of each chunk, and the number of samples; shape (num_chunks + 1,)."""
        return offsets_of(self.sizes)


class Pieces(NamedTuple):
    """What a lane sees, before its window shuffle.

    Attributes:
        samples: sample ids, chunk after chunk; shape (samples of the lane,).
        lengths: how many of them each chunk holds; shape (chunks of the lane,).
    """

    samples: Ints
    lengths: Ints

    def arranged(self, index: Ints) -> Pieces:
        """The chunks in another order: `index[i]` is the place at which the new i-th stood."""
        starts, lengths = offsets_of(self.lengths)[:-1][index], self.lengths[index]
        return Pieces(self.samples[expand(starts, lengths)], lengths)


class Runs(NamedTuple):
    """Parts of groups: entries `offsets .. offsets + lengths` of `groups`; each of shape (num_runs,)."""

    groups: Ints
    offsets: Ints
    lengths: Ints


class Sequence:
    """Groups laid end to end: `order[i]` is the i-th, `sizes[order[i]]` its number of entries."""

    def __init__(self, order: Ints, sizes: NDArray[np.integer]) -> None:
        self._order = order
        self._ends = np.cumsum(sizes[order], dtype=np.int64)

    def cut(self, starts: Ints, stops: Ints) -> Runs:
        """The runs in the intervals [starts[i], stops[i]) of the sequence, interval after interval."""
        first = np.searchsorted(self._ends, starts, side="right")
        last = np.searchsorted(self._ends, stops, side="left")
        counts = np.where(stops > starts, last + 1 - first, 0)
        at = expand(first, counts)
        begins = np.where(at > 0, self._ends[at - 1], 0)
        low = np.maximum(begins, np.repeat(starts, counts))
        high = np.minimum(self._ends[at], np.repeat(stops, counts))
        return Runs(self._order[at], low - begins, high - low)


def offsets_of(lengths: NDArray[np.integer]) -> Ints:
    """Where each of several parts laid end to end starts, and where the last ends; shape (parts + 1,)."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def expand(starts: NDArray[np.integer], lengths: NDArray[np.integer]) -> Ints:
    """`starts[i], starts[i] + 1, ...`, `lengths[i]` of them, for each i in turn; shape (sum of lengths,)."""
    before = offsets_of(lengths)
    return np.repeat(starts - before[:-1], lengths) + np.arange(before[-1])


def chunk_words(seed: int, epoch: int, chunks: Ints, positions: Ints) -> NDArray[np.uint64]:
    """The words by which the epoch orders the entries of a chunk, for pairs of chunk and position; shape (n,)."""
    return words_at(mix_keys((seed, epoch, SAMPLES), chunks), positions)


def chunk_entries(seed: int, epoch: int, runs: Runs, starts: Ints) -> Ints:
    """The entries of runs of whole chunks, chunk i holding the entries starts[i] .. starts[i + 1]."""
    sizes = np.diff(starts)[runs.groups]
    entries = expand(starts[runs.groups], sizes)
    chunks = np.repeat(runs.groups, sizes)
    return entries[permuted(chunk_words(seed, epoch, chunks, entries - starts[chunks]), sizes, runs)]


def permuted(words: NDArray[np.uint64], sizes: Ints, runs: Runs) -> Ints:
    """Each run's part of its group, the group ordered by its words.

    Args:
        words: of the entries of the runs' groups, group after group; shape (sum of sizes,). Within a group all differ.
        sizes: entries of each run's group; shape (num_runs,).
        runs: the parts wanted.

    Returns:
        Positions in `words`, run after run; shape (sum of the runs' lengths,).
    """
    begins = offsets_of(sizes)[:-1]
    order = np.empty(len(words), dtype=np.int64)
    # Groups of one size are the rows of a matrix: far faster than a sort of everything by (group, word), and the
    # distinct sizes are few: one or two where chunks are cut by number of samples, never more than sqrt(2 * entries).
    for size in np.unique(sizes):
        entries = begins[sizes == size][:, None] + np.arange(size)
        order[entries] = np.take_along_axis(entries, np.argsort(words[entries], axis=1), axis=1)
    return order[expand(begins + runs.offsets, runs.lengths)]
