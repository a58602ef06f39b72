"""Weighted sampling: another promise than "every sample exactly once".

An epoch is as many draws as the set has samples, each independent of the others and with replacement: sample i with
the probability weights[i] / sum(weights). A sample may come many times in an epoch or never; one of weight 0 never
comes. The draws are a function of (seed, epoch) alone.

So that chunks are read once and not once a draw, the draws are laid out by chunk, the chunks in the epoch's permuted
order, and cut into lanes like samples: at most `num_lanes - 1` chunks that were drawn from are shared by two lanes.
What is lost: the repeats of one sample lie within one shuffle window of one lane (of two, where its chunk is shared),
not all over the epoch.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.permutation import mix_key, random_words
from hpctrain.data.plan.orders import GlobalOrder
from hpctrain.data.plan.runs import DRAWS, Ints, Pieces, Sequence, Table, chunk_entries, offsets_of


@dataclasses.dataclass(frozen=True, eq=False)
class Weighted:
    """Deals the draws of an epoch.

    Attributes:
        table: chunks, lanes and seed.
        weights: finite, none below 0, not all 0; float64, shape (num_samples,).
    """

    table: Table
    weights: NDArray[np.float64]

    def lane_pieces(self, epoch: int, lane: int) -> Pieces:
        """What the lane sees, chunk after chunk."""
        draws, bounds = _draws(self, epoch), self.table.bounds
        runs = draws.sequence.cut(bounds[lane : lane + 1], bounds[lane + 1 : lane + 2])
        values = draws.values[chunk_entries(self.table.seed, epoch, runs, draws.starts)]
        return Pieces(np.searchsorted(self.cumulative, values, side="right"), runs.lengths)

    @cached_property
    def cumulative(self) -> NDArray[np.float64]:
        """Weights of the samples up to each one, itself included; shape (num_samples,)."""
        # Scaled, so that neither the smallest nor the largest floats get lost in the products below. Unlike a sum, a
        # cumulative sum has one order, and the same bits on every machine.
        return np.cumsum(self.weights / self.weights.max())


class _Draws(NamedTuple):
    """The epoch's draws as ascending values below the total weight; those of chunk i are starts[i] .. starts[i + 1]."""

    values: NDArray[np.float64]
    starts: Ints
    sequence: Sequence


@lru_cache(maxsize=2)
def _draws(deal: Weighted, epoch: int) -> _Draws:
    table, cumulative = deal.table, deal.cumulative
    words = np.sort(random_words(mix_key(table.seed, epoch, DRAWS), len(cumulative)))
    values = (words >> np.uint64(11)) * (2.0**-53 * cumulative[-1])  # 53 bits: also rounded below the total
    counts = np.diff(np.searchsorted(values, cumulative[table.starts[1:] - 1]), prepend=0)
    order = GlobalOrder(table).chunk_order(epoch)
    return _Draws(values, offsets_of(counts), Sequence(order[counts[order] > 0], counts))
