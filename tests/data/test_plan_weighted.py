"""Weighted sampling: draws with replacement, cut into lanes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.plan import Plan

weights_of_samples = st.lists(
    st.one_of(st.just(0.0), st.floats(0.01, 100), st.floats(0, 1e300)), min_size=1, max_size=120
).filter(any)


def weighted(weights: np.ndarray, lanes: int = 4, chunk: int = 5, seed: int = 3) -> Plan:
    full, rest = divmod(len(weights), chunk)
    sizes = np.array([chunk] * full + [rest] * (rest > 0), dtype=np.int64)
    return Plan(sizes, lanes, 3, seed, 2, weights=weights)


def draws(plan: Plan, epoch: int) -> np.ndarray:
    return np.concatenate([plan.lane_samples(epoch, lane) for lane in range(plan.num_lanes)])


@settings(max_examples=40)
@given(weights_of_samples, st.integers(1, 12), st.integers(1, 9), st.integers(0, 99))
def test_an_epoch_is_as_many_draws_as_samples_in_full_steps(
    weights: list[float], lanes: int, chunk: int, epoch: int
) -> None:
    plan = weighted(np.array(weights), lanes, chunk)
    batches = [plan.lane_batches(epoch, lane) for lane in range(lanes)]
    assert sum(len(batch) for of_lane in batches for batch in of_lane) == len(weights)
    assert all(len(batch) == 3 for of_lane in batches for batch in of_lane[:-1])
    sizes = [len(of_lane[-1]) for of_lane in batches]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=40)
@given(weights_of_samples, st.integers(1, 12), st.integers(1, 9), st.integers(0, 99))
def test_no_sample_of_weight_0_is_drawn_and_few_chunks_are_shared(
    weights: list[float], lanes: int, chunk: int, epoch: int
) -> None:
    plan = weighted(np.array(weights), lanes, chunk)
    drawn = [plan.lane_samples(epoch, lane) for lane in range(lanes)]
    assert all(weights[sample] > 0 for of_lane in drawn for sample in of_lane)
    touched = [np.unique(plan.chunk_of(of_lane)) for of_lane in drawn]
    assert sum(map(len, touched)) - len(np.unique(np.concatenate(touched))) <= lanes - 1


@settings(max_examples=40)
@given(weights_of_samples, st.integers(1, 12), st.integers(0, 99))
def test_the_draws_do_not_depend_on_the_lanes(weights: list[float], lanes: int, epoch: int) -> None:
    alone, dealt = (draws(weighted(np.array(weights), number), epoch) for number in (1, lanes))
    assert np.array_equal(np.sort(alone), np.sort(dealt))


def test_frequencies_are_the_weights() -> None:
    """Chi-squared of 20,000 draws in 100 epochs over 200 samples: 99.99 % quantile of 199 degrees is 284."""
    weights = np.random.default_rng(0).uniform(0.5, 2, 200)
    plan = weighted(weights)
    counts = np.bincount(np.concatenate([draws(plan, epoch) for epoch in range(100)]), minlength=200)
    expected = weights / weights.sum() * counts.sum()
    assert float(((counts - expected) ** 2 / expected).sum()) < 284


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e306])
def test_the_scale_of_weights_does_not_matter(scale: float) -> None:
    weights = np.array([1.0, 2, 3, 0, 40]) * scale
    assert np.array_equal(draws(weighted(weights), 4), draws(weighted(np.array([1.0, 2, 3, 0, 40])), 4))


def test_a_sample_may_come_often_or_never() -> None:
    counts = np.bincount(draws(weighted(np.ones(1000)), 0), minlength=1000)
    assert 330 < (counts == 0).sum() < 410, "with replacement, 1/e of the samples is not drawn"
    assert counts.max() >= 3


def test_draws_differ_between_epochs_and_seeds() -> None:
    one = np.sort(draws(weighted(np.ones(200)), 0))
    assert not np.array_equal(one, np.sort(draws(weighted(np.ones(200)), 1)))
    assert not np.array_equal(one, np.sort(draws(weighted(np.ones(200), seed=4), 0)))


def test_lanes_that_share_a_chunk_both_draw_from_all_of_it() -> None:
    plan = weighted(np.ones(2000), lanes=2, chunk=2000)
    means = [plan.lane_samples(0, lane).mean() for lane in (0, 1)]
    assert means == pytest.approx([1000, 1000], abs=80)  # sigma 18


def test_a_window_spans_chunks_that_were_drawn_from() -> None:
    weights = np.zeros(500)
    weights[[0, 250, 499]] = 1  # 3 of 100 chunks, with a window of 2
    plan = weighted(weights, lanes=1)
    assert np.count_nonzero(np.diff(plan.lane_samples(0, 0))) > 100, (
        "two of them are shuffled into each other"
    )


@pytest.mark.parametrize("dtype", [np.float32, np.int64, bool])
def test_weights_may_be_any_numbers(dtype: type) -> None:
    weights = np.array([1, 0, 1, 1], dtype=dtype)
    assert np.array_equal(draws(weighted(weights), 1), draws(weighted(weights.astype(float)), 1))


def test_golden_order() -> None:
    """The order is versioned: these values may only change together with PLAN_VERSION."""
    plan = weighted(np.arange(14.0), lanes=3, chunk=4, seed=11)
    assert [plan.lane_samples(5, lane).tolist() for lane in range(3)] == GOLDEN


GOLDEN = [[13, 3, 13, 3, 3], [12, 12, 12, 8, 12], [4, 8, 10, 11]]
