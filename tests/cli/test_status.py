"""`hpctrain status` and `hpctrain attempts`, on a real run that loses a rank, and on one whose supervisor is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hpctrain.cli.attempts import attempts
from hpctrain.cli.status import status
from hpctrain.errors import HpctrainError
from hpctrain.resilience.attempts import list_attempts
from tests.support import ROOT, read_json
from tests.toy import STEPS, processes_of, start, toy_data, toy_run, train

PARTS = {
    "queue",
    "start_up",
    "restore",
    "staging",
    "training",
    "evaluation",
    "saving",
    "lost",
    "other",
}
SLEEP_S = 0.06
"""Per micro-batch; a rank has two in a step."""
STEP_S = 2 * SLEEP_S
TRAINING = ("data", "compute", "exchange", "exchange after save", "reduce", "update")

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(status)
app.command()(attempts)


def call(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, [str(word) for word in arguments], env={"COLUMNS": "60"})
    if done.exception is not None:
        raise done.exception
    return done.stdout


def document(verb: str, run: Path) -> dict[str, Any]:
    found = json.loads(call(verb, run, "--json"), parse_constant=pytest.fail)  # NaN is no JSON
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_data(tmp_path_factory.mktemp("data")).root


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A finished run of two attempts: rank 1 was killed at step 25, five steps after the second save."""
    folder = tmp_path_factory.mktemp("disturbed run")
    description = toy_run(folder, data, task__options={"sleep_s": SLEEP_S})
    done = train(description, 2, folder / "run", "kill@step:rank=1,step=25,attempt=1")
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.mpi
@pytest.mark.slow
def test_the_figures_of_a_real_run(disturbed: Path) -> None:
    found = document("attempts", disturbed)
    killed, done = found["attempts"]
    assert (killed["ended"], done["ended"]) == ("killed", "done")
    assert (killed["steps_gained"], done["steps_gained"]) == (20, STEPS - 20)
    assert (killed["from_step"], done["from_step"]) == (0, 20)
    assert (killed["checkpoint"], done["checkpoint"]) == (None, "step-000000020-a0001")
    assert 4 <= killed["steps_lost"] <= 5  # the last step may have been made and not told
    assert done["steps_lost"] == 0
    assert killed["nodes"] == [os.uname().nodename]
    assert found["missing"] == killed["missing"] == done["missing"] == []


@pytest.mark.mpi
@pytest.mark.slow
def test_the_seconds_of_a_real_run(disturbed: Path) -> None:
    """They add up, and are those which the finished attempt itself wrote into the result."""
    found = document("attempts", disturbed)
    previous_s = list_attempts(disturbed)[0].start.started_unix_s  # type: ignore[union-attr]
    for attempt in found["attempts"]:
        assert set(attempt["seconds"]) == PARTS
        assert all(value >= 0 for value in attempt["seconds"].values())
        assert sum(attempt["seconds"].values()) == pytest.approx(
            attempt["ended_unix_s"] - previous_s, abs=0.05
        )
        previous_s = attempt["ended_unix_s"]
    killed, done = (attempt["seconds"] for attempt in found["attempts"])
    assert 3.5 * STEP_S < killed["lost"] < 12 * STEP_S
    assert killed["training"] == pytest.approx(4 * killed["lost"], rel=0.6)  # 20 steps against 5
    assert killed["start_up"] > 0.5  # mpirun and torch
    written = read_json(disturbed / "result.json")["seconds"]
    assert done["training"] + done["staging"] == pytest.approx(
        sum(written[name] for name in TRAINING), abs=0.02
    )
    assert done["saving"] == pytest.approx(written["save"], abs=0.02)
    assert done["evaluation"] == pytest.approx(written["evaluate"], abs=0.02)
    assert done["restore"] == pytest.approx(written["restore"], abs=0.02)
    assert done["lost"] == killed["evaluation"] == 0


@pytest.mark.mpi
@pytest.mark.slow
def test_the_tables_of_a_real_run(disturbed: Path) -> None:
    text = call("attempts", disturbed)
    assert re.search(
        r"1 +2 on \S+ +killed +rank 1 was killed \(signal 9\) after step 2\d +the beginning +20 +[45] ", text
    )
    assert re.search(r"2 +2 on \S+ +done +finished +step-000000020-a0001 +40 +0 ", text)
    screen = call("status", disturbed)
    assert re.search(r"^state +finished$", screen, re.MULTILINE)
    assert re.search(r"^checkpoint +step-000000060-a0002$", screen, re.MULTILINE)
    assert re.search(r"^time +attempt 2 +whole run +share$", screen, re.MULTILINE)
    assert len(screen.splitlines()) < 24
    for line in (text + screen).splitlines():
        assert len(line) <= 160
        assert line.isascii()
        assert line == line.rstrip()


