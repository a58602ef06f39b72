"""Twenty SIGKILLs: whatever is killed whenever, the run ends with the state it would have had, and leaves no process.

Five while a checkpoint is being committed, five during a restore, two during the recovery from another kill, eight at
random moments and ranks. Named faults put the first twelve exactly where they belong (a process kills itself with
SIGKILL there); the random ones come from outside.
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
DEADLINE_S = 150

FIRST = "kill@step:rank=2,step=25,attempt=1"
PLACED = {
    "commit: before the files": "kill@checkpoint.write:rank=0,attempt=1,nth=2",
    "commit: before the manifest": "kill@checkpoint.manifest:rank=0,attempt=1,nth=3",
    "commit: before the rename": "kill@checkpoint.rename:rank=0,attempt=1,nth=2",
    "commit: after the rename": "kill@checkpoint.committed:rank=0,attempt=1,nth=3",
    "commit: while another rank dies": (
        "sleep@checkpoint.rename:rank=0,attempt=1,nth=2,s=1;kill@step:rank=1,attempt=1,step=21"
    ),
    "restore: rank 0 verifies": f"{FIRST};kill@restore.verify:rank=0,attempt=2",
    "restore: rank 1 verifies": f"{FIRST};kill@restore.verify:rank=1,attempt=2",
    "restore: rank 0 loads": f"{FIRST};kill@restore.load:rank=0,attempt=2",
    "restore: rank 2 loads": f"{FIRST};kill@restore.load:rank=2,attempt=2",
    "restore: twice": f"{FIRST};kill@restore.load:rank=1,attempt=2;kill@restore.verify:rank=1,attempt=3",
    "recovery: its first step": f"{FIRST};kill@step:rank=0,step=20,attempt=2",
    "recovery: its first exchange and its first save": (
        f"{FIRST};kill@exchange:rank=1,step=20,attempt=2;kill@checkpoint.rename:rank=0,attempt=3,nth=1"
    ),
}
RANDOM = range(8)


def finish(process: subprocess.Popen[str], run_dir: Path, undisturbed: dict[str, Any]) -> None:
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    found = result(run_dir)
    for key in ("state_digest", "weights_digest", "samples_digest", "steps"):
        assert found[key] == undisturbed[key], output
    assert found["restarts"] >= 1, "nothing was killed"
    assert not processes_of(run_dir)


@pytest.mark.parametrize("where", PLACED)
def test_killed_at(where: str, tmp_path: Path, data: Path, undisturbed: dict[str, Any]) -> None:
    process = start(toy_run(tmp_path, data), RANKS, tmp_path / "run", PLACED[where])
    finish(process, tmp_path / "run", undisturbed)
    kills = PLACED[where].count("kill@")
    ends = [read_json(path) for path in sorted((tmp_path / "run" / "attempts").glob("*/end.json"))]
    assert [end["failure"] for end in ends] == ["killed"] * kills + ["done"]


@pytest.mark.parametrize("number", RANDOM)
def test_killed_at_a_random_moment(
    number: int, tmp_path: Path, data: Path, undisturbed: dict[str, Any]
) -> None:
    """Two while the ranks start, six within the 3.6 s or more that the steps take (0.03 s per micro-batch)."""
    rng = random.Random(number)
    rank, delay_s = rng.randrange(RANKS), 2.5 * rng.random()
    attempt = tmp_path / "run" / "attempts" / "a0001"
    process = start(toy_run(tmp_path, data, task__options={"sleep_s": 0.03}), RANKS, tmp_path / "run")
    awaited = (
        attempt / "ranks" / f"{rank}.pid.json" if number % 4 == 0 else attempt / "events" / "rank-0.jsonl"
    )
    word = '"pid"' if number % 4 == 0 else '"kind":"step"'
    deadline = time.monotonic() + 60
    while not (awaited.exists() and word in awaited.read_text()):
        assert time.monotonic() < deadline, "the run does not get there"
        time.sleep(0.01)
    time.sleep(delay_s)
    os.kill(read_json(attempt / "ranks" / f"{rank}.pid.json")["pid"], signal.SIGKILL)
    finish(process, tmp_path / "run", undisturbed)
    assert result(tmp_path / "run")["restarts"] == 1
