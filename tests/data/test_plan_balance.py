"""Class-balanced dealing. (That every sample comes once, in full steps, is tested for all orders in `test_plan`.)"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpctrain.data.plan import Plan

# As (samples of each class) and lanes: any table of shares, also with lanes of no sample and classes of one.
tables = st.tuples(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 14))
orders = st.sampled_from(["global", "node_local"])


def labelled(counts: list[int], shuffled: bool) -> np.ndarray:
    labels = np.repeat(np.arange(len(counts)) * 7 - 1, counts)  # any integers, also a negative one
    return np.random.default_rng(len(labels)).permutation(labels) if shuffled else labels


def chunked(num_samples: int, chunk: int) -> np.ndarray:
    full, rest = divmod(num_samples, chunk)
    return np.array([chunk] * full + [rest] * (rest > 0), dtype=np.int64)


def touches(plan: Plan, epoch: int) -> int:
    """Chunks that lanes use, counted once a lane."""
    return sum(
        len(np.unique(plan.chunk_of(plan.lane_samples(epoch, lane)))) for lane in range(plan.num_lanes)
    )


@settings(max_examples=40)
@given(tables, st.integers(1, 5), st.booleans(), orders, st.integers(0, 9))
# Dealt like cards alone, the second class would miss the lane that holds one more than the others.
@example(([11, 19, 11], 10), 1, False, "global", 0)
def test_class_shares_are_within_one_sample(
    table: tuple[list[int], int], batch: int, shuffled: bool, order: str, epoch: int
) -> None:
    counts, lanes = table
    labels = labelled(counts, shuffled)
    plan = Plan(chunked(len(labels), 7), lanes, batch, 3, 2, order=order, labels=labels)
    for lane in range(lanes):
        of_lane = labels[plan.lane_samples(epoch, lane)]
        for value, count in zip(*np.unique(labels, return_counts=True), strict=True):
            exact = Fraction(int(count) * len(of_lane), len(labels))
            assert abs(int((of_lane == value).sum()) - exact) < 1


@settings(max_examples=40)
@given(tables, st.integers(1, 9), st.integers(0, 9))
def test_a_file_sorted_by_class_adds_at_most_a_read_for_each_cut(
    table: tuple[list[int], int], chunk: int, epoch: int
) -> None:
    counts, lanes = table
    sizes = np.concatenate([chunked(count, chunk) for count in counts])  # no chunk holds two classes
    plan = Plan(sizes, lanes, 4, 3, 2, labels=labelled(counts, shuffled=False))
    assert touches(plan, epoch) - len(sizes) <= len(counts) * (lanes - 1)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 13), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 99))
def test_one_class_is_dealt_as_without_balance(sizes: list[int], lanes: int, epoch: int) -> None:
    """Chunk for chunk; the odd lanes see theirs backwards."""
    plain = Plan(np.array(sizes), lanes, 3, 5, 1)
    balanced = Plan(np.array(sizes), lanes, 3, 5, 1, labels=np.zeros(sum(sizes), np.int64))
    for lane in range(lanes):
        expected, found = plain.lane_samples(epoch, lane), balanced.lane_samples(epoch, lane)
        assert np.array_equal(np.sort(expected), np.sort(found))
        chunks = plain.chunk_of(expected)
        assert np.array_equal(plain.chunk_of(found), chunks[::-1] if lane % 2 else chunks)


@pytest.mark.parametrize("order", ["global", "node_local"])
def test_few_chunks_are_shared_where_classes_are_few(order: str) -> None:
    """10 classes of about 2,000 samples in 625 chunks and 8 lanes: the cuts of a class stray by 7 chunks at most."""
    labels = np.random.default_rng(0).integers(0, 10, 20_000)
    plan = Plan(chunked(20_000, 32), 8, 32, 3, 16, order=order, labels=labels)
    assert touches(plan, 1) < 1.3 * 625


def test_neighbouring_lanes_use_what_they_share_at_the_same_time() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 20_000)
    plan = Plan(chunked(20_000, 32), 8, 32, 3, 1, labels=labels)
    for lane in range(7):
        near, far = (plan.chunk_of(plan.lane_samples(1, at)) for at in (lane, lane + 1))
        shared = np.intersect1d(near, far)
        assert len(shared) > 3
        distance = [
            np.argmax(near == chunk) / len(near) - np.argmax(far == chunk) / len(far) for chunk in shared
        ]
        assert np.abs(distance).max() < 0.3


def test_without_exchange_a_lane_keeps_its_chunks() -> None:
    labels = np.random.default_rng(0).integers(0, 4, 600)
    plan = Plan(chunked(600, 8), 3, 8, 3, 4, order="node_local", exchange=0.0, labels=labels)
    for lane in range(3):
        chunks = [np.unique(plan.chunk_of(plan.lane_samples(epoch, lane))) for epoch in (0, 1, 7)]
        assert np.array_equal(chunks[0], chunks[1])
        assert np.array_equal(chunks[0], chunks[2])


def test_which_samples_of_a_shared_chunk_a_lane_gets_changes_with_the_epoch() -> None:
    plan = Plan(np.array([60]), 3, 5, 3, 4, labels=np.arange(60) % 2)
    assert len({tuple(np.sort(plan.lane_samples(epoch, 0))) for epoch in range(5)}) == 5


def test_more_classes_than_16_bits_hold() -> None:
    labels = np.arange(140_000) % 70_000 - 5
    plan = Plan(chunked(140_000, 512), 2, 64, 3, 4, labels=labels)
    of_lanes = [labels[plan.lane_samples(2, lane)] for lane in range(2)]
    assert all(np.array_equal(np.sort(of_lane), np.arange(70_000) - 5) for of_lane in of_lanes)


def test_golden_order() -> None:
    """The order is versioned: these values may only change together with PLAN_VERSION."""
    labels = np.array([0, 1, 0, 2, 2, 1, 0, 0, 1, 1, 2, 0, 1, 0])
    plan = Plan(np.array([3, 4, 2, 5]), 3, 2, 11, 2, labels=labels)
    assert [plan.lane_samples(5, lane).tolist() for lane in range(3)] == GOLDEN


GOLDEN = [[9, 1, 10, 0, 2], [3, 13, 11, 12, 4], [5, 6, 8, 7]]
