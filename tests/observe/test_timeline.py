"""The story of a run, told from ledgers written by the real functions; a real run is in tests/cli/test_status.py."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hpctrain.cli.status import status
from hpctrain.errors import ConfigError, StorageError, UsageError
from hpctrain.observe.account import Seconds, read_account, read_marks, split_time
from hpctrain.observe.events import EventLog
from hpctrain.observe.slurm_state import SlurmState, ask_slurm, parse_sacct, parse_squeue
from hpctrain.observe.status import RunState, Status, describe_status, staging_now
from hpctrain.observe.story import DIED, RUNNING, UNKNOWN
from hpctrain.observe.timeline import Timeline, find_run_dir, read_timeline
from hpctrain.resilience.attempts import (
    EndSummary,
    StartRecord,
    admissible_checkpoints,
    attempt_dir,
    next_attempt,
    write_end,
    write_json,
    write_restored,
    write_start,
)
from hpctrain.resilience.exits import EndRecord, FailureClass, write_end_record
from hpctrain.resilience.lease import boot_id

BEGAN = 1_700_000_000.0
"""When the first attempt of these runs is launched."""
PHASES = (
    "start",
    "restore",
    "data",
    "compute",
    "exchange",
    "exchange after save",
    "reduce",
    "update",
    "save",
    "evaluate",
)


def mark(at_s: float, step: int, kind: str = "step", **phases: float) -> dict[str, Any]:
    return {"t": BEGAN + at_s, "kind": kind, "step": step, "phases": phases}


def split(events: list[dict[str, Any]], ended_s: float, **options: Any) -> dict[str, float]:
    seconds = split_time(
        events,
        started_unix_s=BEGAN,
        ended_unix_s=BEGAN + ended_s,
        **{"from_step": 0, **options},
    )
    return {name: pytest.approx(value) for name, value in asdict(seconds).items() if value}


# ---- where the time of one attempt went


def test_a_killed_attempt_lost_what_came_after_the_step_kept() -> None:
    events = [
        mark(6, 1, start=3, compute=1),  # training began at 5: two seconds lay before the phase `start`
        mark(17, 10, start=3, compute=8, exchange=2, save=0.5, evaluate=1.5),
        mark(22, 15, start=3, compute=12, exchange=3, save=0.5, evaluate=1.5),
    ]
    parts = {"start_up": 5, "evaluation": 1.5, "saving": 0.5}
    assert split(events, 30) == {**parts, "training": 15, "other": 8}
    assert split(events, 30, kept_step=10) == {**parts, "training": 10, "lost": 5, "other": 8}
    assert split(events, 30, kept_step=12) == {**parts, "training": 12, "lost": 3, "other": 8}
    assert split(events, 30, kept_step=0) == {"start_up": 5, "saving": 0.5, "lost": 16.5, "other": 8}


def test_an_evaluation_at_the_step_kept_is_not_lost() -> None:
    events = [
        mark(10, 10, compute=10),
        mark(14, 10, "phases", compute=10, evaluate=4),
        mark(16, 12, compute=12, evaluate=4),
    ]
    assert split(events, 16, kept_step=10) == {"training": 10, "evaluation": 4, "lost": 2}


def test_waiting_for_data_is_staging_only_while_the_copy_is_not_complete() -> None:
    events = [
        mark(4, 1, data=3, compute=1),
        mark(10, 4, data=5, compute=5),
        {"t": BEGAN + 10, "kind": "staging"},
        mark(20, 9, data=7, compute=13),
    ]
    assert split(events, 20, staged=True) == {"staging": 5, "training": 15}
    assert split(events, 20, staged=False) == {"training": 20}
    del events[2]
    assert split(events, 20, staged=True) == {"staging": 7, "training": 13}


def test_before_the_first_step() -> None:
    start, restore = ({"t": BEGAN + at_s, "kind": kind} for at_s, kind in ((4, "start"), (6, "restore")))
    assert split([], 9, from_step=None) == {"start_up": 9}
    assert split([start], 9, from_step=None) == {"start_up": 4, "restore": 5}
    assert split([start, restore], 9) == {"start_up": 4, "restore": 2, "other": 3}
    assert split([start], 9) == {"start_up": 4, "other": 5}  # there was nothing to restore


@given(
    increments=st.lists(st.tuples(st.sampled_from(PHASES), st.floats(0, 100)), min_size=1, max_size=30),
    gap_s=st.floats(0, 10),
    tail_s=st.floats(0, 100),
    kept_step=st.none() | st.integers(0, 40),
    staged_s=st.floats(0, 1000),
    staged=st.booleans(),
)
def test_the_parts_are_never_negative_and_add_up_to_the_whole(
    increments: list[tuple[str, float]],
    gap_s: float,
    tail_s: float,
    kept_step: int | None,
    staged_s: float,
    staged: bool,
) -> None:
    totals: dict[str, float] = {}
    events: list[dict[str, Any]] = [{"t": BEGAN + staged_s, "kind": "staging"}]
    for step, (phase, seconds) in enumerate(increments, start=1):
        totals[phase] = totals.get(phase, 0.0) + seconds
        events.append(mark(gap_s + sum(totals.values()), step, **totals))
    duration_s = gap_s + sum(totals.values()) + tail_s
    found = split_time(
        events,
        started_unix_s=BEGAN,
        ended_unix_s=BEGAN + duration_s,
        from_step=0,
        kept_step=kept_step,
        staged=staged,
    )
    assert all(value >= -1e-6 for value in asdict(found).values())
    assert found.total == pytest.approx(duration_s, abs=1e-5)
    assert found.saving == pytest.approx(totals.get("save", 0.0))
    if kept_step is None or kept_step >= len(increments):
        assert found.lost == 0


def test_a_very_long_attempt_is_read_in_part(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    steps = [mark(2.0 * step, step, compute=1.5 * step, data=0.5 * step) for step in range(1, 50_001)]
    lines = [json.dumps(event, separators=(",", ":")) for event in steps]
    lines.insert(7, '{"t":1,"kind":"checkpoint","step":3}')
    path.write_text("\n".join(lines) + '\n{"t":180001,"kind":"step","st')
    found = read_account(path)
    assert len(found) < 11_000
    assert [event["kind"] for event in found].count("checkpoint") == 1
    assert found[-1] == steps[-1]
    assert split(found, 100_000, kept_step=33_333) == {"training": 2 * 33_333, "lost": 100_000 - 2 * 33_333}


@pytest.mark.parametrize(
    "phases", [None, "text", {"compute": "much"}, {"compute": "nan"}, {"compute": None}, []]
)
def test_damaged_marks_are_passed_over(phases: Any) -> None:
    damaged = {"t": BEGAN, "kind": "step", "step": 3, "phases": phases}
    assert read_marks([damaged, {"kind": "phases", "phases": {"compute": 1}}]) == []


# ---- the ledger


class Ledger:
    """Writes what supervisors and ranks write."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "run.toml").write_text('name = "trial"\n')
        (run_dir / "owner.lock").touch()

    def begin(self, at_s: float = 0.0, **fields: Any) -> int:
        number = next_attempt(self.run_dir)
        values: dict[str, Any] = {
            "num_ranks": 2,
            "checkpoints": admissible_checkpoints(self.run_dir, number),
            "task_dir": "/",
            "host": "here",
            "pid": 1000,
            "boot_id": "a boot",
            "nodes": ["n1", "n2"],
            "started_unix_s": BEGAN + at_s,
            "version": "0",
        }
        write_start(self.run_dir, StartRecord(attempt=number, **{**values, **fields}))
        return number

    def restored(self, number: int, step: int) -> None:
        write_restored(attempt_dir(self.run_dir, number), step)
        if step:
            self.emit(number, "restore", name=self.name(step, number - 1), step=step)

    def trained(self, number: int, *marks: tuple[float, int, float]) -> None:
        """Marks of (seconds after the beginning, step, seconds of computing so far)."""
        path = attempt_dir(self.run_dir, number) / "events" / "rank-0.jsonl"
        with path.open("a") as stream:
            for at_s, step, compute in marks:
                stream.write(json.dumps(mark(at_s, step, compute=compute)) + "\n")

    def emit(self, number: int, kind: str, **fields: Any) -> None:
        log = EventLog(attempt_dir(self.run_dir, number) / "events" / "rank-0.jsonl")
        log.emit(kind, **fields)
        log.close()

    def save(self, number: int, step: int) -> None:
        directory = self.run_dir / "checkpoints" / self.name(step, number)
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_text("{}")

    def end(
        self, number: int, at_s: float, failure: FailureClass, before: int = 0, after: int = 0, step: int = -1
    ) -> None:
        summary = EndSummary(
            attempt=number,
            failure=failure,
            code=failure.exit_code,
            reason=f"it was {failure}",
            blamed_rank=None,
            blamed_node=None,
            asked_to_leave=False,
            step_before=before,
            step_after=after,
            ranks=[{"rank": 0, "step": step}, {"rank": 1}],
            launcher_code=0,
            launcher_says=None,
            started_unix_s=BEGAN,
            ended_unix_s=BEGAN + at_s,
        )
        write_end(self.run_dir, summary)

    def owned(self, attempt: int, **fields: Any) -> None:
        """A supervisor on this host: by default this very process."""
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "boot_id": boot_id(), "attempt": attempt}
        write_json(self.run_dir / "owner.json", {**owner, "heartbeat": 4, **fields})

    def read(self, now_s: float = 100.0) -> Timeline:
        return read_timeline(self.run_dir, BEGAN + now_s)

    @staticmethod
    def name(step: int, attempt: int) -> str:
        return f"step-{step:09d}-a{attempt:04d}"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "run")


