"""The clock of a job, with a job whose queue the test plays and a clock that stands still: both would take hours."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.observe.progress import Pace
from hpctrain.resilience.clock import JobClock
from tests.resilience.conftest import FakeJob

MARGIN_S = 30.0


class Watch:
    """Stands for `time.monotonic`: hours pass at once."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    found = Watch()
    monkeypatch.setattr(time, "monotonic", found)
    return found


@pytest.fixture
def job() -> FakeJob:
    return FakeJob(left_s=3600.0)


def test_without_a_job_or_a_limit_there_is_no_end() -> None:
    for clock in (JobClock(None, MARGIN_S), JobClock(FakeJob(), MARGIN_S)):
        assert clock.left_s() is None
        assert not clock.leave_is_due(Pace(1e9, 1e9, 1e9))
        assert not clock.is_over()
        assert clock.has_room(Pace(1e9, 1e9, 1e9))
        assert clock.warned(), "who warns without an end in sight means now"


def test_time_passes_and_the_queue_is_asked_now_and_then(watch: Watch, job: FakeJob) -> None:
    clock = JobClock(job, MARGIN_S)
    watch.now_s += 100
    assert clock.left_s() == 3500
    assert job.asked == 1
    job.left_s = 7200.0  # the administrator has given it more time
    watch.now_s += 100
    assert clock.left_s() == 7200
    for _ in range(10):
        clock.left_s()
    assert job.asked == 2


def test_what_was_known_stays_where_the_queue_does_not_answer(watch: Watch, job: FakeJob) -> None:
    clock = JobClock(job, MARGIN_S)
    job.left_s = None
    watch.now_s += 1000
    assert clock.left_s() == 2600


def test_a_configured_walltime_counts_where_the_queue_says_nothing(watch: Watch, job: FakeJob) -> None:
    job.left_s = None
    clock = JobClock(job, MARGIN_S, walltime_s=600.0)
    watch.now_s += 100
    assert clock.left_s() == 500
    job.left_s = 60.0
    clock.ask()
    assert clock.left_s() == 60


def test_the_save_begins_as_late_as_two_saves_and_two_steps_allow(watch: Watch, job: FakeJob) -> None:
    clock, pace = JobClock(job, MARGIN_S), Pace(start_s=50.0, step_s=2.0, save_s=8.0)
    job.left_s = None  # from now on the queue does not answer
    watch.now_s += 3600 - MARGIN_S - 2 * (2 + 8) - 1
    assert not clock.leave_is_due(pace)
    watch.now_s += 1
    assert clock.leave_is_due(pace)
    assert not clock.is_over()
    watch.now_s += 2 * (2 + 8) + MARGIN_S / 2
    assert clock.is_over()


@given(
    left_s=st.floats(0, 1e5),
    start_s=st.floats(0, 1e4),
    step_s=st.floats(0, 1e4),
    save_s=st.floats(0, 1e4),
    margin_s=st.floats(1, 1e3),
)
def test_an_attempt_for_which_there_is_room_is_not_asked_to_leave_at_once(
    left_s: float, start_s: float, step_s: float, save_s: float, margin_s: float
) -> None:
    job, pace = FakeJob(left_s), Pace(start_s, step_s, save_s)
    clock = JobClock(job, margin_s)
    if clock.has_room(pace):
        assert left_s > margin_s + start_s
        assert not clock.leave_is_due(pace) or left_s - (margin_s + start_s + 2 * (step_s + save_s)) < 1
    if clock.is_over():
        assert clock.leave_is_due(pace)


def test_a_warning_is_left_to_the_clock_only_where_the_end_is_near(watch: Watch, job: FakeJob) -> None:
    clock = JobClock(job, MARGIN_S)
    assert clock.warned()
    job.left_s = 590.0  # preempted: the queue is asked anew with every warning
    assert not clock.warned()
    assert clock.left_s() == 590
