"""Counter-based random numbers and permutations, our own and versioned.

A run's order and seeds come from here alone, so that no upgrade of a library can change them. The generator is
SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014): the value at counter i
is a hash of `key + i * GOLDEN`, so any part of a stream can be had without the rest.

Changing anything here changes the weights of every run: raise `PLAN_VERSION` (golden values are held by a test).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PLAN_VERSION = 1

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix_key(*words: int) -> int:
    """One 64-bit key from several integers; their order and number matter."""
    key = len(words)
    for word in words:
        key = _finalize(((key + _GOLDEN) & _MASK) ^ (word & _MASK))
    return key


def _finalize(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mix_keys(words: tuple[int, ...], last: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`mix_key(*words, value)` for each value of `last`; same shape."""
    key = len(words) + 1
    for word in words:
        key = _finalize(((key + _GOLDEN) & _MASK) ^ (word & _MASK))
    return _finalize_all(np.uint64((key + _GOLDEN) & _MASK) ^ last.astype(np.uint64))


def _finalize_all(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_finalize` of each value, in place."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def random_words(key: int, count: int) -> NDArray[np.uint64]:
    """The first `count` 64-bit words of the stream `key`, all different; shape (count,)."""
    words = np.arange(1, count + 1, dtype=np.uint64)
    words *= np.uint64(_GOLDEN)
    words += np.uint64(key)
    return _finalize_all(words)


def words_at(keys: NDArray[np.uint64] | np.uint64, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`random_words(key, position + 1)[position]` for keys and positions, which are broadcast against each other."""
    words: NDArray[np.uint64] = (positions + 1).astype(np.uint64)
    words *= np.uint64(_GOLDEN)
    return _finalize_all(np.add(words, keys))


def permutation(key: int, count: int) -> NDArray[np.int64]:
    """A permutation of range(count): the order of `count` random words; shape (count,)."""
    # The words of a stream never tie (the hash is a bijection), so that every correct sort gives this same order.
    return np.argsort(random_words(key, count)).astype(np.int64, copy=False)
