from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config import ResilienceSection
from hpctrain.resilience.exits import FailureClass
from hpctrain.resilience.policy import Action, ActionKind, AttemptOutcome, Surroundings, decide, nowhere_to_go

LIMITS = ResilienceSection(max_attempts=8, max_no_progress=3, backoff_s=1.0)


def outcome(
    failure: str, progressed: bool = False, asked: bool = False, code: int | None = None
) -> AttemptOutcome:
    found = FailureClass(failure)
    return AttemptOutcome(found, found.exit_code if code is None else code, progressed, asked)


outcomes = st.builds(
    lambda failure, progressed, asked: outcome(failure, progressed, asked),
    st.sampled_from(list(FailureClass)),
    st.booleans(),
    st.booleans(),
)
limits = st.builds(
    ResilienceSection,
    max_attempts=st.integers(1, 10),
    max_no_progress=st.integers(1, 5),
    backoff_s=st.floats(0, 10),
)


@given(st.lists(outcomes, min_size=1, max_size=12), limits)
def test_classes_that_end_a_run_end_it(history: list[AttemptOutcome], bounds: ResilienceSection) -> None:
    action, last = decide(history, bounds), history[-1]
    if last.failure is FailureClass.DONE:
        assert (action.kind, action.code) == (ActionKind.DONE, 0)
    elif last.failure is FailureClass.USER:
        assert (action.kind, action.code) == (ActionKind.STOP, last.code)
    elif last.asked_to_leave:
        assert (action.kind, action.code) == (ActionKind.LEAVE, 75)
    else:
        assert action.kind in (ActionKind.RELAUNCH, ActionKind.STOP)
    assert action.kind in (ActionKind.RELAUNCH, ActionKind.DONE) or action.code != 0


@given(st.lists(outcomes, min_size=30, max_size=30), limits)
def test_every_history_ends(history: list[AttemptOutcome], bounds: ResilienceSection) -> None:
    """Whatever attempts do, decisions stop within max_attempts, and within max_no_progress idle ones."""
    idle = 0
    for made in range(1, len(history) + 1):
        idle = 0 if history[made - 1].progressed else idle + 1
        if decide(history[:made], bounds).kind is not ActionKind.RELAUNCH:
            break
        assert made < bounds.max_attempts
        assert idle < bounds.max_no_progress
    assert made <= bounds.max_attempts


@given(st.lists(outcomes, min_size=1, max_size=12), limits)
def test_waits_are_bounded_and_only_for_storage_and_launchers(
    history: list[AttemptOutcome], bounds: ResilienceSection
) -> None:
    action = decide(history, bounds)
    assert 0 <= action.delay_s <= 60
    if action.delay_s:
        assert history[-1].failure in (FailureClass.IO, FailureClass.OTHER)
        assert action.kind is ActionKind.RELAUNCH


@pytest.mark.parametrize("failure", ["hang", "bug", "killed", "other", "peer", "leave", "io"])
def test_no_progress_stops_with_the_code_of_the_class(failure: str) -> None:
    history = [outcome(failure)] * 2
    assert decide(history, LIMITS).kind is ActionKind.RELAUNCH
    action = decide([*history, outcome(failure)], LIMITS)
    code = (
        72 if failure == "leave" else FailureClass(failure).exit_code
    )  # 75 would promise that running again helps
    assert (action.kind, action.code) == (ActionKind.STOP, code)
    assert "max_no_progress = 3" in action.reason


def test_progress_begins_the_count_anew() -> None:
    history = [outcome("killed"), outcome("killed"), outcome("killed", progressed=True), outcome("killed")]
    assert decide(history, LIMITS).kind is ActionKind.RELAUNCH


def test_attempts_are_bounded_even_with_progress() -> None:
    history = [outcome("killed", progressed=True)] * 8
    assert decide(history[:7], LIMITS).kind is ActionKind.RELAUNCH
    assert "max_attempts = 8" in decide(history, LIMITS).reason


def test_leaving_unasked_is_free_only_with_progress() -> None:
    assert decide([outcome("leave", progressed=True)] * 7, LIMITS).kind is ActionKind.RELAUNCH
    assert decide([outcome("leave")] * 3, LIMITS).kind is ActionKind.STOP


QUEUED = Surroundings(queued=True)
surroundings = st.builds(Surroundings, st.booleans(), st.sampled_from([None, "time is short"]))


