"""Two dozen SIGKILLs: whatever is killed whenever, the run ends with its undisturbed state, and leaves no process.

Five while a checkpoint is being committed, six during a restore, three during the recovery from another kill, two to
begin with, eight at random moments and ranks. Named faults put the first sixteen exactly where they belong (a process
kills itself with SIGKILL there); the random ones come from outside. Several hit one run, one attempt after the other.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import read_json
from tests.toy import processes_of, result, start, toy_run

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

RANKS = 3
DEADLINE_S = 350

FIRST = "kill@step:rank=2,step=25,attempt=1"
PLACED = {
    "commit": [
        "kill@checkpoint.write:rank=0,attempt=1,nth=2",  # before the files of step 20
        "kill@checkpoint.manifest:rank=0,attempt=2,nth=2",  # between those of step 30 and their manifest
        "kill@checkpoint.rename:rank=0,attempt=3,nth=2",  # before step 40 is published
        "kill@checkpoint.committed:rank=0,attempt=4,nth=1",  # just after it is
        # while step 50 is being committed, another rank dies
        "sleep@checkpoint.rename:rank=0,attempt=5,nth=1,s=1",
        "kill@step:rank=1,attempt=5,step=51",
    ],
    "restore": [
        FIRST,
        "kill@restore.verify:rank=0,attempt=2",
        "kill@restore.verify:rank=1,attempt=3",
        "kill@restore.load:rank=0,attempt=4",
        "kill@restore.load:rank=2,attempt=5",
        "kill@restore.load:rank=1,attempt=6",
        "kill@restore.verify:rank=2,attempt=7",
    ],
    "recovery": [
        FIRST,
        "kill@step:rank=0,step=20,attempt=2",
        "kill@exchange:rank=1,step=20,attempt=3",
        "kill@checkpoint.rename:rank=0,attempt=4,nth=1",
    ],
}
RANDOM_RUNS = range(4)
KILLS_PER_RUN = 2


def finish(process: subprocess.Popen[str], run_dir: Path, undisturbed: dict[str, Any]) -> None:
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    found = result(run_dir)
    for key in ("state_digest", "weights_digest", "samples_digest", "steps"):
        assert found[key] == undisturbed[key], output
    assert found["restarts"] >= 1, "nothing was killed"
    assert not processes_of(run_dir)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("where", PLACED)
def test_killed_at(where: str, tmp_path: Path, data: Path, undisturbed: dict[str, Any]) -> None:
    description = toy_run(tmp_path, data, resilience__max_no_progress=20)
    process = start(description, RANKS, tmp_path / "run", ";".join(PLACED[where]))
    finish(process, tmp_path / "run", undisturbed)
    kills = sum("kill@" in fault for fault in PLACED[where])
    ends = [read_json(path) for path in sorted((tmp_path / "run" / "attempts").glob("*/end.json"))]
    assert [end["failure"] for end in ends] == ["killed"] * kills + ["done"]


@pytest.mark.parametrize("number", RANDOM_RUNS)
def test_killed_at_random_moments(
    number: int, tmp_path: Path, data: Path, undisturbed: dict[str, Any]
) -> None:
    """One of four while the ranks start, the others within the seconds that the steps take (0.03 s per micro-batch)."""
    rng = random.Random(number)
    description = toy_run(tmp_path, data, task__options={"sleep_s": 0.03}, resilience__max_no_progress=20)
    process = start(description, RANKS, tmp_path / "run")
    for kill in range(KILLS_PER_RUN):
        kill_at_random(tmp_path / "run" / "attempts" / f"a{kill + 1:04d}", rng, (number + kill) % 4 == 0)
    finish(process, tmp_path / "run", undisturbed)
    assert result(tmp_path / "run")["restarts"] == KILLS_PER_RUN


def kill_at_random(attempt: Path, rng: random.Random, while_it_starts: bool) -> None:
    rank, delay_s = rng.randrange(RANKS), 1.5 * rng.random()
    awaited = (
        attempt / "ranks" / f"{rank}.pid.json" if while_it_starts else attempt / "events" / "rank-0.jsonl"
    )
    word = '"pid"' if while_it_starts else '"kind":"step"'
    deadline = time.monotonic() + 60
    while not (awaited.exists() and word in awaited.read_text()):
        assert time.monotonic() < deadline, "the run does not get there"
        time.sleep(0.01)
    time.sleep(delay_s)
    os.kill(read_json(attempt / "ranks" / f"{rank}.pid.json")["pid"], signal.SIGKILL)
