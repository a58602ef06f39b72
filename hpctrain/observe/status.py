"""How a run stands, in one look: from its directory, and from what Slurm says of its job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hpctrain.observe.slurm_state import SlurmState
from hpctrain.observe.staging import StagingView, read_staging
from hpctrain.observe.story import RUNNING
from hpctrain.observe.timeline import Timeline
from hpctrain.resilience.attempts import attempt_dir, read_end, read_json
from hpctrain.resilience.exits import FailureClass
from hpctrain.resilience.explain import advice


class RunState(StrEnum):
    """What a run is doing."""

    FINISHED = "finished"
    RUNNING = "running"
    STARTING = "starting"
    """A supervisor, or the job that will start it, is at work; no attempt runs."""
    WAITING = "waiting"
    """In the queue."""
    STOPPED = "stopped"


@dataclass(frozen=True)
class Status:
    """A run in a few words. `reason` says why it is not running, `next` what the user is to do; empty: nothing."""

    state: RunState
    headline: str
    reason: str
    next: str


def describe_status(timeline: Timeline, slurm: SlurmState | None) -> Status:
    """The state of a run; `slurm` is that of its last job (None: it has none)."""
    last = timeline.attempts[-1] if timeline.attempts else None
    reason = "" if last is None else last.reason
    if timeline.finished:
        return _finished(timeline)
    if last is not None and last.ended == RUNNING:
        return Status(RunState.RUNNING, f"running{_where(timeline)}, {describe_pace(timeline)}", "", "")
    if timeline.owner is not None:
        headline = "about to launch its first attempt" if last is None else "between two attempts"
        return Status(RunState.STARTING, headline + _where(timeline), reason, "")
    if slurm is not None and slurm.is_waiting:
        return Status(RunState.WAITING, f"waiting in the queue, job {slurm.job}: {slurm}", reason, "")
    if slurm is not None and slurm.is_at_work:
        headline = (
            f"job {slurm.job} is at work, but its supervisor is not: it has not begun, or is just ending"
        )
        return Status(RunState.STARTING, headline, reason, "")
    return Status(RunState.STOPPED, f"stopped{_where(timeline)}", reason, _next(timeline, slurm))


def _finished(timeline: Timeline) -> Status:
    """A result counts by being there, and nobody writes it again: a damaged one has to go first."""
    result = timeline.run_dir / "result.json"
    if read_json(result) is not None:
        return Status(RunState.FINISHED, "finished", "", f"see {result}")
    headline = "finished, but its result is damaged"
    return Status(RunState.FINISHED, headline, "", f"remove {result}, and {_again(timeline)}")


def describe_pace(timeline: Timeline) -> str:
    """Step, steps in all, and samples per second as last heard of."""
    latest: dict[str, Any] = timeline.latest
    if "step" not in latest:
        return "before its first step"
    words = f"step {latest['step']}/{latest.get('steps_total', '?')}"
    rate = latest.get("samples_per_s")
    return f"{words}, {rate:.4g} samples/s" if isinstance(rate, int | float) else words


def staging_now(timeline: Timeline) -> StagingView:
    """How far staging is in the attempt that runs; an empty view where none does."""
    last = timeline.attempts[-1] if timeline.attempts else None
    if last is None or last.ended != RUNNING:
        return StagingView()
    return read_staging(attempt_dir(timeline.run_dir, last.number) / "events")


def _where(timeline: Timeline) -> str:
    last = timeline.attempts[-1] if timeline.attempts else None
    if last is None:
        return ""
    return (f" in job {last.job}" if last.job else "") + f", attempt {last.number}"


def _again(timeline: Timeline) -> str:
    point = timeline.last_checkpoint or "the beginning (nothing was saved yet)"
    return f"{'submit the same script' if timeline.job else 'run the same command'} again: it goes on from {point}"


def _next(timeline: Timeline, slurm: SlurmState | None) -> str:
    again = _again(timeline)
    if slurm is not None and slurm.state is None:
        again = f"see whether job {slurm.job} is still in the queue; if it is not, {again}"
    last = timeline.attempts[-1] if timeline.attempts else None
    end = None if last is None else read_end(attempt_dir(timeline.run_dir, last.number))
    if end is None or (end.failure is FailureClass.LEAVE and end.steps_gained > 0):
        return again
    if end.failure is FailureClass.LEAVE:
        return f"it left without a newer step: give it time for start-up, a step and a save; then {again}"
    return f"{advice(end)}; then {again}"
