from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config import ResilienceSection
from hpctrain.resilience.exits import FailureClass
from hpctrain.resilience.policy import ActionKind, AttemptOutcome, decide

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
def test_waits_are_bounded_and_only_for_storage(
    history: list[AttemptOutcome], bounds: ResilienceSection
) -> None:
    action = decide(history, bounds)
    assert 0 <= action.delay_s <= 60
    if action.delay_s:
        assert history[-1].failure is FailureClass.IO
        assert action.kind is ActionKind.RELAUNCH


@pytest.mark.parametrize("failure", ["hang", "bug", "killed", "other", "peer", "leave", "io"])
def test_no_progress_stops_with_the_code_of_the_class(failure: str) -> None:
    history = [outcome(failure)] * 2
    assert decide(history, LIMITS).kind is ActionKind.RELAUNCH
    action = decide([*history, outcome(failure)], LIMITS)
    assert (action.kind, action.code) == (ActionKind.STOP, FailureClass(failure).exit_code)
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


def test_waits_double_while_storage_fails() -> None:
    bounds = ResilienceSection(max_attempts=100, max_no_progress=100, backoff_s=2.0)
    waits = [decide([outcome("io")] * count, bounds).delay_s for count in range(1, 9)]
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60]
    assert decide([outcome("io"), outcome("bug"), outcome("io")], bounds).delay_s == 2


def test_the_users_own_code_is_kept() -> None:
    assert decide([outcome("user", code=65)], LIMITS).code == 65