def two_attempts(ledger: Ledger) -> None:
    """Attempt 1 commits step 10 and is killed at step 15, attempt 2 goes on from 10 and finishes at 20."""
    first = ledger.begin()
    ledger.restored(first, 0)
    ledger.trained(first, (5, 1, 1), (14, 10, 10), (19, 15, 15))
    ledger.save(first, 10)
    ledger.end(first, 20, FailureClass.KILLED, 0, 10)
    second = ledger.begin(21)
    ledger.restored(second, 10)
    ledger.trained(second, (26, 11, 1), (35, 20, 10))
    ledger.save(second, 20)
    ledger.end(second, 36, FailureClass.DONE, 10, 20)


def test_two_attempts(ledger: Ledger) -> None:
    two_attempts(ledger)
    first, second = ledger.read().attempts
    assert (first.ended, first.reason, first.nodes) == ("killed", "it was killed", ["n1", "n2"])
    assert (first.checkpoint, first.from_step) == (None, 0)
    assert (first.reached_step, first.steps_gained, first.steps_lost) == (15, 10, 5)
    assert first.seconds == Seconds(start_up=4, training=10, lost=5, other=1)
    assert (second.checkpoint, second.from_step) == ("step-000000010-a0001", 10)
    assert (second.steps_gained, second.steps_lost) == (10, 0)
    assert second.seconds == Seconds(start_up=5, training=10, other=1)  # with the second between the two
    assert ledger.read().seconds.total == 36
    assert ledger.read().last_checkpoint == "step-000000020-a0002"


