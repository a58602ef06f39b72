from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config import RunConfig, parse_run
from hpctrain.launch.local import LocalLauncher
from hpctrain.observe.progress import LineProgress
from hpctrain.resilience.supervisor import Supervisor

WORKER = Path(__file__).with_name("worker.py")


def make_config(**resilience: Any) -> RunConfig:
    return parse_run(
        {
            "name": "test",
            "task": {"name": "module:Class"},
            "data": {"train": "/data"},
            "lanes": {"num_lanes": 3, "lane_batch": 1},
            "train": {"epochs": 1},
            "resilience": {"backoff_s": 0.05, "hang_timeout_s": 20.0, **resilience},
        }
    )


def wait_until(condition: Callable[[], Any], timeout_s: float = 15.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s"
        time.sleep(0.01)


class Lines:
    """A stream that keeps what was said."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def supervise(tmp_path: Path, lines: Lines) -> Callable[..., int]:
    """Runs a supervisor over real mpirun and the test worker in `tmp_path / "run"`; returns its exit code."""

    def supervise(num_ranks: int = 2, linger_s: float = 10.0, **resilience: Any) -> int:
        launcher = LocalLauncher([sys.executable, str(WORKER)])
        progress = LineProgress(lines)  # type: ignore[arg-type]
        config = make_config(**resilience)
        supervisor = Supervisor(
            tmp_path / "run", config, num_ranks, launcher, progress=progress, linger_s=linger_s
        )
        return supervisor.run()

    return supervise
