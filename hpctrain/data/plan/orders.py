"""Which chunk comes when: the epoch's sequence of chunks, and what of it each lane gets.

`GlobalOrder` permutes the chunks anew in every epoch. `NodeLocalOrder` permutes them once: where a lane's stretch of
that sequence lies is the home of its chunks, and a stated share of them is exchanged for the time of an epoch. Both
are closed forms: no epoch needs the ones before it.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.permutation import mix_key, permutation, random_words
from hpctrain.data.plan.runs import (
    ARRANGE,
    CHUNKS,
    EXCHANGE,
    HOME,
    SWAP,
    Ints,
    Runs,
    Sequence,
    Table,
    offsets_of,
)


class ChunkOrder(Protocol):
    """The epoch's chunks, in order and cut into lanes."""

    def chunk_order(self, epoch: int) -> Ints:
        """The chunks of the epoch's sequence; shape (num_chunks,)."""

    def runs(self, epoch: int, lane: int) -> Runs:
        """The lane's parts of chunks, in order, cut by sample count; a chunk occurs once."""

    def arrangement(self, epoch: int, lane: int, count: int) -> Ints:
        """The order in which the lane sees the `count` chunks it got; shape (count,)."""


@dataclasses.dataclass(frozen=True, eq=False)
class GlobalOrder:
    """Chunks permuted in every epoch; a lane sees its own in the order of the sequence."""

    table: Table

    def chunk_order(self, epoch: int) -> Ints:
        """See `ChunkOrder`."""
        return permutation(mix_key(self.table.seed, epoch, CHUNKS), len(self.table.sizes))

    def runs(self, epoch: int, lane: int) -> Runs:
        """See `ChunkOrder`."""
        bounds = self.table.bounds
        return _global_sequence(self, epoch).cut(bounds[lane : lane + 1], bounds[lane + 1 : lane + 2])

    def arrangement(self, epoch: int, lane: int, count: int) -> Ints:
        """See `ChunkOrder`."""
        return np.arange(count)


@lru_cache(maxsize=4)
def _global_sequence(order: GlobalOrder, epoch: int) -> Sequence:
    return Sequence(order.chunk_order(epoch), order.table.sizes)


@dataclasses.dataclass(frozen=True, eq=False)
class NodeLocalOrder:
    """Each lane keeps its own chunks for the whole run; `exchange` of them change places in an epoch.

    In every epoch but the first, `exchange` of a lane's chunks (right on average, and within one chunk) are drawn and
    permuted among the places of all chunks drawn; the next epoch starts from home again. So a lane reads a share of
    1 - exchange of its chunks in every epoch, and visitors, which differ from epoch to epoch, in place of the others
    (by chance one in num_lanes of the drawn comes back to its lane). With 0 a lane's chunks never change; with 1 the
    sequence is as random as the global one.

    A chunk that was not drawn and is not cut by a lane's bound stays with its lane whole, also where chunks differ in
    size: only the others, the pool, are cut anew by the room that each lane has left. So at most `num_lanes - 1` chunks
    are shared.

    What is lost: two samples of one lane stay together, up to the exchange, for the whole run.
    """

    table: Table
    exchange: float

    def chunk_order(self, epoch: int) -> Ints:
        """See `ChunkOrder`."""
        return self._swapped(epoch, self._drawn(epoch))

    def runs(self, epoch: int, lane: int) -> Runs:
        """See `ChunkOrder`."""
        parts = _node_local_epoch(self, epoch)
        kept = parts.kept[slice(*np.searchsorted(parts.kept_lanes, [lane, lane + 1]))]
        pool = parts.pool.cut(parts.room[lane : lane + 1], parts.room[lane + 1 : lane + 2])
        return Runs(
            np.concatenate((kept, pool.groups)),
            np.concatenate((np.zeros_like(kept), pool.offsets)),
            np.concatenate((self.table.sizes[kept], pool.lengths)),
        )

    def arrangement(self, epoch: int, lane: int, count: int) -> Ints:
        """See `ChunkOrder`."""
        return permutation(mix_key(self.table.seed, epoch, ARRANGE, lane), count)

    @cached_property
    def home(self) -> Ints:
        """The sequence of chunks whose stretches are the lanes' own; shape (num_chunks,)."""
        return permutation(mix_key(self.table.seed, HOME), len(self.table.sizes))

    @cached_property
    def _lanes(self) -> Ints:
        """The lane in whose stretch each place of `home` begins, ascending; shape (num_chunks,)."""
        begins = offsets_of(self.table.sizes[self.home])[:-1]
        return np.searchsorted(self.table.bounds[1:], begins, side="right")

    @cached_property
    def _whole(self) -> NDArray[np.bool_]:
        """Whether the chunk at each place of `home` ends in the same lane; shape (num_chunks,)."""
        ends = np.cumsum(self.table.sizes[self.home])
        whole: NDArray[np.bool_] = ends <= self.table.bounds[self._lanes + 1]
        return whole

    def _drawn(self, epoch: int) -> NDArray[np.bool_]:
        """Which places of `home` take part in the exchange; shape (num_chunks,)."""
        num_chunks, num_lanes = len(self.table.sizes), len(self.table.bounds) - 1
        if epoch == 0 or self.exchange == 0:
            return np.zeros(num_chunks, dtype=bool)
        words = random_words(mix_key(self.table.seed, epoch, EXCHANGE), 1 + num_chunks)
        starts = np.searchsorted(self._lanes, np.arange(num_lanes + 1))
        # A fraction of a chunk is rounded at random, or a lane of few chunks would never exchange any, and for all
        # lanes alike, so that a lane that gives one finds another that does.
        share = np.floor(self.exchange * np.diff(starts) + (words[0] >> np.uint64(11)) * 2.0**-53)
        by_lane = np.lexsort((words[1:], self._lanes))
        drawn = np.zeros(num_chunks, dtype=bool)
        drawn[by_lane] = np.arange(num_chunks) - starts[self._lanes] < share[self._lanes]
        return drawn

    def _swapped(self, epoch: int, drawn: NDArray[np.bool_]) -> Ints:
        """`home` with the chunks at the places `drawn` permuted among these places; shape (num_chunks,)."""
        places = np.flatnonzero(drawn)
        order = self.home.copy()
        order[places] = order[places[permutation(mix_key(self.table.seed, epoch, SWAP), len(places))]]
        return order


class _NodeLocalEpoch(NamedTuple):
    """Chunks that stay with their lanes, lane after lane, and the pool, of which lane i gets room[i] .. room[i + 1]."""

    kept: Ints
    kept_lanes: Ints
    pool: Sequence
    room: Ints


@lru_cache(maxsize=4)
def _node_local_epoch(order: NodeLocalOrder, epoch: int) -> _NodeLocalEpoch:
    sizes, bounds = order.table.sizes, order.table.bounds
    drawn = order._drawn(epoch)
    stays = order._whole & ~drawn
    kept, lanes = order.home[stays], order._lanes[stays]
    kept_samples = np.bincount(lanes, weights=sizes[kept], minlength=len(bounds) - 1).astype(np.int64)
    pool = Sequence(order._swapped(epoch, drawn)[~stays], sizes)
    return _NodeLocalEpoch(kept, lanes, pool, offsets_of(np.diff(bounds) - kept_samples))
