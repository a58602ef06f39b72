from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.resilience.attempts import (
    EndSummary,
    StartRecord,
    attempt_dir,
    next_attempt,
    write_end,
    write_restored,
    write_start,
)
from hpctrain.resilience.exits import FailureClass
from hpctrain.resilience.history import past_outcomes
from hpctrain.resilience.policy import AttemptOutcome

KILLED = FailureClass.KILLED.exit_code


def begin(run_dir: Path, submission: str = "7", checkpoints: tuple[str, ...] = ()) -> StartRecord:
    record = StartRecord(
        attempt=next_attempt(run_dir), num_ranks=2, checkpoints=list(checkpoints), task_dir="", host="n1", pid=1,
        boot_id="", nodes=["n1"], started_unix_s=1.0, version="", job=submission, submission=submission,
    )  # fmt: skip
    write_start(run_dir, record)
    return record


def end(
    run_dir: Path,
    attempt: int,
    failure: FailureClass,
    gained: int,
    code: int | None = None,
    asked: bool = False,
) -> None:
    write_end(
        run_dir,
        EndSummary(
            attempt=attempt, failure=failure, code=failure.exit_code if code is None else code, reason="",
            blamed_rank=None, blamed_node=None, asked_to_leave=asked, step_before=10, step_after=10 + gained, ranks=[],
            launcher_code=None, launcher_says=None, started_unix_s=1.0, ended_unix_s=2.0,
        ),
    )  # fmt: skip


def commit(run_dir: Path, name: str) -> None:
    (run_dir / "checkpoints" / name).mkdir(parents=True)
    (run_dir / "checkpoints" / name / "manifest.json").write_text("{}")


def test_ended_attempts_are_as_their_records_say(tmp_path: Path) -> None:
    for failure, gained, code, asked in (
        (FailureClass.LEAVE, 5, None, True), (FailureClass.USER, 0, 65, False), (FailureClass.KILLED, 0, None, False)
    ):  # fmt: skip
        end(tmp_path, begin(tmp_path).attempt, failure, gained, code, asked)
    assert past_outcomes(tmp_path, "7") == [
        AttemptOutcome(FailureClass.LEAVE, 75, progressed=True, asked_to_leave=True),
        AttemptOutcome(FailureClass.USER, 65, progressed=False),
        AttemptOutcome(FailureClass.KILLED, KILLED, progressed=False),
    ]


def test_other_submissions_do_not_count(tmp_path: Path) -> None:
    for submission in ("", "6", "7", "70", "7_1"):
        end(tmp_path, begin(tmp_path, submission).attempt, FailureClass.HANG, 0)
    assert len(past_outcomes(tmp_path, "7")) == 1
    assert past_outcomes(tmp_path, "8") == []


def test_a_successor_belongs_to_the_submission_of_its_first_job(tmp_path: Path) -> None:
    first = begin(tmp_path)
    write_start(tmp_path, replace(first, job="12"))
    assert len(past_outcomes(tmp_path, "7")) == 1
    assert past_outcomes(tmp_path, "12") == []


@pytest.mark.parametrize(
    ("committed", "restored", "progressed"),
    [
        ([], None, False),
        (["step-000000010-a0001"], None, False),  # the one it began from
        (["step-000000010-a0001", "step-000000020-a0002"], None, True),
        (["step-000000010-a0001", "step-000000020-a0003"], None, False),  # of somebody else
        (["step-000000010-a0001", "step-000000008-a0002"], None, False),  # not newer
        (["step-000000010-a0001", "step-000000008-a0002"], 5, True),  # newer than what could be read
    ],
)
def test_an_attempt_without_an_end_was_killed_with_its_supervisor(
    tmp_path: Path, committed: list[str], restored: int | None, progressed: bool
) -> None:
    begin(tmp_path, submission="6")
    number = begin(tmp_path, checkpoints=("step-000000010-a0001",)).attempt
    for name in committed:
        commit(tmp_path, name)
    if restored is not None:
        write_restored(attempt_dir(tmp_path, number), restored)
    assert past_outcomes(tmp_path, "7") == [AttemptOutcome(FailureClass.KILLED, KILLED, progressed)]


def test_a_number_without_a_start_record_launched_nothing(tmp_path: Path) -> None:
    next_attempt(tmp_path)
    assert past_outcomes(tmp_path, "7") == []
    assert past_outcomes(tmp_path / "none", "7") == []
