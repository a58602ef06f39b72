"""Who keeps what."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.staging.owners import NEVER, Deal, bids

steps = st.one_of(st.integers(0, 50), st.just(NEVER))


@st.composite
def nodes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """First steps and presence, shape (nodes, slots)."""
    num_nodes, num_slots = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    count = num_nodes * num_slots
    first = draw(st.lists(steps, min_size=count, max_size=count))
    present = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    shape = (num_nodes, num_slots)
    return np.array(first, np.int64).reshape(shape), np.array(present).reshape(shape)


def deal_of(first: np.ndarray, present: np.ndarray, replicas: int) -> Deal:
    offers = np.min([bids(first[node], present[node], node) for node in range(len(first))], axis=0)
    return Deal.of(offers, first.min(axis=0), len(first), replicas)


@given(nodes(), st.integers(1, 4))
def test_every_chunk_has_one_owner_the_nearest_one(
    given: tuple[np.ndarray, np.ndarray], replicas: int
) -> None:
    first, present = given
    deal = deal_of(first, present, replicas)
    for slot, owner in enumerate(deal.owners.tolist()):
        having = np.flatnonzero(present[:, slot])
        if len(having):
            assert owner in having, "a node that has the chunk owns it"
            assert first[owner, slot] == first[having, slot].min()
        elif first[:, slot].min() < NEVER:
            assert first[owner, slot] == first[:, slot].min(), "the node that uses it first owns it"
        else:
            assert 0 <= owner < len(first)


@given(nodes(), st.integers(1, 4))
def test_each_chunk_is_kept_by_as_many_nodes_as_asked_for(
    given: tuple[np.ndarray, np.ndarray], replicas: int
) -> None:
    deal = deal_of(*given, replicas)
    num_nodes, num_slots = given[0].shape
    orders = [deal.staging_order(node).tolist() for node in range(num_nodes)]
    for slot in range(num_slots):
        keepers = [node for node in range(num_nodes) if slot in orders[node]]
        assert sorted(keepers) == sorted(deal.holders(slot))
        assert len(keepers) == min(replicas, num_nodes)
    for node, order in enumerate(orders):
        copy = deal.copy_number(node)[order]
        assert (np.diff(copy) >= 0).all(), "what a node owns comes before its copies"
        for number in set(copy.tolist()):
            ordered = deal.first_steps[np.array(order)[copy == number]]
            assert (np.diff(ordered) >= 0).all(), "in the order of first use"


def test_chunks_that_nobody_uses_are_spread() -> None:
    first = np.full((4, 40), NEVER)
    deal = deal_of(first, np.zeros_like(first, bool), 1)
    assert np.bincount(deal.owners, minlength=4).tolist() == [10, 10, 10, 10]
