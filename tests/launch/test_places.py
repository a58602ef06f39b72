"""Nodes keep their places among the ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.launch.places import choose_nodes, keep_places, last_places, task_nodes
from hpctrain.resilience.attempts import StartRecord, next_attempt, write_start

NAMES = st.lists(st.sampled_from([f"n{number}" for number in range(12)]), unique=True)


def started(run_dir: Path, *nodes: str) -> None:
    """An attempt on these nodes."""
    number = next_attempt(run_dir)
    write_start(run_dir, StartRecord(number, len(nodes), [], "task", "n1", 1, "boot", list(nodes), 0.0, "1"))


@given(NAMES, NAMES, st.integers(0, 14))
def test_every_node_that_is_left_keeps_its_place(
    previous: list[str], available: list[str], count: int
) -> None:
    places = keep_places(previous, available, count)
    assert len(places) == len(set(places)) == min(count, len(available)), "nothing is lost or doubled"
    assert set(places) <= set(available)
    for place, node in enumerate(previous[: len(places)]):
        if node in available:
            assert places[place] == node


@given(NAMES, NAMES, st.integers(0, 14))
def test_nodes_that_have_chunks_come_before_others(
    previous: list[str], available: list[str], count: int
) -> None:
    places = keep_places(previous, available, count)
    if not set(available) & set(previous) <= set(places):
        assert set(places) <= set(previous)


@given(NAMES, st.integers(0, 14))
def test_the_first_time_the_order_is_that_of_slurm(available: list[str], count: int) -> None:
    assert keep_places([], available, count) == available[:count]


@given(NAMES, st.randoms(use_true_random=False))
def test_the_order_in_which_nodes_are_given_changes_nothing(
    previous: list[str], chance: random.Random
) -> None:
    available = list(previous)
    chance.shuffle(available)
    assert keep_places(previous, available, len(previous)) == previous


@pytest.mark.parametrize(
    ("previous", "available", "count", "places"),
    [
        ("n1 n2", "n2 n3", 2, "n3 n2"),
        ("n1 n2", "n1 n2 n3", 2, "n1 n2"),
        ("n3 n2", "n1 n2 n3", 2, "n3 n2"),  # n1 is back, but n3 has the chunks now
        ("n1 n2 n3", "n2 n3 n4", 2, "n3 n2"),
        ("n1 n2 n3", "n3", 3, "n3"),
        ("host", "n1 n2", 2, "n1 n2"),
        ("n1 n1", "n1 n2", 2, "n1 n2"),
        ("n1", "", 1, ""),
    ],
)
def test_places(previous: str, available: str, count: int, places: str) -> None:
    assert keep_places(previous.split(), available.split(), count) == places.split()


@given(NAMES, NAMES, st.lists(st.integers(1, 4), min_size=12, max_size=12), st.integers(1, 40))
def test_as_few_nodes_as_have_room(
    previous: list[str], available: list[str], sizes: list[int], num_ranks: int
) -> None:
    tasks = {f"n{number}": size for number, size in enumerate(sizes)}
    chosen = choose_nodes(previous, available, tasks, num_ranks)
    assert chosen == keep_places(previous, available, len(chosen))
    room = sum(tasks[node] for node in chosen)
    assert room >= num_ranks or len(chosen) == len(available)
    if chosen:
        fewer = keep_places(previous, available, len(chosen) - 1)
        assert sum(tasks[node] for node in fewer) < num_ranks


def test_slurm_is_only_told_what_it_would_not_do_by_itself() -> None:
    tasks = {"n1": 2, "n2": 1, "n3": 2}
    assert task_nodes(["n1", "n3"], tasks, 4) == []
    assert task_nodes(["n3", "n2"], tasks, 3) == ["n3", "n3", "n2"]
    assert task_nodes(["n2", "n1"], tasks, 2) == ["n2", "n1"], "the last node may have room left"


def test_the_last_places_are_those_of_the_last_start(tmp_path: Path) -> None:
    assert last_places(tmp_path) == []
    started(tmp_path, "n1", "n2")
    started(tmp_path, "n3", "n2")
    next_attempt(tmp_path)  # nothing was started in it
    assert last_places(tmp_path) == ["n3", "n2"]


def test_a_ledger_that_cannot_be_read_is_no_reason_to_end(tmp_path: Path) -> None:
    (tmp_path / "attempts").write_text("not a directory")
    assert last_places(tmp_path) == []