def test_a_refused_checkpoint_costs_the_attempts_before_it(ledger: Ledger) -> None:
    """Attempt 2 went on from step 10, but attempt 3 had to go back to step 5: so steps 5 to 15 were made twice."""
    first = ledger.begin()
    ledger.restored(first, 0)
    ledger.trained(first, (5, 5, 5), (15, 15, 15))
    ledger.save(first, 5)
    ledger.save(first, 10)
    ledger.end(first, 15, FailureClass.BUG, 0, 10)
    second = ledger.begin(15)
    ledger.restored(second, 10)
    ledger.trained(second, (17, 12, 2))
    ledger.end(second, 17, FailureClass.BUG, 10, 10)
    third = ledger.begin(17)
    ledger.emit(third, "refused_checkpoint", name="step-000000010-a0001", reason="bytes do not match")
    ledger.restored(third, 5)
    ledger.owned(third)
    stories = ledger.read().attempts
    assert [story.steps_lost for story in stories] == [10, 2, 0]
    assert [story.seconds.lost for story in stories] == [10, 2, 0]
    assert stories[2].refused == ["step-000000010-a0001: bytes do not match"]
    assert stories[2].from_step == 5


SLURM = {"job": "12", "submitted_unix_s": BEGAN - 40}


@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        ({}, {}, [0, 0, 0, 3]),
        ({}, {"pid": 1001}, [0, 0, 0, 0]),  # the command was typed again: nobody waited for anything
        (SLURM, SLURM, [40, 0, 0, 3]),
        (SLURM, {**SLURM, "restart": 1, "pid": 7}, [40, 0, 3, 0]),
        (SLURM, {"job": "13", "submitted_unix_s": BEGAN + 22}, [40, 0, 1, 0]),
        (
            SLURM,
            {"job": "13", "submitted_unix_s": BEGAN + 1},
            [40, 0, 3, 0],
        ),  # waited for job 12 to end first
        (SLURM, {"job": "13"}, [40, 0, 0, 0]),
        ({"job": "12"}, {"job": "12"}, [0, 0, 0, 3]),
    ],
)
def test_queue_and_relaunch(
    ledger: Ledger, first: dict[str, Any], second: dict[str, Any], parts: list[float]
) -> None:
    """Queue and start-up of an attempt that ends 20 s after its launch, and of one launched 3 s later."""
    ledger.end(ledger.begin(**first), 20, FailureClass.OTHER)
    ledger.begin(23, **second)
    one, two = (story.seconds for story in ledger.read().attempts)
    assert [one.queue, one.start_up - 20, two.queue, two.start_up] == pytest.approx(parts)


