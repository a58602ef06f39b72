"""Batch memory is used again, but never while somebody can still see it."""

from __future__ import annotations

import threading

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.buffers import BufferPool


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_comes_back_when_nothing_refers_to_it() -> None:
    pool = BufferPool()
    first = pool.empty((4, 100), np.float32)
    place = address(first)
    second = pool.empty((4, 100), np.float32)
    assert address(second) != place
    del first
    assert address(pool.empty((4, 100), np.float32)) == place


def test_a_view_or_a_tensor_of_it_keeps_it() -> None:
    pool = BufferPool()
    whole = pool.empty((4, 100), np.float32)
    place = address(whole)
    tensor = torch.from_numpy(whole[2:, ::3])
    del whole
    assert address(pool.empty((4, 100), np.float32)) != place
    del tensor
    assert address(pool.empty((4, 100), np.float32)) == place


@given(st.lists(st.tuples(st.integers(0, 2000), st.booleans()), max_size=60))
def test_held_arrays_never_overlap_and_memory_is_bounded(takes: list[tuple[int, bool]]) -> None:
    pool, held = BufferPool(), []
    for number, (size, drop) in enumerate(takes):
        array = pool.empty((size,), np.int64)
        array[:] = number
        held.append((number, array))
        if drop:
            held.pop(0)
        del array
    for number, array in held:
        assert (array == number).all()
    most = max((size for size, _ in takes), default=0) * 9
    assert pool.held_bytes <= (len(takes) + 1) * most


def test_a_steady_use_takes_a_steady_amount() -> None:
    pool = BufferPool()
    for count in [128] * 50 + [77] + [128] * 50:
        pool.empty((count, 3072), np.uint8)[:] = 1
    assert pool.held_bytes <= 128 * 3072 * 9 // 8


def test_several_threads_never_get_the_same_memory() -> None:
    pool, wrong = BufferPool(), []

    def work(mark: int) -> None:
        for _ in range(300):
            array = pool.empty((64,), np.int64)
            array[:] = mark
            if not (array == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
