from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpctrain.config import RunConfig, parse_run
from hpctrain.launch.local import LocalLauncher
from hpctrain.observe.progress import LineProgress
from hpctrain.resilience.attempts import ATTEMPT_VARIABLE, EndSummary, list_attempts
from hpctrain.resilience.launching import Comeback, Job
from hpctrain.resilience.supervisor import Supervisor

WORKER = Path(__file__).with_name("worker.py")


def make_config(**resilience: Any) -> RunConfig:
    """A small run; keywords belong to the section `resilience`."""
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


def ends(tmp_path: Path) -> list[EndSummary]:
    found = [attempt.end for attempt in list_attempts(tmp_path / "run")]
    assert None not in found
    return [end for end in found if end is not None]


def wait_for_step(tmp_path: Path, step: int, attempt: int = 1) -> None:
    events = tmp_path / "run" / "attempts" / f"a{attempt:04d}" / "events" / "rank-0.jsonl"
    wait_until(lambda: events.exists() and f'"step":{step},' in events.read_text())


def processes_of(run_dir: Path) -> list[int]:
    """All processes that were started for a run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(ATTEMPT_VARIABLE, "").startswith(str(run_dir)):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def scratch_of(run_dir: Path) -> list[Path]:
    digest = hashlib.sha256(str(run_dir).encode()).hexdigest()[:12]
    return [path for parent in ("/tmp", "/dev/shm") for path in Path(parent).glob(f"hpctrain-*-{digest}-*")]


class Lines:
    """A stream that keeps what was said."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


class FakeJob:
    """A batch job whose queue the test plays: a real one needs minutes to run out of time."""

    def __init__(
        self, left_s: float | None = None, submission: str = "7", restart: int = 0, assured: bool = True
    ) -> None:
        self.id = self.submission = submission
        self.restart = restart
        self.submitted_unix_s = 1.7e9
        self.left_s = left_s
        self.asked = 0
        self.come_backs = 0
        self._assured = assured

    def seconds_left(self) -> float | None:
        self.asked += 1
        return self.left_s

    def is_alive(self, job: str) -> bool | None:
        return None

    def keep_script(self, run_dir: Path) -> None:
        pass

    def come_back(self) -> Comeback:
        self.come_backs += 1
        return Comeback(self._assured, f"job {self.id} {'comes' if self._assured else 'cannot come'} back")


@pytest.fixture
def no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCTRAIN_FAULTS", raising=False)


@pytest.fixture
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """After every test: no process and no scratch directory of its run."""
    yield
    assert processes_of(tmp_path / "run") == []
    assert scratch_of(tmp_path / "run") == []


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def supervise(tmp_path: Path, lines: Lines) -> Callable[..., int]:
    """Runs a supervisor over real mpirun and the test worker in `tmp_path / "run"`; returns its exit code."""

    def supervise(
        num_ranks: int = 2, linger_s: float = 10.0, job: Job | None = None, **resilience: Any
    ) -> int:
        launcher = LocalLauncher(num_ranks, [sys.executable, str(WORKER)])
        progress = LineProgress(lines)  # type: ignore[arg-type]
        config = make_config(**resilience)
        return Supervisor(
            tmp_path / "run", config, launcher, job=job, progress=progress, linger_s=linger_s
        ).run()

    return supervise