@given(st.lists(outcomes, min_size=1, max_size=12), limits, surroundings)
def test_what_each_action_promises(
    history: list[AttemptOutcome], bounds: ResilienceSection, around: Surroundings
) -> None:
    action, last = decide(history, bounds, around), history[-1]
    if action.kind is ActionKind.REQUEUE:
        assert around.queued
        assert action.code == 75
        assert last.asked_to_leave or last.failure is FailureClass.LEAVE or around.obstacle is not None
    if action.kind is ActionKind.LEAVE:
        assert not around.queued, "a job that could go on by itself must not end with a request to the user"
        assert last.asked_to_leave
    if action.kind is ActionKind.RELAUNCH:
        assert around.obstacle is None
        assert not last.asked_to_leave
    if action.kind is ActionKind.STOP:
        assert action.code not in (0, 75)
    if around.queued and last.asked_to_leave and last.failure not in (FailureClass.DONE, FailureClass.USER):
        assert action.kind in (ActionKind.REQUEUE, ActionKind.STOP)


@settings(deadline=None)
@given(st.lists(st.tuples(outcomes, surroundings), min_size=30, max_size=30), limits)
def test_every_sequence_of_decisions_is_finite_except_for_progress(
    future: list[tuple[AttemptOutcome, Surroundings]], bounds: ResilienceSection
) -> None:
    """Over relaunches and requeues alike, attempts that are not free are at most `max_attempts`."""
    history: list[AttemptOutcome] = []
    for outcome_then, around in future:
        history.append(outcome_then)
        if decide(history, bounds, around).kind not in (ActionKind.RELAUNCH, ActionKind.REQUEUE):
            break
        assert sum(not item.is_free for item in history) < bounds.max_attempts
        idle = next((n for n, item in enumerate(reversed(history)) if item.progressed), len(history))
        assert idle < bounds.max_no_progress


@given(limits, st.booleans())
def test_leaving_without_progress_is_not_requeued_for_ever(bounds: ResilienceSection, asked: bool) -> None:
    requeues, history = 0, [outcome("leave", asked=asked)]
    while decide(history, bounds, QUEUED).kind is ActionKind.REQUEUE:
        requeues += 1
        history.append(outcome("leave", asked=asked))
    assert requeues == min(bounds.max_no_progress, bounds.max_attempts) - 1
    last = decide(history, bounds, QUEUED)
    assert (last.kind, last.code) == (ActionKind.STOP, 72)


def test_leaving_with_progress_is_free() -> None:
    """A run of a hundred walltimes is requeued a hundred times, and keeps its budget for failures."""
    history = [outcome("leave", progressed=True, asked=True)] * 100
    assert all(item.is_free for item in history)
    assert decide(history, LIMITS, QUEUED).kind is ActionKind.REQUEUE
    failures = [outcome("killed", progressed=True)] * 7
    assert decide([*history, *failures], LIMITS, QUEUED).kind is ActionKind.RELAUNCH
    assert "8 attempts were made" in decide([*history, *failures, failures[0]], LIMITS, QUEUED).reason
    for other in (outcome("leave"), outcome("killed", progressed=True), outcome("killed", True, asked=True)):
        assert not other.is_free


def test_an_obstacle_sends_a_job_back_and_stops_a_run_without_one() -> None:
    history = [outcome("killed", progressed=True)]
    blocked = Surroundings(queued=True, obstacle="4 s are left of the job")
    assert decide(history, LIMITS, blocked) == Action(
        ActionKind.REQUEUE, 75, reason="4 s are left of the job"
    )
    assert decide(history, LIMITS, Surroundings(obstacle="survivors")) == Action(
        ActionKind.STOP, FailureClass.KILLED.exit_code, reason="survivors"
    )
    for around, kind in ((QUEUED, ActionKind.REQUEUE), (Surroundings(), ActionKind.STOP)):
        found = nowhere_to_go(history[-1], around, "not enough nodes")
        assert (found.kind, found.reason) == (kind, "not enough nodes")


def test_a_job_that_is_asked_to_leave_while_it_fails_is_requeued() -> None:
    """The save did not finish, or a rank fell over on its way out: the last checkpoint is what there is."""
    assert decide([outcome("killed", asked=True)], LIMITS, QUEUED).kind is ActionKind.REQUEUE
    assert decide([outcome("done", asked=True)], LIMITS, QUEUED).kind is ActionKind.DONE
    assert decide([outcome("user", asked=True)], LIMITS, QUEUED).kind is ActionKind.STOP


def test_waits_double_while_storage_fails() -> None:
    bounds = ResilienceSection(max_attempts=100, max_no_progress=100, backoff_s=2.0)
    waits = [decide([outcome("io")] * count, bounds).delay_s for count in range(1, 9)]
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60]
    assert decide([outcome("io"), outcome("bug"), outcome("io")], bounds).delay_s == 2


def test_the_users_own_code_is_kept() -> None:
    assert decide([outcome("user", code=65)], LIMITS).code == 65
