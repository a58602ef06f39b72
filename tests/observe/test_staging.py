"""How far staging is, from what each node says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.observe.staging import StagingView, read_staging


def event(node: str, t: float = 0.0, **fields: Any) -> dict[str, Any]:
    numbers = {"present_bytes": 0, "total_bytes": 0, "shared_bytes": 0, "peer_bytes": 0, "done": False}
    return {"t": t, "kind": "staging", "node": node, **numbers, **fields}


def view_of(*events: dict[str, Any]) -> StagingView:
    view = StagingView()
    for item in events:
        view.take(item)
    return view


def test_nothing_is_said_where_nothing_is_staged() -> None:
    for view in (view_of(), view_of(event("n1")), view_of(event("n1", done=True))):
        assert (view.going_on(), view.summary()) == ("", "")
    assert view_of().as_dict() is None


def test_all_nodes_together() -> None:
    view = view_of(
        event("n1", 10, present_bytes=1 * 10**9, total_bytes=4 * 10**9),
        event("n2", 10.5, total_bytes=8_300_000_000, present_bytes=10**9, peer_bytes=3),
        event("n3", 11),
        event("n1", 12, present_bytes=3 * 10**9, total_bytes=4 * 10**9),
        event("n2", 12.5, total_bytes=8_300_000_000, present_bytes=1_600_000_000, peer_bytes=5),
    )
    assert view.going_on() == "37 % of 12.3 GB on 2 nodes, 1.3 GB/s"
    assert view.summary() == ""
    found = view.as_dict()
    assert found is not None
    assert (found["nodes"], found["present_bytes"], found["peer_bytes"], found["done"]) == (
        3,
        4_600_000_000,
        5,
        False,
    )


def test_a_node_that_is_done_is_no_part_of_the_pace() -> None:
    done = {"present_bytes": 4000, "total_bytes": 4000, "done": True}
    view = view_of(event("n1", 0, total_bytes=4000), event("n1", 1, **done), event("n2", 0, total_bytes=9000))
    assert view.going_on() == "30 % of 13.0 kB on 2 nodes"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shared_bytes": 5000}, "5.0 kB on 1 node: 5.0 kB from the shared filesystem"),
        ({"peer_bytes": 5000}, "5.0 kB on 1 node: 5.0 kB from other nodes"),
        ({}, "5.0 kB on 1 node: all of it was there already"),
        (
            {"total_bytes": 9000, "shared_bytes": 4000, "peer_bytes": 1000},
            "5.0 kB of 9.0 kB on 1 node: 4.0 kB from the shared filesystem, 1.0 kB from other nodes",
        ),
    ],
)
def test_the_end_of_it(fields: dict[str, int], words: str) -> None:
    values = {"present_bytes": 5000, "total_bytes": 5000, **fields}
    assert view_of(event("n1", **values, done=True)).summary() == words


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.floats(0, 10), st.integers(0, 9), st.integers(0, 9), st.booleans()
        )
    )
)
def test_either_it_goes_on_or_it_is_over(said: list[tuple[str, float, int, int, bool]]) -> None:
    """Whatever nodes say, in whatever order, there are words for it."""
    view = view_of(
        *(
            event(node, t, present_bytes=present, total_bytes=total, done=done)
            for node, t, present, total, done in said
        )
    )
    last = {node: (present, total, done) for node, _, present, total, done in said}
    assert view.sum.present_bytes == sum(present for present, _, _ in last.values())
    has_some = any(total for _, total, _ in last.values())
    assert bool(view.going_on()) == (has_some and not all(done for _, _, done in last.values()))
    assert bool(view.summary()) == (has_some and all(done for _, _, done in last.values()))


def test_events_that_say_nothing_of_bytes_are_passed_over() -> None:
    broken: list[dict[str, Any]] = [{"total_bytes": "much"}, {"present_bytes": None}, {"t": "now"}]
    assert view_of(*({**event("n1"), **fields} for fields in broken)).as_dict() is None


def test_the_files_of_all_ranks_are_read(tmp_path: Path) -> None:
    other = {"t": 1, "kind": "warning", "message": 'about "staging"'}
    for rank in range(2):
        said = [
            other,
            event(f"n{rank}", total_bytes=4000, present_bytes=1000),
            {"t": 1, "kind": "step", "step": 3},
        ]
        lines = [json.dumps(item, separators=(",", ":")) for item in said]
        (tmp_path / f"rank-{rank}.jsonl").write_text("\n".join(lines) + '\n{"t":1,"kind":"staging"')
    (tmp_path / "rank-2.jsonl").mkdir()
    assert read_staging(tmp_path).going_on() == "25 % of 8.0 kB on 2 nodes"
    assert read_staging(tmp_path / "nowhere").as_dict() is None