def test_staging_is_that_of_the_attempt_that_runs(ledger: Ledger) -> None:
    said = {"node": "n1", "total_bytes": 4000, "shared_bytes": 1000, "peer_bytes": 0, "done": False}
    assert staging_now(ledger.read()).as_dict() is None
    first = ledger.begin(pid=os.getpid(), boot_id=boot_id())
    ledger.owned(first)
    ledger.emit(first, "staging", present_bytes=1000, **said)
    assert staging_now(ledger.read()).going_on() == "25 % of 4.0 kB on 1 node"
    app = typer.Typer()
    app.command()(status)
    screen = CliRunner().invoke(app, [str(ledger.run_dir)]).stdout
    assert re.search(r"^staging +25 % of 4.0 kB on 1 node$", screen, re.MULTILINE)
    document = json.loads(CliRunner().invoke(app, [str(ledger.run_dir), "--json"]).stdout)
    assert document["staging"]["present_bytes"] == 1000
    ledger.end(first, 50, FailureClass.KILLED)
    assert staging_now(ledger.read()).as_dict() is None, "what it staged may be gone"


def test_running_and_dead(ledger: Ledger) -> None:
    number = ledger.begin(pid=os.getpid(), boot_id=boot_id())
    ledger.restored(number, 0)
    ledger.trained(number, (5, 1, 1), (14, 10, 10))
    ledger.owned(number)
    running = ledger.read(now_s=20)
    assert running.attempts[0].ended == RUNNING
    assert running.attempts[0].seconds == Seconds(start_up=4, training=10, other=6)
    assert describe_status(running, None).state is RunState.RUNNING

    (ledger.run_dir / "owner.json").unlink()
    dead = ledger.read(now_s=10_000)
    assert dead.attempts[0].ended == DIED
    assert dead.attempts[0].reason == "no end record; last heard of at step 10"
    assert dead.attempts[0].steps_lost == 10
    assert dead.attempts[0].seconds == Seconds(
        start_up=4, lost=10
    )  # until it was last heard of, not until now
    assert describe_status(dead, None).state is RunState.STOPPED


def test_only_numbers_are_told_of_the_latest_step(ledger: Ledger) -> None:
    """Python reads and writes NaN, which is no JSON."""
    number = ledger.begin()
    path = attempt_dir(ledger.run_dir, number) / "events" / "rank-0.jsonl"
    path.write_text('{"kind": "step", "t": NaN, "step": 3, "steps_total": "many", "samples_per_s": 1e999}\n')
    timeline = ledger.read()
    assert timeline.latest == {"step": 3}
    assert timeline.attempts[0].ended_unix_s == BEGAN


def test_end_records_are_a_sign_of_life_too(ledger: Ledger) -> None:
    number = ledger.begin()
    record = EndRecord.now(1, FailureClass.PEER, step=4, phase="exchange")
    write_end_record(attempt_dir(ledger.run_dir, number), record)
    (story,) = ledger.read().attempts
    assert (story.reached_step, story.ended_unix_s) == (4, record.ended_unix_s)


@pytest.mark.parametrize(
    ("fields", "age_s", "alive"),
    [
        ({}, 0, True),
        ({}, 1e6, False),  # this process is younger than that heartbeat: the number was used again
        ({"pid": 2**22 + 1}, 0, False),
        ({"host": "elsewhere", "boot_id": "other"}, 5, True),
        ({"host": "elsewhere", "boot_id": "other"}, 60, False),
        ({"host": "elsewhere"}, 5, True),  # the same kernel, but its processes may be invisible here
        ({"pid": "many"}, 0, False),
    ],
)
def test_who_owns_the_run(ledger: Ledger, fields: dict[str, Any], age_s: float, alive: bool) -> None:
    ledger.owned(1, **fields)
    now_unix_s = time.time()
    os.utime(ledger.run_dir / "owner.json", (now_unix_s - age_s, now_unix_s - age_s))
    assert (read_timeline(ledger.run_dir, now_unix_s).owner is not None) is alive


