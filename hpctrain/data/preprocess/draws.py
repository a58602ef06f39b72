"""Random numbers of a sample: functions of (seed, epoch, field, step, sample) and of nothing else.

So a sample gets the same numbers in whatever lane, rank, thread or batch it turns up. They are words of the
counter-based streams of `hpctrain.data.permutation`: one stream per (seed, epoch, field, step), in which the sample id
is the counter, so that the words of a batch are had in one go, without a generator per sample.

Changing anything here changes the weights of runs that augment: raise `PREPROCESS_VERSION` (a test holds golden
values). Only what a user's function draws from its `numpy.random.Generator` depends on NumPy's version.
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.permutation import mix_key, words_at

PREPROCESS_VERSION: Final = 1

_STREAM: Final = 201  # apart from the streams of the plan and of the lanes
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_QUANTILES: Final = 1 << 16


def uniform_pair(words: NDArray[np.uint64], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two integers from 0 to `count` - 1 from each word, `count` below 2**31 (bias below count / 2**32)."""
    high = ((words >> _HALF) * np.uint64(count)) >> _HALF
    low = ((words & _LOW) * np.uint64(count)) >> _HALF
    return high.astype(np.int64), low.astype(np.int64)


class Draws:
    """The random numbers of one field."""

    def __init__(self, seed: int, field: str) -> None:
        self._seed, self._field = seed, mix_key(*field.encode())

    def words(self, step: str, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.uint64]:
        """One word per sample for the named step; shape (B,)."""
        key = mix_key(self._seed, _STREAM, epoch, self._field, mix_key(*step.encode()))
        return words_at(np.uint64(key), samples)


def generator(word: int) -> np.random.Generator:
    """The generator that a sample's word stands for."""
    return np.random.Generator(np.random.Philox(key=word))


def normals(words: NDArray[np.uint64], start: int, stop: int) -> NDArray[np.float32]:
    """Numbers `start` (a multiple of 4) to `stop` of each word's normally distributed ones; (B, stop - start).

    Each is one of 65,536 equally likely quantiles (up to 4.3 standard deviations), looked up: seven times the speed
    of a generator per sample, and the same bits on every processor.
    """
    counters = np.arange(start // 4, -(-stop // 4), dtype=np.int64)
    picks = words_at(words[:, np.newaxis], counters).astype("<u8", copy=False).view("<u2")
    numbers: NDArray[np.float32] = np.take(_quantiles(), picks[:, : stop - start], mode="clip")
    return numbers


@cache
def _quantiles() -> NDArray[Any]:
    """The middles of 65,536 equal shares of the normal distribution, ascending; float32."""
    inverse = NormalDist().inv_cdf
    upper = np.array(
        [inverse((i + 0.5) / _QUANTILES) for i in range(_QUANTILES // 2, _QUANTILES)], np.float32
    )
    return np.concatenate([-upper[::-1], upper])
