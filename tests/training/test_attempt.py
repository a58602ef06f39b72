"""A rank of an attempt that goes on after a newer one was started: it ends, and says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from hpctrain.errors import PeerError
from hpctrain.resilience.exits import FailureClass, read_end_records
from hpctrain.training.loop import Run
from hpctrain.training.result import write_result
from tests.support import ROOT


@pytest.fixture
def superseded(tmp_path: Path) -> Path:
    """A run directory where attempt 1 was superseded by attempt 2."""
    for number in (1, 2):
        directory = tmp_path / "attempts" / f"a{number:04d}"
        directory.mkdir(parents=True)
        (directory / "start.json").write_text("{}")
    return tmp_path


def test_a_superseded_rank_does_not_begin(superseded: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain.training", str(superseded), "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=superseded,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    record = read_end_records(superseded / "attempts" / "a0001")[0]
    assert done.returncode == 76, done.stderr
    assert (record.failure, record.message) == (
        FailureClass.PEER,
        "attempt 1 was superseded by attempt 2: it ends here",
    )
    assert sorted(os.listdir(superseded)) == ["attempts"]


def test_a_superseded_rank_writes_no_result(superseded: Path) -> None:
    run = cast(Run, None)  # it is not looked at
    (superseded / "result.json").write_text(json.dumps({"steps": 5}))
    with pytest.raises(PeerError, match="superseded by attempt 2"):
        write_result(run, superseded, 1, {})
    result: dict[str, Any] = json.loads((superseded / "result.json").read_text())
    assert result == {"steps": 5}
