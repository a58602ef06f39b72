"""What to do after an attempt: a pure function of how the attempts of this submission ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from hpctrain.config import ResilienceSection
from hpctrain.resilience.exits import FailureClass

_MAX_BACKOFF_S = 60.0
_BACKED_OFF = (FailureClass.IO, FailureClass.OTHER)


@dataclass(frozen=True)
class AttemptOutcome:
    """How one attempt ended, as far as the policy cares.

    `progressed`: a newer step was committed. `asked_to_leave`: the supervisor itself was asked to stop.
    """

    failure: FailureClass
    code: int
    progressed: bool
    asked_to_leave: bool = False

    @property
    def is_free(self) -> bool:
        """Left in good order with something done: no budget counts it."""
        return self.failure is FailureClass.LEAVE and self.progressed


class ActionKind(StrEnum):
    """What the supervisor does next."""

    RELAUNCH = "relaunch"
    REQUEUE = "requeue"
    STOP = "stop"
    DONE = "done"
    LEAVE = "leave"


@dataclass(frozen=True)
class Action:
    """The decision: exit code for all but RELAUNCH, wait before it for RELAUNCH, and the reason in words."""

    kind: ActionKind
    code: int = 0
    delay_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What the next attempt would find.

    `queued`: this is a batch job, which can run again later. `obstacle`: why no attempt can follow here and now
    (time is short, processes of the last one survive); None: one can.
    """

    queued: bool = False
    obstacle: str | None = None


def decide(
    history: Sequence[AttemptOutcome], limits: ResilienceSection, around: Surroundings | None = None
) -> Action:
    """The action after the last attempt of `history` (the oldest first, at least one).

    Every run of decisions is finite: an attempt ends it, or counts towards `max_attempts`, or has made progress.
    """
    around, last = around or Surroundings(), history[-1]
    if last.failure is FailureClass.DONE:
        return Action(ActionKind.DONE, 0, reason="finished")
    if last.failure is FailureClass.USER:
        return Action(ActionKind.STOP, last.code, reason="another attempt would fail in the same way")
    if last.asked_to_leave and not around.queued:
        return Action(
            ActionKind.LEAVE, FailureClass.LEAVE.exit_code, reason="asked to leave; run again to resume"
        )
    exhausted = _exhausted(history, limits)
    if exhausted is not None:
        return Action(ActionKind.STOP, _code_of_giving_up(last), reason=exhausted)
    if around.queued and (last.asked_to_leave or last.failure is FailureClass.LEAVE):
        return _requeue("asked to leave")
    if around.obstacle is not None:
        return _requeue(around.obstacle) if around.queued else _stop(last, around.obstacle)
    return Action(ActionKind.RELAUNCH, delay_s=_backoff_s(history, limits), reason=f"class {last.failure}")


def nowhere_to_go(last: AttemptOutcome, around: Surroundings, obstacle: str) -> Action:
    """The action where a relaunch was decided and `obstacle` stands in its way."""
    return _requeue(obstacle) if around.queued else _stop(last, obstacle)


def _requeue(reason: str) -> Action:
    return Action(ActionKind.REQUEUE, FailureClass.LEAVE.exit_code, reason=reason)


def _stop(last: AttemptOutcome, reason: str) -> Action:
    return Action(ActionKind.STOP, _code_of_giving_up(last), reason=reason)


def _code_of_giving_up(last: AttemptOutcome) -> int:
    """Not that of `leave`: it would promise that running again helps."""
    if last.failure in (FailureClass.LEAVE, FailureClass.DONE):
        return FailureClass.OTHER.exit_code
    return last.code or last.failure.exit_code


def _exhausted(history: Sequence[AttemptOutcome], limits: ResilienceSection) -> str | None:
    without = sum(1 for _ in takewhile(lambda outcome: not outcome.progressed, reversed(history)))
    if without >= limits.max_no_progress:
        return (
            f"the last {without} attempts committed no newer step "
            f"(resilience.max_no_progress = {limits.max_no_progress})"
        )
    counted = sum(1 for outcome in history if not outcome.is_free)
    if counted >= limits.max_attempts:
        return f"{counted} attempts were made (resilience.max_attempts = {limits.max_attempts})"
    return None


def _backoff_s(history: Sequence[AttemptOutcome], limits: ResilienceSection) -> float:
    """Doubles with every failure of storage or launcher in a row; other classes relaunch at once."""
    failures = sum(1 for _ in takewhile(lambda outcome: outcome.failure in _BACKED_OFF, reversed(history)))
    if failures == 0:
        return 0.0
    return float(min(limits.backoff_s * 2.0 ** min(failures - 1, 64), _MAX_BACKOFF_S))
