"""What to do after an attempt: a pure function of how the attempts of this supervisor ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from hpctrain.config import ResilienceSection
from hpctrain.resilience.exits import FailureClass

_MAX_BACKOFF_S = 60.0


@dataclass(frozen=True)
class AttemptOutcome:
    """How one attempt ended, as far as the policy cares.

    `progressed`: a newer step was committed. `asked_to_leave`: the supervisor itself was asked to stop.
    """

    failure: FailureClass
    code: int
    progressed: bool
    asked_to_leave: bool = False


class ActionKind(StrEnum):
    """What the supervisor does next."""

    RELAUNCH = "relaunch"
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


def decide(history: Sequence[AttemptOutcome], limits: ResilienceSection) -> Action:
    """The action after the last attempt of `history` (the oldest first, at least one).

    Every run of decisions is finite: an attempt either ends it, or counts towards `max_attempts`.
    """
    last = history[-1]
    if last.failure is FailureClass.DONE:
        return Action(ActionKind.DONE, 0, reason="finished")
    if last.failure is FailureClass.USER:
        return Action(ActionKind.STOP, last.code, reason="another attempt would fail in the same way")
    if last.asked_to_leave:
        return Action(
            ActionKind.LEAVE, FailureClass.LEAVE.exit_code, reason="asked to leave; run again to resume"
        )
    exhausted = _exhausted(history, limits)
    if exhausted is not None:
        return Action(ActionKind.STOP, last.code or last.failure.exit_code, reason=exhausted)
    return Action(ActionKind.RELAUNCH, delay_s=_backoff_s(history, limits), reason=f"class {last.failure}")


def _exhausted(history: Sequence[AttemptOutcome], limits: ResilienceSection) -> str | None:
    without = sum(1 for _ in takewhile(lambda outcome: not outcome.progressed, reversed(history)))
    if without >= limits.max_no_progress:
        return (
            f"the last {without} attempts committed no newer step "
            f"(resilience.max_no_progress = {limits.max_no_progress})"
        )
    if len(history) >= limits.max_attempts:
        return f"{len(history)} attempts were made (resilience.max_attempts = {limits.max_attempts})"
    return None


def _backoff_s(history: Sequence[AttemptOutcome], limits: ResilienceSection) -> float:
    """Doubles with every I/O failure in a row; other classes relaunch at once."""
    failures = sum(
        1 for _ in takewhile(lambda outcome: outcome.failure is FailureClass.IO, reversed(history))
    )
    if failures == 0:
        return 0.0
    return float(min(limits.backoff_s * 2.0 ** min(failures - 1, 64), _MAX_BACKOFF_S))
