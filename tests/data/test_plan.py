"""The plan's promises, for any number of samples, chunks, lanes and ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.comm.world import deal_lanes
from hpctrain.data.permutation import mix_key, mix_keys, permutation, random_words, words_at
from hpctrain.data.plan import Plan
from hpctrain.errors import DataError

sizes_of_chunks = st.lists(st.integers(1, 13), min_size=1, max_size=40).map(
    lambda sizes: np.array(sizes, np.int64)
)


@st.composite
def plans(draw: st.DrawFn, balanced: bool = True) -> Plan:
    """Any plan that promises every sample once; with balanced = False none that is dealt by class."""
    sizes = draw(sizes_of_chunks)
    settings = [draw(st.integers(*bounds)) for bounds in ((1, 12), (1, 9), (0, 2**63 - 1), (1, 8))]
    order, exchange = draw(st.sampled_from(["global", "node_local"])), draw(st.floats(0, 1))
    labels = None
    if balanced and draw(st.booleans()):
        # As a class of each sample: shuffled and rare classes, long runs of one, and all of one.
        labels = np.random.default_rng(draw(st.integers(0, 99))).integers(
            0, draw(st.integers(1, 9)), int(sizes.sum())
        )
        labels = np.sort(labels) if draw(st.booleans()) else labels
    return Plan(sizes, *settings, order=order, exchange=exchange, labels=labels)


epochs = st.integers(0, 1000)


def epoch_of(plan: Plan, epoch: int) -> list[np.ndarray]:
    return [plan.lane_samples(epoch, lane) for lane in range(plan.num_lanes)]


@settings(max_examples=40)
@given(plans(), epochs)
def test_every_sample_exactly_once(plan: Plan, epoch: int) -> None:
    samples = np.concatenate(epoch_of(plan, epoch))
    assert np.array_equal(np.sort(samples), np.arange(plan.num_samples))


@settings(max_examples=40)
@given(plans(), epochs)
def test_every_step_but_the_last_is_full(plan: Plan, epoch: int) -> None:
    lanes = [plan.lane_batches(epoch, lane) for lane in range(plan.num_lanes)]
    assert all(len(batches) == plan.steps_per_epoch for batches in lanes)
    for step in range(plan.steps_per_epoch - 1):
        assert {len(batches[step]) for batches in lanes} == {plan.lane_batch}
    last = [len(batches[-1]) for batches in lanes]
    assert 0 < sum(last) <= plan.global_batch
    assert max(last) - min(last) <= 1, "the short step is spread as evenly as it goes"
    assert sum(len(batch) for batches in lanes for batch in batches) == plan.num_samples


@settings(max_examples=40)
@given(plans(balanced=False), epochs)
def test_at_most_lanes_minus_one_chunk_touches_are_shared(plan: Plan, epoch: int) -> None:
    touched = [np.unique(plan.chunk_of(samples)) for samples in epoch_of(plan, epoch) if len(samples)]
    touches = sum(len(chunks) for chunks in touched)
    distinct = len(np.unique(np.concatenate(touched)))
    assert distinct == len(plan.chunk_sizes)
    assert touches - distinct <= plan.num_lanes - 1


@settings(max_examples=40)
@given(plans(), epochs, st.integers(1, 12))
def test_the_order_does_not_depend_on_the_ranks(plan: Plan, epoch: int, ranks: int) -> None:
    """Dealing lanes to any number of ranks covers every lane once, in order, as evenly as it goes."""
    ranks = min(ranks, plan.num_lanes)
    dealt = deal_lanes(plan.num_lanes, ranks)
    assert [lane for lanes in dealt for lane in lanes] == list(range(plan.num_lanes))
    sizes = [len(lanes) for lanes in dealt]
    assert max(sizes) - min(sizes) <= 1
    whole = np.concatenate(epoch_of(plan, epoch))
    by_rank = [plan.lane_samples(epoch, lane) for lanes in dealt for lane in lanes]
    assert np.array_equal(whole, np.concatenate(by_rank))


@settings(max_examples=40)
@given(plans(), epochs)
def test_a_lane_stays_in_its_window(plan: Plan, epoch: int) -> None:
    """At any moment a lane has at most `window_chunks` chunks begun and unfinished."""
    for samples in epoch_of(plan, epoch):
        chunks = plan.chunk_of(samples)
        first = {int(c): i for i, c in reversed(list(enumerate(chunks)))}
        last = {int(c): i for i, c in enumerate(chunks)}
        for i in range(len(chunks)):
            assert sum(first[c] <= i <= last[c] for c in first) <= plan.window_chunks


@settings(max_examples=40)
@given(plans(), epochs, st.data())
def test_first_steps_are_those_of_the_batches(plan: Plan, epoch: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, plan.num_lanes - 1))
    lanes = range(first, data.draw(st.integers(first + 1, plan.num_lanes)))
    from_step = data.draw(st.integers(0, plan.steps_per_epoch))
    expected = [plan.steps_per_epoch] * len(plan.chunk_sizes)
    for step in reversed(range(from_step, plan.steps_per_epoch)):
        for lane in lanes:
            for chunk in plan.chunk_of(plan.lane_batches(epoch, lane)[step]).tolist():
                expected[chunk] = step
    assert plan.first_steps(epoch, lanes, from_step).tolist() == expected


@settings(max_examples=40)
@given(sizes_of_chunks, st.integers(1, 12), st.integers(0, 2**63 - 1), st.integers(1, 8), epochs)
def test_the_global_order_is_the_one_of_its_definition(
    sizes: np.ndarray, lanes: int, seed: int, window: int, epoch: int
) -> None:
    """Written out sample by sample: chunks permuted, samples in each permuted, cut into lanes, shuffled in windows."""
    starts = np.concatenate(([0], np.cumsum(sizes)))
    sequence = [
        (chunk, int(starts[chunk]) + position)
        for chunk in permutation(mix_key(seed, epoch, 1), len(sizes)).tolist()
        for position in permutation(mix_key(seed, epoch, 2, chunk), int(sizes[chunk])).tolist()
    ]
    plan = Plan(sizes, lanes, 3, seed, window)
    for lane, (start, stop) in enumerate(itertools.pairwise(plan.lane_bounds().tolist())):
        chunks = [
            [sample for _, sample in run]
            for _, run in itertools.groupby(sequence[start:stop], lambda at: at[0])
        ]
        expected: list[int] = []
        for number, first in enumerate(range(0, len(chunks), window)):
            samples = list(itertools.chain(*chunks[first : first + window]))
            expected += [samples[i] for i in permutation(mix_key(seed, epoch, 3, lane, number), len(samples))]
        assert plan.lane_samples(epoch, lane).tolist() == expected


def test_epochs_seeds_and_lanes_differ() -> None:
    plan = Plan(np.full(50, 20, np.int64), 2, 10, 7, 8)
    other_seed = Plan(np.full(50, 20, np.int64), 2, 10, 8, 8)
    assert not np.array_equal(plan.lane_samples(0, 0), plan.lane_samples(1, 0))
    assert not np.array_equal(plan.lane_samples(0, 0), other_seed.lane_samples(0, 0))


def test_golden_order() -> None:
    """The order is versioned: these values may only change together with PLAN_VERSION."""
    assert random_words(0, 3).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F], (
        "SplitMix64"
    )
    plan = Plan(np.array([3, 4, 2, 5], np.int64), 2, 3, 11, 2)
    assert [plan.lane_samples(5, lane).tolist() for lane in (0, 1)] == GOLDEN
    assert permutation(mix_key(1, 2, 3), 8).tolist() == GOLDEN_PERMUTATION


GOLDEN = [[13, 12, 11, 1, 9, 0, 2], [10, 8, 7, 5, 3, 4, 6]]
GOLDEN_PERMUTATION = [7, 3, 1, 2, 6, 4, 0, 5]


@given(st.lists(st.integers(0, 2**64 - 1), max_size=3), st.lists(st.integers(0, 2**40), max_size=5))
def test_random_numbers_in_bulk_are_those_one_by_one(words: list[int], last: list[int]) -> None:
    keys = mix_keys(tuple(words), np.array(last, np.int64))
    assert keys.tolist() == [mix_key(*words, value) for value in last]
    positions = np.arange(len(last)) * 3
    assert words_at(keys, positions).tolist() == [
        int(random_words(key, 3 * i + 1)[-1]) for i, key in enumerate(keys.tolist())
    ]


@settings(max_examples=20)
@given(st.integers(0, 2**64 - 1), st.integers(0, 3000))
def test_permutation_is_a_permutation(key: int, count: int) -> None:
    assert np.array_equal(np.sort(permutation(key, count)), np.arange(count))


def test_permutation_positions_are_uniform() -> None:
    """Chi-squared over where element 0 lands, 10 cells, 2000 keys: 99.99 % quantile of 9 degrees is 33.7."""
    cells = np.zeros(10)
    for key in range(2000):
        cells[int(np.where(permutation(mix_key(key), 10) == 0)[0][0])] += 1
    assert float(((cells - 200) ** 2 / 200).sum()) < 33.7


@pytest.mark.parametrize(
    ("sizes", "lanes", "batch", "window", "named"),
    [
        ([4], 0, 1, 1, "num_lanes"),
        ([4], 1, 0, 1, "lane_batch"),
        ([4], 1, 1, 0, "window_chunks"),
        ([], 1, 1, 1, "empty"),
        ([0], 1, 1, 1, "empty"),
    ],
)
def test_refusals_name_the_value(sizes: list[int], lanes: int, batch: int, window: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Plan(np.array(sizes, np.int64), lanes, batch, 0, window)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"order": "local"}, 'order = "local".*"node_local"'),
        ({"exchange": 1.5}, "exchange = 1.5"),
        ({"exchange": float("nan")}, "exchange = nan"),
        ({"weights": np.ones(4), "labels": np.zeros(4, np.int64)}, "no labels"),
        ({"weights": np.ones(4), "order": "node_local"}, 'order = "global"'),
    ],
)
def test_refusals_of_an_order_name_the_value(given: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Plan(np.array([4]), 1, 1, 0, 1, **given)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"labels": np.zeros(3, np.int64)}, r"labels of shape \(3,\) for 4 samples"),
        ({"labels": np.zeros((4, 2), np.int64)}, r"shape \(4, 2\)"),
        ({"labels": np.zeros(4)}, "float64"),
        ({"weights": np.ones(5)}, r"weights of shape \(5,\) for 4 samples"),
        ({"weights": np.array(["a"] * 4)}, "numbers are needed"),
        ({"weights": np.array([1, np.nan, 1, -1])}, r"weight nan of sample 1 \(2 such of 4\)"),
        ({"weights": np.array([1, 1, -0.5, 1])}, r"weight -0.5 of sample 2"),
        ({"weights": np.array([1, 1, 1, np.inf])}, r"weight inf of sample 3"),
        ({"weights": np.zeros(4)}, "all 4 samples are 0"),
    ],
)
def test_labels_and_weights_that_cannot_be_used_are_bad_data(given: dict, named: str) -> None:
    with pytest.raises(DataError, match=named):
        Plan(np.array([4]), 1, 1, 0, 1, **given)


@pytest.mark.parametrize(
    ("lanes", "ranks", "expected"), [(8, 3, [3, 3, 2]), (4, 4, [1, 1, 1, 1]), (5, 1, [5])]
)
def test_deal(lanes: int, ranks: int, expected: list[int]) -> None:
    assert [len(part) for part in deal_lanes(lanes, ranks)] == expected
