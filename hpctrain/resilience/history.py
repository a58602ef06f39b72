"""How the attempts of a submission ended, from the ledger: budgets outlive the supervisor."""

from __future__ import annotations

from pathlib import Path

from hpctrain.checkpoint.names import committed_checkpoints
from hpctrain.resilience.attempts import Attempt, StartRecord, list_attempts, step_before
from hpctrain.resilience.exits import FailureClass
from hpctrain.resilience.policy import AttemptOutcome


def past_outcomes(run_dir: Path, submission: str) -> list[AttemptOutcome]:
    """The outcomes of the attempts that belong to `submission`, the oldest first.

    An attempt without an end record died with its supervisor: it counts as killed.
    """
    return [
        _outcome(run_dir, attempt, attempt.start)
        for attempt in list_attempts(run_dir)
        if attempt.start is not None and attempt.start.submission == submission
    ]


def _outcome(run_dir: Path, attempt: Attempt, start: StartRecord) -> AttemptOutcome:
    end = attempt.end
    if end is not None:
        return AttemptOutcome(end.failure, end.code, end.steps_gained > 0, end.asked_to_leave)
    own = [
        name.step for name in committed_checkpoints(run_dir / "checkpoints") if name.attempt == attempt.number
    ]
    progressed = max(own, default=0) > step_before(start, attempt.path)
    return AttemptOutcome(FailureClass.KILLED, FailureClass.KILLED.exit_code, progressed)
