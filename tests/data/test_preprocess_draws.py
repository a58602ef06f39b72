"""Random numbers per sample: what they are (for good), and how they are spread."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.permutation import random_words
from hpctrain.data.preprocess import PREPROCESS_VERSION
from hpctrain.data.preprocess.draws import Draws, generator, normals, uniform_pair, words_at

GOLDEN_WORDS = [16463791528476110456, 8294011499983911005, 11865614621708416882]
GOLDEN_NORMALS = [
    [-0.06213577, 0.2861477, 1.555884, -0.9443595, -0.1610099, 0.5190233],
    [-0.7196745, 0.2886589, -1.692927, -1.264957, -1.467211, -0.004035187],
    [-1.035576, 0.6032522, -0.5317569, 1.4968, -0.1938048, -0.7663532],
]
GOLDEN_GENERATOR = 2228396435


@given(st.integers(0, 2**64 - 1), st.integers(1, 50))
def test_words_are_those_of_the_streams_of_the_plan(key: int, count: int) -> None:
    assert np.array_equal(words_at(np.uint64(key), np.arange(count)), random_words(key, count))


def test_golden_values() -> None:
    """These decide the weights of runs that augment: raise `PREPROCESS_VERSION` where they change."""
    words = Draws(7, "image").words("flip", 2, np.array([0, 1, 2**40]))
    assert PREPROCESS_VERSION == 1
    assert words.tolist() == GOLDEN_WORDS
    assert normals(words, 0, 6).tolist() == [pytest.approx(row, rel=1e-6) for row in GOLDEN_NORMALS]
    assert generator(int(words[0])).integers(1 << 32) == GOLDEN_GENERATOR


def test_every_part_of_the_key_counts() -> None:
    samples = np.arange(4)
    streams = [
        Draws(seed, field).words(step, epoch, samples).tolist()
        for seed in (1, 2)
        for field in ("a", "b", "ab")
        for step in ("flip", "crop")
        for epoch in (0, 1)
    ]
    words = [word for stream in streams for word in stream]
    assert len(set(words)) == len(words)


def test_pairs_are_uniform_and_independent() -> None:
    high, low = uniform_pair(random_words(3, 90_000), 9)
    counts = np.bincount(high * 9 + low, minlength=81)
    expected = 90_000 / 81
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 125, "80 degrees of freedom: beyond 125 once in a thousand"
    assert counts.min() > 0
    assert len(counts) == 81


def test_normals_are_normal() -> None:
    numbers = normals(random_words(1, 400), 0, 1001)
    assert numbers.shape == (400, 1001)
    assert numbers.dtype == np.float32
    assert np.array_equal(normals(random_words(1, 400), 8, 50), numbers[:, 8:50])
    assert abs(float(numbers.mean())) < 0.005
    assert float(numbers.std()) == pytest.approx(1, abs=0.005)
    assert float((np.abs(numbers) < 1).mean()) == pytest.approx(0.6827, abs=0.003)
    assert float((np.abs(numbers) > 3).mean()) == pytest.approx(0.0027, abs=0.0004)
    assert abs(float((numbers[:, 1:] * numbers[:, :-1]).mean())) < 0.007, "neighbours are independent"