@pytest.mark.mpi
@pytest.mark.slow
def test_running_then_dead_with_its_supervisor(tmp_path: Path, data: Path) -> None:
    process = start(toy_run(tmp_path, data, task__options={"sleep_s": 0.1}), 2, tmp_path / "run")
    try:
        found: dict[str, Any] = {"step": None}
        deadline_s = time.monotonic() + 90
        while (found["step"] or 0) < 12:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline_s, "the run does not get there"
            time.sleep(0.1)
            if (tmp_path / "run" / "attempts").exists():
                found = document("status", tmp_path / "run")
        assert (found["state"], found["attempt"], found["steps_total"]) == ("running", 1, STEPS)
        assert found["headline"].startswith("running, attempt 1, step 1")
        assert found["samples_per_s"] > 0
        assert found["seconds"]["training"] > 10 * 0.2
        assert document("attempts", tmp_path / "run")["attempts"][0]["ended"] == "running"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    deadline_s = time.monotonic() + 30
    while processes_of(tmp_path / "run"):  # the ranks die with it
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    found = document("status", tmp_path / "run")
    assert found["state"] == "stopped"
    assert found["reason"].startswith("no end record; last heard of at step 1")
    assert re.fullmatch(r"run the same command again: it goes on from step-000000010-a0001", found["next"]), (
        found
    )
    (story,) = document("attempts", tmp_path / "run")["attempts"]
    assert (story["ended"], story["steps_gained"]) == ("died with its supervisor", 10)
    assert story["steps_lost"] >= 2


def test_before_the_first_attempt(tmp_path: Path) -> None:
    (tmp_path / "owner.lock").touch()
    assert "no attempt was made yet" in call("attempts", tmp_path)
    assert re.search(r"^missing +run.toml is missing$", call("status", tmp_path), re.MULTILINE)
    assert document("status", tmp_path)["attempt"] is None
    assert document("attempts", tmp_path)["attempts"] == []


def test_where_nothing_is_known_no_times_are_shown(tmp_path: Path) -> None:
    events = tmp_path / "attempts" / "a0001" / "events" / "rank-0.jsonl"
    events.parent.mkdir(parents=True)
    events.write_text('{"kind": "step", "t": NaN, "step": 3, "samples_per_s": NaN}\n')
    assert "whole run" not in call("status", tmp_path)
    assert document("status", tmp_path)["samples_per_s"] is None
    assert document("attempts", tmp_path)["attempts"][0]["ended_unix_s"] is None


@pytest.mark.parametrize("verb", ["status", "attempts"])
def test_what_is_no_run_is_an_error_of_the_user(verb: str, tmp_path: Path) -> None:
    for path, words in ((tmp_path, "is no run directory"), (tmp_path / "none", "no such file or directory")):
        with pytest.raises(HpctrainError, match=words) as caught:
            call(verb, path)
        assert caught.value.exit_code == 64


@pytest.mark.parametrize("verb", ["status", "attempts"])
def test_help_has_an_example(verb: str) -> None:
    assert f"Example: hpctrain {verb} runs/digits" in call(verb, "--help").replace("\n", " ")


def test_neither_the_tasks_code_nor_torch_is_loaded(with_a_task_to_avoid: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom hpctrain.cli.status import status\n"
        "from hpctrain.cli.attempts import attempts\n"
        "for verb in (status, attempts):\n  verb(Path(sys.argv[1]), as_json=False)\n"
        "print([name for name in ('torch', 'mpi4py', 'horovod', 'h5py', 'numpy', 'evil') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(with_a_task_to_avoid)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{with_a_task_to_avoid}"},
    )
    assert found.stdout.splitlines()[-1] == "[]"


@pytest.fixture
def with_a_task_to_avoid(tmp_path: Path) -> Path:
    """A run directory with a Task beside it that must not be imported."""
    (tmp_path / "attempts" / "a0001").mkdir(parents=True)
    (tmp_path / "run.toml").write_text('name = "trial"\n[task]\nname = "evil:Task"\n')
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')\n")
    return tmp_path
