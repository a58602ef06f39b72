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


@given(some_requests(), st.data())
def test_a_part_has_the_steps_as_they_were(requests: Requests, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, requests.num_steps))
    end = data.draw(st.integers(begin, requests.num_steps))
    part = requests.part(begin, end)
    assert part.num_steps == end - begin
    for step in range(part.num_steps):
        assert (
            part.samples[part.rows(step)].tolist() == requests.samples[requests.rows(begin + step)].tolist()
        )
        assert part.chunks_of(step).tolist() == requests.chunks_of(begin + step).tolist()
    assert [number for step in range(part.num_steps) for number, _, _ in part.steps_within(step)] == list(
        range(3 + begin, 3 + end)
    )


@given(some_requests())
def test_next_uses(requests: Requests) -> None:
    used = chunks_by_step(requests)
    for chunk in range(NUM_CHUNKS):
        steps = [step for step, chunks in enumerate(used) if chunk in chunks]
        for after in range(-1, requests.num_steps):
            later = [step for step in steps if step > after]
            found = requests.next_uses(np.array([chunk]), after).tolist()
            assert found == [later[0] if later else requests.num_steps]


def read_through(requests: Requests, slots: int) -> int | None:
    """Chunks loaded when the batches are taken one after the other; None where one does not fit."""
    return read_all([requests], Window(slots))


def read_all(epochs: list[Requests], window: Window) -> int | None:
    loads = 0
    for requests in epochs:
        for step in range(requests.num_steps):
            found = read_step(requests, step, window)
            if found is None:
                return None
            loads += found
    return loads


def read_step(requests: Requests, step: int, window: Window) -> int | None:
    batch = Batch(requests, step, requests.chunks_of(step).tolist())
    missing = window.acquire(batch)
    if missing is None:
        return None
    for chunk in missing:
        assert window.loaded(chunk) == [batch]
    slots = {window[chunk].slot for chunk in batch.chunks}
    assert len(slots) == len(batch.chunks)
    assert all(0 <= slot < window.slots for slot in slots)
    window.release(batch)
    return len(missing)


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


@given(st.lists(some_requests(), min_size=1, max_size=3))
def test_with_room_for_all_each_chunk_is_read_once_in_all_epochs(epochs: list[Requests]) -> None:
    window = Window(NUM_CHUNKS)
    used = {chunk for requests in epochs for chunk in requests.chunks.tolist()}
    assert read_all(epochs, window) == len(used)
    assert window.dropped_chunks == 0


@given(st.lists(some_requests(), min_size=2, max_size=3), st.integers(5, NUM_CHUNKS))
def test_what_is_read_twice_in_an_epoch_is_counted(epochs: list[Requests], slots: int) -> None:
    """Five samples a step at most, so that each fits."""
    window = Window(slots)
    for requests in epochs:
        before, loads = window.dropped_chunks, read_all([requests], window)
        assert loads is not None
        assert loads - len(set(requests.chunks.tolist())) <= window.dropped_chunks - before