def test_an_attempt_that_launched_nothing(ledger: Ledger) -> None:
    next_attempt(ledger.run_dir)
    (story,) = ledger.read().attempts
    assert (story.ended, story.seconds, story.num_ranks) == (DIED, Seconds(), None)
    assert story.missing == ["attempts/a0001/start.json is missing or damaged"]


# ---- damage


def files(ledger: Ledger) -> list[Path]:
    return sorted(path for path in ledger.run_dir.rglob("*") if path.is_file())


@pytest.mark.parametrize("how", ["gone", "empty", "cut", "binary", "another type", "a directory"])
def test_any_damage_is_told_and_not_fatal(tmp_path: Path, how: str) -> None:
    whole = Ledger(tmp_path / "whole")
    two_attempts(whole)
    for number, path in enumerate(files(whole)):
        ledger = Ledger(tmp_path / str(number))
        two_attempts(ledger)
        (ledger.run_dir / "result.json").write_text("{}")
        victim = ledger.run_dir / path.relative_to(whole.run_dir)
        content = victim.read_bytes()
        victim.unlink()
        if how == "a directory":
            victim.mkdir()
        elif how != "gone":
            new = {
                "empty": b"",
                "cut": content[: len(content) // 2],
                "binary": b"\xff\0\n",
                "another type": b"[1]",
            }
            victim.write_bytes(new[how])
        timeline = ledger.read()
        assert len(timeline.attempts) == 2, victim
        assert describe_status(timeline, None).state is RunState.FINISHED


def test_what_is_missing(ledger: Ledger) -> None:
    two_attempts(ledger)
    (ledger.run_dir / "run.toml").write_text("name =")
    (ledger.run_dir / "result.json").write_text("{")
    (ledger.run_dir / "attempts/a0001/end.json").write_text("{")
    (ledger.run_dir / "attempts/a0001/events/rank-0.jsonl").unlink()
    timeline = ledger.read()
    first = timeline.attempts[0]
    assert timeline.name == "run"
    assert ["run.toml" in timeline.missing[0], timeline.missing[1]] == [True, "result.json is damaged"]
    assert (first.ended, first.reason) == (UNKNOWN, "its end record is damaged")
    assert first.missing == ["attempts/a0001/end.json is damaged"]
    ledger.end(1, 20, FailureClass.KILLED, 0, 10, step=15)
    first = ledger.read().attempts[0]
    assert first.missing == [
        "attempts/a0001/events/rank-0.jsonl holds no times: all of its time counts as other"
    ]
    assert first.seconds == Seconds(other=20)


def test_reading_writes_nothing(ledger: Ledger) -> None:
    two_attempts(ledger)

    def state() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in ledger.run_dir.rglob("*")}

    before = state()
    ledger.read()
    assert state() == before


def test_a_directory_that_may_not_be_read(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    two_attempts(ledger)
    target = ledger.run_dir / "attempts"
    if os.geteuid() == 0:  # nothing is forbidden to root: the refusal has to be made up

        def refuse(path: Path) -> Any:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "iterdir", refuse)
    else:
        target.chmod(0)
    with pytest.raises(StorageError, match="attempts: cannot be read: Permission denied"):
        ledger.read()
    target.chmod(stat.S_IRWXU)


# ---- which run is meant


