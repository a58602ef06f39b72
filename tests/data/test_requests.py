"""What is read when: the arithmetic behind the window, against a plain reading of the definitions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.batches import Batch
from hpctrain.data.requests import Requests
from hpctrain.data.window import Window

NUM_CHUNKS = 8


@st.composite
def some_requests(draw: st.DrawFn) -> Requests:
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    chunks = draw(st.lists(st.integers(0, NUM_CHUNKS - 1), min_size=sum(sizes), max_size=sum(sizes)))
    bounds = np.concatenate(([0], np.cumsum(sizes)))
    return Requests(0, np.arange(sum(sizes)), bounds, np.array(chunks, np.int64), first_step=3)


def chunks_by_step(requests: Requests) -> list[set[int]]:
    return [set(requests.chunks[requests.rows(step)].tolist()) for step in range(requests.num_steps)]


@given(some_requests(), st.integers(1, 5))
def test_grouped_steps_are_the_same_steps(requests: Requests, size: int) -> None:
    grouped = requests.grouped(size)
    told = [item for step in range(grouped.num_steps) for item in grouped.steps_within(step)]
    bounds = requests.bounds.tolist()
    assert told == [(3 + step, bounds[step], bounds[step + 1]) for step in range(requests.num_steps)]
    for step in range(grouped.num_steps):
        inner = list(grouped.steps_within(step))
        assert grouped.rows(step) == slice(inner[0][1], inner[-1][2])


@given(some_requests())
def test_last_and_next_uses(requests: Requests) -> None:
    used = chunks_by_step(requests)
    last = requests.last_uses(NUM_CHUNKS)
    for chunk in range(NUM_CHUNKS):
        steps = [step for step, chunks in enumerate(used) if chunk in chunks]
        assert last[chunk] == (steps[-1] if steps else -1)
        for after in range(-1, requests.num_steps):
            later = [step for step in steps if step > after]
            assert requests.next_use(chunk, after) == (later[0] if later else requests.num_steps)


def read_through(requests: Requests, slots: int) -> int | None:
    """Chunks loaded when the batches are taken one after the other; None where one does not fit."""
    window, last = Window(slots), requests.last_uses(NUM_CHUNKS)
    loads = 0
    for step in range(requests.num_steps):
        chunks = requests.chunks_of(step).tolist()
        batch = Batch(requests, step, step, chunks)
        missing = window.acquire(batch, last[chunks].tolist() if chunks else [])
        if missing is None:
            return None
        for chunk in missing:
            assert window.loaded(chunk) == [batch]
        assert len({window[chunk].slot for chunk in chunks}) == len(chunks)
        loads += len(missing)
        window.release(chunks, step)
    return loads


def fewest_loads(used: list[set[int]], slots: int) -> int:
    """By trying every choice of what to keep."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for chunks in used:
        following: dict[frozenset[int], int] = {}
        for held, loads in best.items():
            room = slots - len(chunks)
            others = sorted(held - chunks)
            for kept in range(1 << len(others)):
                keep = {chunk for bit, chunk in enumerate(others) if kept >> bit & 1}
                if len(keep) <= room:
                    state = frozenset(chunks | keep)
                    total = loads + len(chunks - held)
                    following[state] = min(following.get(state, total), total)
        best = following
    return min(best.values())


@given(some_requests(), st.integers(1, NUM_CHUNKS))
def test_no_other_choice_of_what_to_drop_reads_less(requests: Requests, slots: int) -> None:
    used = chunks_by_step(requests)
    loads = read_through(requests, slots)
    if max(map(len, used)) > slots:
        assert loads is None
    else:
        assert loads == fewest_loads(used, slots)


@given(some_requests())
def test_with_room_for_all_each_chunk_is_read_once(requests: Requests) -> None:
    assert read_through(requests, NUM_CHUNKS) == len(set(requests.chunks.tolist()))
