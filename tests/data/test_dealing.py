"""Lanes moved between ranks at step boundaries: nothing is lost, repeated or reordered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.comm.world import deal_lanes
from hpctrain.data.dealing import Dealing, Move
from hpctrain.data.plan import Plan
from hpctrain.errors import UsageError


@st.composite
def dealings(draw: st.DrawFn) -> Dealing:
    """Lanes dealt evenly, then moved as often as it goes."""
    num_lanes = draw(st.integers(1, 8))
    num_ranks = draw(st.integers(1, num_lanes))
    dealing, step = Dealing(deal_lanes(num_lanes, num_ranks)), 0
    for _ in range(draw(st.integers(0, 6))):
        step += draw(st.integers(0, 4))
        lane = draw(st.integers(0, num_lanes - 1))
        giver = dealing.ranks(step)[lane]
        if len(dealing.lanes(giver, step)) > 1:
            dealing = dealing.move(lane, draw(st.integers(0, num_ranks - 1)), step)
    return dealing


@settings(max_examples=40)
@given(dealings(), st.integers(1, 3), st.sampled_from(["global", "node_local"]))
def test_the_ranks_together_see_the_steps_of_the_plan(dealing: Dealing, batch: int, order: str) -> None:
    plan = Plan(np.full(9, 7), dealing.num_lanes, batch, 3, 2, order=order)
    planned = [[plan.lane_batches(epoch, lane) for lane in range(plan.num_lanes)] for epoch in range(2)]
    seen: dict[int, list[np.ndarray]] = {lane: [] for lane in range(plan.num_lanes)}
    for step in range(2 * plan.steps_per_epoch):
        epoch, at = divmod(step, plan.steps_per_epoch)
        on_ranks = [lane for rank in range(dealing.num_ranks) for lane in dealing.lanes(rank, step)]
        assert sorted(on_ranks) == list(range(plan.num_lanes)), "each lane on exactly one rank"
        for lane in on_ranks:
            seen[lane].append(planned[epoch][lane][at])
    for lane, batches in seen.items():
        expected = [plan.lane_samples(epoch, lane) for epoch in range(2)]
        assert np.array_equal(np.concatenate(batches), np.concatenate(expected)), "in the order of the lane"


@settings(max_examples=40)
@given(dealings(), st.integers(0, 20))
def test_between_changes_nothing_changes(dealing: Dealing, step: int) -> None:
    change = dealing.next_change(step)
    same = range(step, step + 10 if change is None else change)
    assert all(dealing.ranks(at) == dealing.ranks(step) for at in same)
    assert change is None or dealing.ranks(change) != dealing.ranks(step)


@settings(max_examples=40)
@given(dealings())
def test_no_rank_is_ever_without_a_lane(dealing: Dealing) -> None:
    for step in range(30):
        assert all(dealing.lanes(rank, step) for rank in range(dealing.num_ranks))


def test_a_move_holds_from_its_step_on() -> None:
    start = Dealing(deal_lanes(4, 2))
    moved = start.move(1, 1, at_step=10)
    assert [moved.lanes(rank, 9) for rank in (0, 1)] == [(0, 1), (2, 3)]
    assert [moved.lanes(rank, 10) for rank in (0, 1)] == [(0,), (1, 2, 3)]
    assert (moved.next_change(0), moved.next_change(10)) == (10, None)
    assert start.lanes(0, 10) == (0, 1), "the one it was made from is as it was"
    assert moved.moves == (Move(1, 1, 10),)
    assert Dealing(moved.initial, moved.moves).ranks(10) == moved.ranks(10), "made again of what is recorded"


def test_moves_at_one_step_take_effect_together() -> None:
    moved = Dealing(deal_lanes(4, 2)).move(1, 1, 3).move(2, 0, 3)
    assert [moved.lanes(rank, 3) for rank in (0, 1)] == [(0, 2), (1, 3)]
    there_and_back = Dealing(deal_lanes(4, 2)).move(1, 1, 3).move(1, 0, 3)
    assert there_and_back.next_change(0) is None


@pytest.mark.parametrize(
    ("lane", "rank", "step", "named"),
    [
        (4, 0, 9, "4 lanes and 2 ranks"),
        (-1, 0, 9, "4 lanes"),
        (0, 2, 9, "2 ranks"),
        (0, 1, 4, "up to step 5"),
        (0, 1, 9, "rank 0 would have no lane left"),
    ],
)
def test_moves_that_cannot_be_are_refused(lane: int, rank: int, step: int, named: str) -> None:
    dealing = Dealing(deal_lanes(4, 2)).move(1, 1, 5)
    with pytest.raises(UsageError, match=named):
        dealing.move(lane, rank, step)


@pytest.mark.parametrize("lanes", [[[0, 1], [1, 2]], [[0], [2]], [[0, 1], []]])
def test_lanes_on_no_rank_or_two_are_refused(lanes: list[list[int]]) -> None:
    with pytest.raises(UsageError, match="must occur once"):
        Dealing(lanes)