def test_which_run(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    description = tmp_path / "mine.toml"
    description.write_text(
        'name = "trial"\n[task]\nname = "m:C"\n[data]\ntrain = "d"\n'
        "[lanes]\nnum_lanes = 2\nlane_batch = 4\n[train]\nepochs = 1\n"
    )
    with pytest.raises(UsageError, match=r"runs/trial does not exist: .*mine.toml was not started"):
        find_run_dir(description)
    Ledger(tmp_path / "runs" / "trial")
    assert find_run_dir(description) == Path("runs/trial")
    assert find_run_dir(ledger.run_dir) == ledger.run_dir
    ledger.begin()
    assert find_run_dir(ledger.run_dir / "run.toml") == ledger.run_dir
    with pytest.raises(UsageError, match="is no run directory"):
        find_run_dir(tmp_path)
    with pytest.raises(UsageError, match="no such file or directory"):
        find_run_dir(tmp_path / "none")
    description.write_text("name")
    with pytest.raises(ConfigError, match="not valid TOML"):
        find_run_dir(description)


# ---- state


LEFT = FailureClass.LEAVE


@pytest.mark.parametrize(
    ("slurm", "state", "words"),
    [
        (None, RunState.STOPPED, "submit the same script again: it goes on from step-000000010-a0001"),
        (SlurmState("12", "PENDING", "BeginTime"), RunState.WAITING, ""),
        (SlurmState("12", "RUNNING", ""), RunState.STARTING, ""),
        (SlurmState("12", "CANCELLED", "by 0"), RunState.STOPPED, "submit the same script again"),
        (SlurmState("12", None, "squeue is not on PATH"), RunState.STOPPED, "see whether job 12 is still in"),
    ],
)
def test_what_slurm_says_counts_where_no_supervisor_is_at_work(
    ledger: Ledger, slurm: SlurmState | None, state: RunState, words: str
) -> None:
    number = ledger.begin(job="12")
    ledger.save(number, 10)
    ledger.end(number, 5, LEFT, 0, 10)
    found = describe_status(ledger.read(), slurm)
    assert (found.state, found.reason) == (state, "it was leave")
    assert found.next.startswith(words)
    assert bool(found.next) is bool(words)


def test_a_damaged_result_has_to_go(ledger: Ledger) -> None:
    """A supervisor takes any result for the end of the run."""
    two_attempts(ledger)
    result = ledger.run_dir / "result.json"
    result.write_text("{}")
    assert describe_status(ledger.read(), None) == Status(RunState.FINISHED, "finished", "", f"see {result}")
    result.write_text("{")
    found = describe_status(ledger.read(), None)
    assert found.headline == "finished, but its result is damaged"
    assert found.next == (
        f"remove {result}, and run the same command again: it goes on from step-000000020-a0002"
    )


def test_a_failure_comes_with_advice(ledger: Ledger) -> None:
    ledger.end(ledger.begin(), 5, FailureClass.HANG)
    found = describe_status(ledger.read(), None)
    assert found.headline == "stopped, attempt 1"
    assert "attempts/a0001/logs" in found.next
    assert found.next.endswith(
        "run the same command again: it goes on from the beginning (nothing was saved yet)"
    )


def test_leaving_without_a_newer_step_is_not_to_be_repeated(ledger: Ledger) -> None:
    ledger.end(ledger.begin(job="12"), 5, LEFT)
    assert describe_status(ledger.read(), None).next.startswith("it left without a newer step")


def test_a_supervisor_without_an_attempt_is_starting_one(ledger: Ledger) -> None:
    ledger.owned(0)
    first = describe_status(ledger.read(), None)
    assert (first.state, first.headline) == (RunState.STARTING, "about to launch its first attempt")
    ledger.end(ledger.begin(), 5, FailureClass.IO)
    later = describe_status(ledger.read(), None)
    assert (later.state, later.reason) == (RunState.STARTING, "it was io")


# ---- Slurm: the answers are those of a real 22.05


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_squeue, "RUNNING|None", "RUNNING"),
        (parse_squeue, "PENDING|BeginTime", "PENDING (BeginTime)"),
        (parse_squeue, "PENDING|Resources\nRUNNING|None", "PENDING (Resources)"),
        (parse_sacct, "COMPLETED|0:0", "COMPLETED (exit code 0:0)"),
        (parse_sacct, "CANCELLED by 1000|0:15", "CANCELLED (by 1000, exit code 0:15)"),
        (parse_sacct, "NODE_FAIL|0:0\nTIMEOUT|0:0", "TIMEOUT (exit code 0:0)"),
    ],
)
def test_the_words_of_slurm(parse: Any, text: str, words: str) -> None:
    assert str(parse("12", text)) == words


def test_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert str(ask_slurm("12")) == "not known (squeue is not on PATH)"


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("squeue", "sacct", "words"),
    [
        ("echo broken >&2; echo no controller >&2; exit 1", "exit 0", "not known (no controller)"),
        ("exit 3", "exit 0", "not known (squeue ended with code 3)"),
        ("exit 1", "echo 'COMPLETED|0:0'", "COMPLETED (exit code 0:0)"),
        ("exit 0", "exit 0", "not known (neither squeue nor sacct knows the job)"),
        ("sleep 30", "exit 0", "not known (squeue did not answer in 0.3 s)"),
    ],
)
def test_a_slurm_that_does_not_answer(
    squeue: str, sacct: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins, because a controller that is down, slow or forgetful at will is not to be had."""
    program(tmp_path / "squeue", squeue)
    program(tmp_path / "sacct", sacct)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("hpctrain.observe.slurm_state._TIMEOUT_S", 0.3)
    assert str(ask_slurm("12")) == words
