"""The same bodies at 1, 2, 3 and 4 ranks (oversubscribed)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.mpi import bodies
from tests.support import mpirun

DEADLINE_S = 150
ROOT = Path(__file__).parents[2]


@cache
def outcome(ranks: int, folder: Path) -> dict[str, list[str]]:
    result = folder / f"bodies-{ranks}.json"
    command = [
        *mpirun(ranks),
        sys.executable,
        "-m",
        "tests.mpi.runner",
        str(result),
        str(folder / str(ranks)),
    ]
    env = {**os.environ, "HOROVOD_FUSION_THRESHOLD": "1000000"}  # the product overrules it
    done = subprocess.run(
        command, cwd=ROOT, env=env, timeout=DEADLINE_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(result.read_text())


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bodies")


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", list(bodies.ALL))
def test_body(name: str, ranks: int, folder: Path) -> None:
    failures = outcome(ranks, folder)[name]
    assert not failures, "\n".join(failures)
