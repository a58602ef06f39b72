"""Robust figures of a few repetitions: the median, its spread, and an interval that assumes no distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Interval:
    """An interval of the median; `coverage` is what it really covers, at least the confidence asked for."""

    low: float
    high: float
    coverage: float


@dataclass(frozen=True)
class Summary:
    """One quantity of one setting over its repetitions.

    `interval` is None where there are too few for the confidence: six are needed for 95 %.
    """

    n: int
    median: float
    low: float
    high: float
    quartiles: tuple[float, float]
    interval: Interval | None

    @classmethod
    def of(cls, values: Sequence[float], confidence: float = CONFIDENCE) -> Summary:
        """Summarise at least one value; raises ValueError for none."""
        if not values:
            raise ValueError("0 values: at least 1 is needed")
        middle = statistics.median(values)
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [middle] * 3
        interval = median_interval(values, confidence)
        return cls(len(values), middle, min(values), max(values), (quartiles[0], quartiles[2]), interval)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The narrowest interval [k-th smallest, k-th largest] that covers the median with `confidence`.

    The number of values below the median is binomial (n, 1/2) whatever the distribution, so the coverage is
    1 - 2 P(X < k): David and Nagaraja, Order Statistics, section 7.1. None where even [min, max] covers less.
    """
    ordered, n = sorted(values), len(values)
    best, below = None, 0.0
    for k in range(1, n // 2 + 1):
        below += math.comb(n, k - 1) / 2**n
        coverage = 1 - 2 * below
        if coverage < confidence:
            break
        best = Interval(ordered[k - 1], ordered[n - k], coverage)
    return best
