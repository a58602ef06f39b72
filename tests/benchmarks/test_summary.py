from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.summary import Summary, median_interval

values_lists = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


def coverage_by_enumeration(n: int, k: int) -> float:
    """Share of the 2^n ways to fall below or above the median that [k-th smallest, k-th largest] covers."""
    covered = sum(k <= sum(sides) <= n - k for sides in itertools.product((0, 1), repeat=n))
    return covered / 2**n


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("n", range(1, 13))
def test_interval_is_the_narrowest_that_covers_by_brute_force(n: int, confidence: float) -> None:
    values = [float(10 * i) for i in range(n)]
    enough = {k: c for k in range(1, n // 2 + 1) if (c := coverage_by_enumeration(n, k)) >= confidence}
    found = median_interval(values[::-1], confidence)
    if not enough:
        assert found is None
        return
    k = max(enough)
    assert found is not None
    assert (found.low, found.high) == (values[k - 1], values[n - k])
    assert found.coverage == pytest.approx(enough[k])


def test_six_values_are_needed_for_95_percent() -> None:
    assert median_interval([1.0] * 5) is None
    interval = median_interval([5.0, 1.0, 2.0, 6.0, 3.0, 4.0])
    assert interval is not None
    assert (interval.low, interval.high, interval.coverage) == (1.0, 6.0, 1 - 2 / 64)


def test_interval_covers_the_true_median_of_skewed_samples_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    samples = rng.lognormal(size=(4000, 9))  # true median: 1
    intervals = [median_interval(list(row)) for row in samples]
    covered = np.mean([interval is not None and interval.low <= 1 <= interval.high for interval in intervals])
    assert intervals[0] is not None
    assert covered == pytest.approx(intervals[0].coverage, abs=0.012)  # four standard errors


@given(values_lists)
def test_summary_against_the_standard_library_and_numpy(values: list[float]) -> None:
    found = Summary.of(values)
    assert found.n == len(values)
    assert found.median == statistics.median(values)
    assert (found.low, found.high) == (min(values), max(values))
    assert found.quartiles == pytest.approx(tuple(np.percentile(values, [25, 75])), rel=1e-9, abs=1e-6)
    if found.interval is not None:
        assert found.low <= found.interval.low <= found.median <= found.interval.high <= found.high


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="0 values: at least 1"):
        Summary.of([])
