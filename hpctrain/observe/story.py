"""What happened to one attempt: how it ended, what it started from, gained and lost, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpctrain.checkpoint.names import newest_step
from hpctrain.observe.account import Event, Seconds, event_times, read_account, read_marks, split_time
from hpctrain.observe.owner import Owner
from hpctrain.resilience.attempts import Attempt, StartRecord, read_json
from hpctrain.resilience.exits import FailureClass, read_end_records

RUNNING = "running"
DIED = "died with its supervisor"
UNKNOWN = "not known"


@dataclass(frozen=True)
class AttemptStory:
    """One attempt. None: not known, or not there yet.

    Attributes:
        job, restart: the Slurm job (empty: none) and its number of requeues.
        ended: a failure class (`FailureClass`), `RUNNING`, `DIED` or `UNKNOWN` (a damaged record).
        ended_unix_s: without an end record the last sign of life.
        checkpoint: what it started from; None: from nothing.
        from_step: the step that goes with it; None: it did not come so far.
        refused: checkpoints passed over, each with the reason.
        reached_step: the last step that was heard of.
        steps_gained: committed steps that the next attempt need not do.
        steps_lost: steps that were made, and had to be made again.
        missing: what is missing or damaged in its directory.
    """

    number: int
    job: str
    restart: int
    nodes: list[str]
    num_ranks: int | None
    started_unix_s: float | None
    ended_unix_s: float | None
    ended: str
    reason: str
    checkpoint: str | None
    from_step: int | None
    refused: list[str]
    reached_step: int
    steps_gained: int
    steps_lost: int
    seconds: Seconds
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """What is there of one attempt, apart from the others."""

    attempt: Attempt
    events: list[Event]
    from_step: int | None
    reached_step: int
    ended_unix_s: float | None
    """Without an end record: the last sign of life."""

    @property
    def start(self) -> StartRecord | None:
        """The start record."""
        return self.attempt.start

    @property
    def before_step(self) -> int:
        """The step it began from, as far as is known."""
        listed = self.start.checkpoints if self.start is not None else []
        return newest_step(listed) if self.from_step is None else self.from_step

    @property
    def times_are_gone(self) -> bool:
        """Whether steps were made and no event says when."""
        return self.reached_step > self.before_step and not read_marks(self.events)

    @property
    def refused(self) -> list[str]:
        """Checkpoints passed over, each with the reason."""
        events = (event for event in self.events if event["kind"] == "refused_checkpoint")
        return [f"{event.get('name')}: {event.get('reason')}" for event in events]


@dataclass(frozen=True)
class Ledger:
    """What is there of the whole run."""

    found: list[Found]
    owner: Owner | None
    restorable: list[str]
    """What the next attempt may start from, the newest first."""
    finished: bool
    staged: bool
    now_unix_s: float


def find_attempt(attempt: Attempt) -> Found:
    """Read what there is of an attempt."""
    events = read_account(attempt.path / "events" / "rank-0.jsonl")
    restored = (read_json(attempt.path / "restored.json") or {}).get("step")
    from_step = restored if isinstance(restored, int) else None
    if attempt.end is not None:
        ranks = [summary.get("step") for summary in attempt.end.ranks if isinstance(summary, dict)]
        ended_unix_s: float | None = attempt.end.ended_unix_s
    else:
        records = read_end_records(attempt.path).values()
        ranks = [record.step for record in records]
        signs = event_times(events)
        signs += [record.ended_unix_s for record in records]
        signs += [] if attempt.start is None else [attempt.start.started_unix_s]
        ended_unix_s = max(signs, default=None)
    steps = [from_step, *ranks, *(event.get("step") for event in events)]
    reached = max((step for step in steps if isinstance(step, int)), default=0)
    return Found(attempt, events, from_step, max(0, reached), ended_unix_s)


def tell_attempt(ledger: Ledger, place: int) -> AttemptStory:
    """The story of the attempt at `place` in the ledger: what came after it says what it was worth."""
    found = ledger.found[place]
    start, end = found.attempt.start, found.attempt.end
    ended, reason = _ending(ledger, place)
    finished_here = ledger.finished and place + 1 == len(ledger.found)
    undone = not (finished_here or ended in (RUNNING, FailureClass.DONE))
    kept = _kept_step(ledger, place) if undone else found.reached_step
    gained = max(0, _committed_step(ledger, place) - found.before_step)
    return AttemptStory(
        number=found.attempt.number,
        job=start.job if start else "",
        restart=start.restart if start else 0,
        nodes=list(start.nodes) if start else [],
        num_ranks=start.num_ranks if start else None,
        started_unix_s=start.started_unix_s if start else None,
        ended_unix_s=None if ended == RUNNING else found.ended_unix_s,
        ended=ended,
        reason=reason,
        checkpoint=_checkpoint(found),
        from_step=found.from_step,
        refused=found.refused,
        reached_step=found.reached_step,
        steps_gained=gained if end is None else end.steps_gained,
        steps_lost=max(0, found.reached_step - max(kept, found.before_step)),
        seconds=_seconds(ledger, place, kept if undone else None, running=ended == RUNNING),
        missing=_missing(found, ended),
    )


def _ending(ledger: Ledger, place: int) -> tuple[str, str]:
    """How an attempt ended, and why in a sentence."""
    found = ledger.found[place]
    start, end, owner = found.start, found.attempt.end, ledger.owner
    if end is not None:
        return str(end.failure), end.reason
    if (found.attempt.path / "end.json").exists():
        return UNKNOWN, "its end record is damaged"
    ours = owner is not None and (start is None or (start.pid, start.boot_id) == (owner.pid, owner.boot_id))
    if ours and place + 1 == len(ledger.found):
        return RUNNING, f"at step {found.reached_step}"
    what = "nothing was launched" if start is None else f"last heard of at step {found.reached_step}"
    return DIED, f"no end record; {what}"


def _committed_step(ledger: Ledger, place: int) -> int:
    """The newest step that the attempt after this one might start from."""
    later = (found.start.checkpoints for found in ledger.found[place + 1 :] if found.start is not None)
    return newest_step(next(later, ledger.restorable))


def _kept_step(ledger: Ledger, place: int) -> int:
    """What was done after this step was done again, or will have to be.

    A later attempt may go back behind its predecessors, when it refuses their checkpoints.
    """
    later = [found.from_step for found in ledger.found[place + 1 :] if found.from_step is not None]
    return min(later, default=_committed_step(ledger, place))


def _checkpoint(found: Found) -> str | None:
    restored = (event.get("name") for event in found.events if event["kind"] == "restore")
    return next((str(name) for name in restored if name), None)


def _seconds(ledger: Ledger, place: int, kept_step: int | None, *, running: bool) -> Seconds:
    found = ledger.found[place]
    ended_unix_s = ledger.now_unix_s if running else found.ended_unix_s
    if found.start is None or ended_unix_s is None:
        return Seconds()
    started_unix_s = found.start.started_unix_s
    waited = _waited(ledger.found[:place], found.start)
    if found.times_are_gone:
        return waited + Seconds(other=max(0.0, ended_unix_s - started_unix_s))
    return waited + split_time(
        found.events,
        started_unix_s=started_unix_s,
        ended_unix_s=ended_unix_s,
        from_step=found.from_step,
        kept_step=kept_step,
        staged=ledger.staged,
    )


def _waited(before: list[Found], start: StartRecord) -> Seconds:
    """The time since the attempt before, where Slurm's queue or a relaunch took it; none where nobody tried."""
    previous = next((found for found in reversed(before) if found.start is not None), None)
    ended_unix_s, last = (None, None) if previous is None else (previous.ended_unix_s, previous.start)
    same_job = last is not None and last.job == start.job
    same_launch = same_job and last is not None and last.restart == start.restart
    if start.job and not same_launch:
        since = ended_unix_s if same_job else start.submitted_unix_s
        if since is None:
            return Seconds()
        return Seconds(queue=max(0.0, start.started_unix_s - max(since, ended_unix_s or since)))
    # another supervisor of the same job, or of none: somebody typed the command again some time later
    same_supervisor = last is not None and (last.pid, last.boot_id) == (start.pid, start.boot_id)
    if ended_unix_s is None or not same_supervisor:
        return Seconds()
    return Seconds(start_up=max(0.0, start.started_unix_s - ended_unix_s))


def _missing(found: Found, ended: str) -> list[str]:
    names = []
    if found.start is None:
        names.append("start.json is missing or damaged")
    if ended == UNKNOWN:
        names.append("end.json is damaged")
    if found.times_are_gone:
        names.append("events/rank-0.jsonl holds no times: all of its time counts as other")
    return [f"attempts/a{found.attempt.number:04d}/{name}" for name in names]
