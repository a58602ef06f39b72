"""The measure of mixing, and what reading costs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.mixing import quality, step_mixing
from hpctrain.data.plan import Plan

SIZES = np.full(200, 20)


def plan_of(window: int, lanes: int = 4, **order: object) -> Plan:
    return Plan(SIZES, lanes, 10, 3, window, **order)  # type: ignore[arg-type]


@given(st.integers(1, 500), st.integers(1, 40))
def test_file_order_is_0(num_samples: int, batch: int) -> None:
    mixing = step_mixing(np.arange(num_samples), np.arange(num_samples) // batch)
    assert mixing == (1 if num_samples <= max(batch, 2) else 0)


def test_a_uniform_permutation_is_1_in_expectation() -> None:
    """Exactly so: the mean over all 5,040 orders of 7 samples in steps of 3, not cut off at 1."""
    steps = np.arange(7) // 3
    distances = [np.abs(np.diff(steps[list(order)])).mean() for order in itertools.permutations(range(7))]
    least = 2 / 6
    # Half-way between the least distance and the mean over all orders is 1/2, by what the measure says of one order.
    order = np.array([0, 1, 4, 2, 3, 5, 6])
    said = step_mixing(order, steps)
    in_file_order = steps[np.argsort(order)]
    assert said == pytest.approx(
        (np.abs(np.diff(in_file_order)).mean() - least) / (np.mean(distances) - least)
    )


def test_a_large_uniform_permutation_is_near_1() -> None:
    samples = np.random.default_rng(0).permutation(20_000)
    assert step_mixing(samples, np.arange(20_000) // 64) == pytest.approx(1, abs=0.02)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 20))
def test_it_lies_between_0_and_1_also_for_draws(samples: list[int], batch: int) -> None:
    assert -1e-12 <= step_mixing(np.array(samples), np.arange(len(samples)) // batch) <= 1


def test_draws_are_measured_without_favour_for_repeats() -> None:
    """Draws scattered at random over the epoch mix like a permutation, however often a sample comes."""
    samples = np.random.default_rng(0).integers(0, 50, 20_000)
    assert step_mixing(samples, np.arange(20_000) // 64) == pytest.approx(1, abs=0.02)


def test_a_wider_window_mixes_better() -> None:
    of_windows = [quality(plan_of(window), 1, range(4)).mixing for window in (1, 5, 10, 25, 50)]
    assert of_windows == sorted(of_windows)
    assert of_windows[0] < 0.1
    assert of_windows[2] == pytest.approx(10 / 50, abs=0.06), (
        "near the share of the lane's epoch that a window spans"
    )
    assert of_windows[-1] > 0.9


def test_one_rank_sees_the_mixing_of_all() -> None:
    of_rank, of_all = (quality(plan_of(10), 1, lanes).mixing for lanes in (range(1, 3), range(4)))
    assert of_rank == pytest.approx(of_all, abs=0.1)


def test_read_amplification_counts_a_shared_chunk_for_each_lane() -> None:
    alone = quality(Plan(np.full(8, 5), 2, 2, 3, 2), 0, range(2))
    shared = quality(Plan(np.full(9, 5), 2, 2, 3, 2), 0, range(2))
    assert alone.read_amplification == 1
    assert shared.read_amplification == pytest.approx(10 / 9)


def test_balance_costs_reads_and_draws_may_save_them() -> None:
    labels = np.random.default_rng(0).integers(0, 50, 4000)
    assert quality(plan_of(10, labels=labels), 1, range(4)).read_amplification > 1.2
    weights = np.zeros(4000)
    weights[:20] = 1  # one chunk, drawn 4,000 times
    assert quality(plan_of(10, weights=weights), 1, range(4)).read_amplification == pytest.approx(
        4 * 20 / 4000
    )


def test_chunks_per_step() -> None:
    assert quality(Plan(np.full(40, 10), 4, 10, 3, 1), 1, range(4)).chunks_per_step == 4
    assert quality(Plan(np.full(410, 1), 4, 10, 3, 1), 1, range(4)).chunks_per_step == 40, "full steps"
    narrow, wide = (quality(plan_of(window), 1, range(4)).chunks_per_step for window in (2, 50))
    assert narrow < wide <= 40


def test_lanes_without_samples_and_sets_of_one() -> None:
    assert quality(Plan(np.array([1]), 3, 2, 3, 1), 0, range(1, 3)).read_amplification == 1
    assert quality(Plan(np.array([1]), 3, 2, 3, 1), 0, range(3)).mixing == 1


def test_it_is_a_function_of_the_plan() -> None:
    assert quality(plan_of(10), 2, range(4)) == quality(plan_of(10), 2, range(4))
