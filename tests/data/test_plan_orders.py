"""`order = "node_local"`: lanes keep their chunks and exchange a stated share of them. (That every sample comes once,
in full steps, from at most num_lanes - 1 shared chunks, is tested for all orders in `test_plan`.)
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpctrain.data.plan import Plan

sizes_of_chunks = st.lists(st.integers(1, 13), min_size=1, max_size=60).map(
    lambda sizes: np.array(sizes, np.int64)
)
epochs = st.integers(1, 1000)


def node_local(sizes: np.ndarray, lanes: int, exchange: float, seed: int = 5) -> Plan:
    return Plan(sizes, lanes, 3, seed, 4, order="node_local", exchange=exchange)


def chunks_of(plan: Plan, epoch: int, lane: int) -> set[int]:
    return set(plan.chunk_of(plan.lane_samples(epoch, lane)).tolist())


def whole_chunks_of(plan: Plan, epoch: int, lane: int) -> set[int]:
    chunks, counts = np.unique(plan.chunk_of(plan.lane_samples(epoch, lane)), return_counts=True)
    return set(chunks[counts == plan.chunk_sizes[chunks]].tolist())


@settings(max_examples=40)
@given(sizes_of_chunks, st.integers(1, 12), epochs)
def test_without_exchange_a_lane_has_the_same_chunks_in_every_epoch(
    sizes: np.ndarray, lanes: int, epoch: int
) -> None:
    plan = node_local(sizes, lanes, 0)
    for lane in range(lanes):
        assert chunks_of(plan, 0, lane) == chunks_of(plan, epoch, lane)
        assert whole_chunks_of(plan, 0, lane) == whole_chunks_of(plan, epoch, lane)


@settings(max_examples=40)
@given(sizes_of_chunks, st.integers(1, 12), st.floats(0, 1), epochs)
# Lanes of a few large chunks give up fewer than lanes of many small ones.
@example(np.array([60] * 10 + [2] * 300), 8, 0.2, 3)
def test_a_lane_keeps_all_but_the_exchanged_share(
    sizes: np.ndarray, lanes: int, exchange: float, epoch: int
) -> None:
    """Whole, also where chunks differ in size. Its own are those that it has alone in the first epoch, and at most one
    more, cut by its end, counts for the share.
    """
    plan = node_local(sizes, lanes, exchange)
    for lane in range(lanes):
        own = whole_chunks_of(plan, 0, lane)
        lost = own - whole_chunks_of(plan, epoch, lane)
        assert len(lost) <= exchange * (len(own) + 1) + 1


def test_the_exchanged_share_is_right_on_average() -> None:
    """30 lanes x 15 epochs of 8 chunks, an eighth exchanged, of which 1 in 30 returns by chance: 0.97 visitors."""
    plan = node_local(np.full(240, 3), 30, 0.125)
    visitors = [
        len(chunks_of(plan, e, lane) - chunks_of(plan, 0, lane)) for e in range(1, 16) for lane in range(30)
    ]
    assert set(visitors) <= {0, 1}
    assert 0.94 < np.mean(visitors) < 0.99


def test_a_share_of_less_than_a_chunk_is_exchanged_now_and_then() -> None:
    """In 3 of 10 epochs one chunk of each lane, of which 1 in 4 returns by chance: 53 visitors in 59 epochs."""
    plan = node_local(np.full(12, 3), 4, 0.1)
    visited = [
        chunks_of(plan, epoch, lane) - chunks_of(plan, 0, lane) for epoch in range(60) for lane in range(4)
    ]
    assert 25 < sum(map(len, visited)) < 85


def test_visitors_differ_from_epoch_to_epoch() -> None:
    plan = node_local(np.full(200, 2), 2, 0.5)
    visitors = [frozenset(chunks_of(plan, epoch, 0) - chunks_of(plan, 0, 0)) for epoch in range(1, 6)]
    assert len(set(visitors)) == 5


def test_exchanged_whole_it_mixes_like_the_global_order() -> None:
    """How many chunks a lane has again in the next epoch: a quarter of its 50, sigma 2.7 for each of 160 values."""
    both = {}
    for order in ("global", "node_local"):
        plan = Plan(np.full(200, 2), 4, 3, 1, 8, order=order, exchange=1.0)
        again = [
            len(chunks_of(plan, epoch, lane) & chunks_of(plan, epoch + 1, lane))
            for epoch in range(40)
            for lane in range(4)
        ]
        both[order] = np.mean(again)
    assert both["global"] == pytest.approx(12.5, abs=0.8)
    assert both["node_local"] == pytest.approx(12.5, abs=0.8)


def test_a_lane_sees_its_chunks_in_another_order_each_epoch() -> None:
    plan = Plan(np.full(40, 2), 2, 2, 1, 1, order="node_local", exchange=0.0)
    first_seen = [plan.chunk_of(plan.lane_samples(epoch, 0))[::2].tolist() for epoch in range(3)]
    assert sorted(first_seen[0]) == sorted(first_seen[1]) == sorted(first_seen[2])
    assert first_seen[0] != first_seen[1] != first_seen[2]


def test_an_epoch_does_not_depend_on_the_ones_before() -> None:
    asked = node_local(np.full(50, 4), 3, 0.3)
    for epoch in range(9):
        asked.lane_samples(epoch, 0)
    assert np.array_equal(asked.lane_samples(9, 1), node_local(np.full(50, 4), 3, 0.3).lane_samples(9, 1))


def test_golden_order() -> None:
    """The order is versioned: these values may only change together with PLAN_VERSION."""
    plan = Plan(np.array([3, 4, 2, 5, 3, 4]), 2, 3, 11, 2, order="node_local", exchange=0.5)
    assert [plan.lane_samples(epoch, lane).tolist() for epoch in (0, 5) for lane in (0, 1)] == GOLDEN


GOLDEN = [
    [20, 16, 19, 15, 17, 14, 12, 10, 13, 9, 11],
    [7, 8, 18, 3, 0, 2, 5, 1, 4, 6],
    [13, 12, 11, 16, 9, 15, 10, 14, 18, 17, 19],
    [3, 6, 5, 20, 4, 7, 2, 8, 0, 1],
]
