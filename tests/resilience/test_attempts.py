from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.names import committed_checkpoints, newest_step
from hpctrain.errors import PeerError, StorageError
from hpctrain.resilience.attempts import (
    EndSummary,
    StartRecord,
    admissible_checkpoints,
    attempt_dir,
    is_superseded,
    list_attempts,
    newest_attempt,
    next_attempt,
    read_end,
    read_start,
    refuse_superseded,
    started_after,
    write_end,
    write_json,
    write_start,
)
from hpctrain.resilience.exits import FailureClass


def start(number: int, checkpoints: list[str] | None = None) -> StartRecord:
    return StartRecord(
        number, 2, checkpoints or [], "/task", "node", 7, "boot", ["node"], time.time(), "0.1.0"
    )


def begin(run_dir: Path) -> int:
    number = next_attempt(run_dir)
    write_start(run_dir, start(number, admissible_checkpoints(run_dir, number)))
    return number


def commit(run_dir: Path, step: int, attempt: int) -> str:
    name = f"step-{step:09d}-a{attempt:04d}"
    (run_dir / "checkpoints" / name).mkdir(parents=True)
    (run_dir / "checkpoints" / name / "manifest.json").write_text("{}")
    return name


def test_numbers_go_up_from_one(tmp_path: Path) -> None:
    assert [next_attempt(tmp_path) for _ in range(3)] == [1, 2, 3]
    assert (tmp_path / "attempts" / "a0003" / "ranks").is_dir()


def test_a_number_is_given_once(tmp_path: Path) -> None:
    numbers: list[int] = []

    def take() -> None:
        numbers.extend(next_attempt(tmp_path) for _ in range(10))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(numbers) == list(range(1, 81))


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    number = next_attempt(tmp_path)
    begun = start(number, ["step-000000010-a0001"])
    ended = EndSummary(
        number, FailureClass.KILLED, 72, "rank 1 was killed", 1, "node", False, 10, 30,
        [{"rank": 0, "failure": "killed", "code": None}], 137, "quote", 1.0, 2.0,
    )  # fmt: skip
    write_start(tmp_path, begun)
    write_end(tmp_path, ended)
    assert list_attempts(tmp_path) == [(1, attempt_dir(tmp_path, 1), begun, ended)]
    assert ended.steps_gained == 20


def test_an_attempt_without_an_end_died_with_its_supervisor(tmp_path: Path) -> None:
    begin(tmp_path)
    assert list_attempts(tmp_path)[0].end is None


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"attempt": 1}', '{"failure": "unheard of"}'])
def test_damaged_records_count_as_missing(tmp_path: Path, content: str) -> None:
    for name in ("start.json", "end.json"):
        (tmp_path / name).write_text(content)
    assert read_start(tmp_path) is None
    assert read_end(tmp_path) is None


def test_only_committed_checkpoints_count(tmp_path: Path) -> None:
    commit(tmp_path, 10, 1)
    (tmp_path / "checkpoints" / "step-000000020-a0001").mkdir()  # no manifest
    (tmp_path / "checkpoints" / ".tmp-step-000000030-a0001").mkdir()
    (tmp_path / "checkpoints" / "step-000000040-a0001.old").mkdir()
    assert [item.step for item in committed_checkpoints(tmp_path / "checkpoints")] == [10]


def test_the_first_attempt_may_restore_nothing(tmp_path: Path) -> None:
    commit(tmp_path, 10, 1)
    assert admissible_checkpoints(tmp_path, 1) == []


def test_the_newest_comes_first_and_older_ones_stay_admissible(tmp_path: Path) -> None:
    begin(tmp_path)
    ten = commit(tmp_path, 10, 1)
    begin(tmp_path)
    twenty = commit(tmp_path, 20, 2)
    assert admissible_checkpoints(tmp_path, 3) == [twenty, ten]
    assert newest_step([twenty, ten]) == 20
    assert newest_step([]) == 0


def test_the_late_write_of_a_zombie_is_never_admissible(tmp_path: Path) -> None:
    begin(tmp_path)
    ten = commit(tmp_path, 10, 1)
    begin(tmp_path)  # attempt 2 lists step 10 only ...
    zombie = commit(tmp_path, 15, 1)  # ... and then a forgotten rank of attempt 1 commits
    begin(tmp_path)
    begin(tmp_path)
    for number in (3, 4, 5):
        assert admissible_checkpoints(tmp_path, number) == [ten], zombie


def test_a_checkpoint_that_was_pruned_is_not_listed(tmp_path: Path) -> None:
    begin(tmp_path)
    ten = commit(tmp_path, 10, 1)
    begin(tmp_path)
    (tmp_path / "checkpoints" / ten / "manifest.json").unlink()
    assert admissible_checkpoints(tmp_path, 3) == []


def test_an_attempt_that_launched_nothing_is_passed_over(tmp_path: Path) -> None:
    begin(tmp_path)
    ten = commit(tmp_path, 10, 1)
    next_attempt(tmp_path)  # its supervisor died before the start record
    assert admissible_checkpoints(tmp_path, 3) == [ten]


def test_an_attempt_is_superseded_by_the_start_of_a_newer_one(tmp_path: Path) -> None:
    assert newest_attempt(tmp_path) == 0
    assert not is_superseded(tmp_path, 1)
    assert [begin(tmp_path), begin(tmp_path)] == [1, 2]
    assert (is_superseded(tmp_path, 1), is_superseded(tmp_path, 2)) == (True, False)
    assert [next_attempt(tmp_path), newest_attempt(tmp_path)] == [3, 3]
    assert not is_superseded(tmp_path, 2), "a directory that nothing was started in"
    begin(tmp_path)
    assert started_after(tmp_path, 1) == [2, 4]
    refuse_superseded(tmp_path, 4)
    with pytest.raises(PeerError, match="attempt 2 was superseded by attempt 4"):
        refuse_superseded(tmp_path, 2)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(st.lists(st.integers(1, 50), max_size=3), min_size=1, max_size=5))
def test_every_own_checkpoint_stays_admissible(
    tmp_path_factory: pytest.TempPathFactory, history: list[list[int]]
) -> None:
    """Without zombies, an attempt may restore everything that was committed before it."""
    run_dir = tmp_path_factory.mktemp("run")
    names = set()
    for steps in history:
        number = begin(run_dir)
        names |= {commit(run_dir, step, number) for step in set(steps)}
    found = admissible_checkpoints(run_dir, len(history) + 1)
    assert set(found) == names
    assert found == sorted(found, reverse=True)


def test_json_that_cannot_be_written_says_where_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"start\.json"):
        write_json(tmp_path / "missing" / "start.json", {})
    write_json(tmp_path / "x.json", {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
