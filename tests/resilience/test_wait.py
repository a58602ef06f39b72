"""The watch from outside, with real processes as ranks and short limits."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpctrain.config import ResilienceSection
from hpctrain.resilience import wait
from hpctrain.resilience.exits import EndRecord, FailureClass, write_end_record
from hpctrain.resilience.wait import AttemptWatch
from tests.resilience.conftest import wait_until

LINGER_S = 0.3


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait, "_CHECK_S", 0.01)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Starts a process that stands for a rank."""
    started = []

    def start(number: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "60"])
        started.append(process)
        (tmp_path / "ranks").mkdir(exist_ok=True)
        identity = {"host": socket.gethostname(), "pid": process.pid}
        (tmp_path / "ranks" / f"{number}.pid.json").write_text(json.dumps(identity))
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def watch(tmp_path: Path, start_timeout_s: float = 30.0, hang_timeout_s: float = 30.0) -> AttemptWatch:
    limits = ResilienceSection(start_timeout_s=start_timeout_s, hang_timeout_s=hang_timeout_s)
    return AttemptWatch(tmp_path, 2, limits, LINGER_S)


def record(tmp_path: Path, number: int, failure: FailureClass) -> None:
    write_end_record(tmp_path, EndRecord.now(number, failure, step=1, phase="compute"))


def verdict_of(found: AttemptWatch) -> str:
    words: list[str | None] = []

    def overdue() -> str | None:
        words.append(found.overdue())
        return words[-1]

    wait_until(overdue, 5)
    return words[-1] or ""


def stays_quiet(found: AttemptWatch) -> bool:
    with pytest.raises(AssertionError, match="not within"):
        wait_until(found.overdue, 3 * LINGER_S)
    return True


def test_running_ranks_may_run(tmp_path: Path, rank: Callable[[int], object]) -> None:
    rank(0), rank(1)
    assert stays_quiet(watch(tmp_path))


def test_a_vanished_rank_starts_the_clock(
    tmp_path: Path, rank: Callable[[int], subprocess.Popen[bytes]]
) -> None:
    rank(0)
    gone = rank(1)
    found = watch(tmp_path)
    assert found.overdue() is None
    gone.kill()  # not waited for: a zombie is gone, too
    assert "rank 1 ended and the launcher did not end the others" in verdict_of(found)


def test_a_failed_rank_starts_the_clock_even_while_it_lives(
    tmp_path: Path, rank: Callable[[int], object]
) -> None:
    rank(0), rank(1)
    record(tmp_path, 0, FailureClass.HANG)
    assert "rank 0 ended" in verdict_of(watch(tmp_path))


def test_finished_ranks_and_a_launcher_that_stays(tmp_path: Path) -> None:
    for number in (0, 1):
        record(tmp_path, number, FailureClass.DONE)
    assert "all ranks ended" in verdict_of(watch(tmp_path))


def test_a_finished_rank_gives_the_others_time_and_not_for_ever(
    tmp_path: Path, rank: Callable[[int], object]
) -> None:
    rank(0), rank(1)
    record(tmp_path, 0, FailureClass.DONE)
    assert stays_quiet(watch(tmp_path))
    assert "rank 0 is finished" in verdict_of(watch(tmp_path, hang_timeout_s=0.2))


def test_ranks_on_other_hosts_count_as_started_and_not_as_gone(
    tmp_path: Path, rank: Callable[[int], object]
) -> None:
    rank(0)
    (tmp_path / "ranks" / "1.pid.json").write_text('{"host": "another-host", "pid": 4194305}')
    assert stays_quiet(watch(tmp_path, start_timeout_s=0.1))


def test_ranks_that_never_start(tmp_path: Path, rank: Callable[[int], object]) -> None:
    rank(0)
    assert stays_quiet(watch(tmp_path))
    assert "only 1 of 2 ranks started" in verdict_of(watch(tmp_path, start_timeout_s=0.2))


@pytest.mark.parametrize("name", ["read_end_records", "started_ranks"])
def test_a_filesystem_that_does_not_answer_brings_nothing_new(
    tmp_path: Path, rank: Callable[[int], object], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And does not stop the clock for what was seen before."""

    def stale(*_: object) -> None:  # no filesystem here gives ESTALE on demand
        raise OSError(errno.ESTALE, "Stale file handle")

    rank(0), rank(1)
    found = watch(tmp_path)
    assert found.overdue() is None
    with monkeypatch.context() as patch:
        patch.setattr(wait, name, stale)
        assert stays_quiet(found)
    record(tmp_path, 0, FailureClass.HANG)
    wait_until(lambda: found.overdue() is None and "broken" in found._since)
    monkeypatch.setattr(wait, name, stale)
    assert "rank 0 ended" in verdict_of(found)


def test_a_record_that_cannot_be_read_now_is_read_later(
    tmp_path: Path, rank: Callable[[int], object]
) -> None:
    rank(0), rank(1)
    path = tmp_path / "ranks" / "0.json"
    path.mkdir()  # EISDIR, for root too
    found = watch(tmp_path)
    assert stays_quiet(found)
    path.rmdir()
    record(tmp_path, 0, FailureClass.HANG)
    assert "rank 0 ended" in verdict_of(found)
