"""The deputy, over a run directory whose heartbeat the test moves; Slurm's commands are of the test's making."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from hpctrain.launch import deputy
from tests.launch.conftest import Commands
from tests.launch.test_slurm_job import job
from tests.resilience.conftest import wait_until


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deputy, "_SILENCE_S", 0.3)
    monkeypatch.setattr(deputy, "_POLL_S", 0.02)


def beat(run_dir: Path, heartbeat: int) -> None:
    (run_dir / "owner.json").write_text(json.dumps({"heartbeat": heartbeat, "pid": 7}))


class Watch(threading.Thread):
    """The deputy's watch, with what it said at the end."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(daemon=True)
        self.said: str | None = None
        self._run_dir = run_dir

    def run(self) -> None:
        self.said = deputy.watch(self._run_dir, "n1", job())


def test_it_asks_nobody_while_the_supervisor_lives(commands: Commands, tmp_path: Path) -> None:
    commands.squeue(State="RUNNING 0\n", N="n2\n")
    commands.answer("sinfo", "n2 mixed\n")
    commands.answer("scontrol")
    watch, beats = Watch(tmp_path), iter(range(1000))
    beat(tmp_path, next(beats))
    watch.start()
    asked = len(commands.calls("squeue"))
    for _ in range(40):
        beat(tmp_path, next(beats))
        watch.join(0.02)
    assert watch.is_alive()
    assert len(commands.calls("squeue")) - asked <= 1, "only what the job itself asks when it is made"
    wait_until(lambda: watch.said is not None)
    assert commands.calls("scontrol") == [["requeue", "7"]], "silent, and its host is no longer the job's"


def test_a_silent_supervisor_on_a_host_that_lives_is_left_alone(commands: Commands, tmp_path: Path) -> None:
    commands.squeue(State="RUNNING 0\n", N="n[1-2]\n")
    commands.answer("sinfo", "n1 mixed*\nn2 mixed\n")
    commands.answer("scontrol")
    watch = Watch(tmp_path)
    watch.start()
    watch.join(1.0)
    assert watch.is_alive()
    assert commands.calls("scontrol") == []
    commands.squeue(State="COMPLETED 0\n", N="n[1-2]\n")
    watch.join(10)
    assert watch.said == "the job has ended"


def test_a_successor_waits_for_the_end_of_the_job_so_the_job_is_ended(
    commands: Commands, tmp_path: Path
) -> None:
    commands.squeue(State="RUNNING 0\n", N="n2\n", l="1:00:00\n")
    commands.answer("sinfo", "n2 mixed\n")
    commands.answer("scontrol", err="Requested operation is presently disabled\n", code=1)
    commands.answer("sbatch", "8\n")
    commands.answer("scancel")
    variables = {"HPCTRAIN_BATCH_SCRIPT": "/home/me/train.sbatch", "HPCTRAIN_BATCH_ARGUMENTS": "run.toml"}
    words = deputy.watch(tmp_path, "n1", job(**variables))
    assert "job 8 will go on after it" in words
    assert commands.calls("scancel") == [["7"]]
