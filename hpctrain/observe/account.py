"""Where the time of one attempt went, from what rank 0 wrote while it lived: a killed rank says nothing at its end.

Rank 0 adds its seconds by phase so far to its `step` and `phases` events (`hpctrain.training.phases`). Each such event
is a mark; between two marks time is shared out in proportion. What came after the last mark is not known and not
guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.observe.events import parse_event

_TRAINING = ("compute", "exchange", "exchange after save", "reduce", "update")

_MOST_STEPS = 10_000
"""Several per minute for a week; what lies between two is shared out in proportion anyway."""

Event = dict[str, Any]


@dataclass(frozen=True)
class Seconds:
    """Seconds by where they went. They add up to the time from the end of the attempt before to the end of this one."""

    queue: float = 0.0
    """Waiting for Slurm to start the job, or to start it again."""
    start_up: float = 0.0
    """From the decision to launch until restoring or training began: the launcher, Python, MPI, opening the data."""
    restore: float = 0.0
    staging: float = 0.0
    """Steps waited for data while the local copy was not complete. Copying beside training costs nothing here."""
    training: float = 0.0
    evaluation: float = 0.0
    saving: float = 0.0
    """Steps waited for a save. Writing goes on beside training, and that part is not here."""
    lost: float = 0.0
    """Training and evaluation past the step from which the run later went on: they had to be done again."""
    other: float = 0.0
    """Past the last sign of life (noticing a failure, ending processes), and whatever nobody wrote down."""

    def __add__(self, other: Seconds) -> Seconds:
        mine, theirs = asdict(self), asdict(other)
        return Seconds(**{name: mine[name] + theirs[name] for name in mine})

    @property
    def total(self) -> float:
        """The sum."""
        return math.fsum(asdict(self).values())


class Mark(NamedTuple):
    """Rank 0 after `step` committed or uncommitted steps: the time, and seconds by kind of work since its start."""

    unix_s: float
    step: float
    restore_s: float = 0.0
    waiting_s: float = 0.0
    training_s: float = 0.0
    evaluation_s: float = 0.0
    saving_s: float = 0.0

    @property
    def spent_s(self) -> float:
        """Seconds since start-up."""
        return math.fsum(self[2:])

    def towards(self, other: Mark, share: float) -> Mark:
        """The mark at `share` (0 to 1) of the way to `other`."""
        return Mark(*(mine + share * (theirs - mine) for mine, theirs in zip(self, other, strict=True)))


def read_account(path: Path) -> list[Event]:
    """The events of a rank; of the steps of a very long attempt only some, the last among them.

    Torn and damaged lines are left out; a file that cannot be read has none.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    steps = [number for number, line in enumerate(lines) if b'"kind":"step"' in line]
    stride = max(1, len(steps) // _MOST_STEPS)
    left_out = set(steps) - set(steps[::stride]) - set(steps[-2:])  # two: the last may be torn
    kept = (line for number, line in enumerate(lines) if number not in left_out)
    return [event for line in kept if (event := parse_event(line)) is not None]


def split_time(
    events: list[Event],
    *,
    started_unix_s: float,
    ended_unix_s: float,
    from_step: int | None,
    kept_step: int | None = None,
    staged: bool = False,
) -> Seconds:
    """Share out the time between the start and the end of an attempt.

    Args:
        events: those of rank 0.
        started_unix_s, ended_unix_s: the launch, and the end (or now).
        from_step: the step that training began from; None: it was not restored yet.
        kept_step: what was done after this step had to be done again; None: nothing had to.
        staged: whether the run copies its data to the nodes.
    """
    duration_s = max(0.0, ended_unix_s - started_unix_s)
    marks = read_marks(events)
    if not marks:
        return _before_the_first_step(events, started_unix_s, duration_s, restored=from_step is not None)
    first, last = marks[0], marks[-1]
    # what lies between two phases (opening the data, say) is known only as a difference, and counts as start-up
    begun_unix_s = first.unix_s - first.spent_s
    zero = Mark(begun_unix_s + first.restore_s, min(first.step, from_step or 0), first.restore_s)
    marks.insert(0, zero)
    delay_s = _at(marks, _staged_unix_s(events), lambda mark: mark.unix_s).waiting_s if staged else 0.0
    kept = last if kept_step is None else _at(marks, max(kept_step, zero.step), lambda mark: mark.step)
    training_s = _training_s(last, delay_s)
    kept_training_s = _training_s(kept, delay_s)
    start_up_s = max(0.0, begun_unix_s - started_unix_s)
    return Seconds(
        start_up=start_up_s,
        restore=last.restore_s,
        staging=delay_s,
        training=kept_training_s,
        evaluation=kept.evaluation_s,
        saving=last.saving_s,
        lost=training_s - kept_training_s + last.evaluation_s - kept.evaluation_s,
        other=max(0.0, duration_s - start_up_s - last.spent_s),
    )


def read_marks(events: list[Event]) -> list[Mark]:
    """The marks among events, in order; events that hold none, or damaged ones, are passed over."""
    found = (_mark(event) for event in events)
    return [mark for mark in found if mark is not None]


def _mark(event: Event) -> Mark | None:
    phases = event.get("phases")
    if not isinstance(phases, dict):
        return None
    try:
        seconds = {str(name): float(value) for name, value in phases.items()}
        mark = Mark(
            unix_s=float(event["t"]),
            step=float(event["step"]),
            restore_s=seconds.get("restore", 0.0),
            waiting_s=seconds.get("data", 0.0),
            training_s=math.fsum(seconds.get(name, 0.0) for name in _TRAINING),
            evaluation_s=seconds.get("evaluate", 0.0),
            saving_s=seconds.get("save", 0.0),
        )
    except (KeyError, TypeError, ValueError):
        return None
    return mark if all(map(math.isfinite, mark)) else None


def _at(marks: list[Mark], place: float, position: Callable[[Mark], float]) -> Mark:
    """The state at `place`: that of the last mark there, else in proportion between the marks around it."""
    number = max((at for at, mark in enumerate(marks) if position(mark) <= place), default=0)
    base = marks[number]
    if position(base) >= place or number + 1 == len(marks):
        return base
    following = marks[number + 1]
    return base.towards(following, (place - position(base)) / (position(following) - position(base)))


def _training_s(mark: Mark, delay_s: float) -> float:
    """Seconds of steps, with the waits for data that staging is not to blame for."""
    return mark.training_s + max(0.0, mark.waiting_s - delay_s)


def _staged_unix_s(events: list[Event]) -> float:
    """When the copy on the node of rank 0 was complete; infinity: it is not."""
    done = [event for event in events if event["kind"] == "staging" and event.get("done", True)]
    return min(event_times(done), default=math.inf)


def _before_the_first_step(
    events: list[Event], started_unix_s: float, duration_s: float, *, restored: bool
) -> Seconds:
    start = min(_times(events, "start"), default=None)
    if start is None:
        return Seconds(start_up=duration_s)
    start_up_s = min(max(0.0, start - started_unix_s), duration_s)
    left_s = duration_s - start_up_s
    ended = min(_times(events, "restore"), default=start if restored else math.inf)
    restore_s = min(max(0.0, ended - start), left_s)
    return Seconds(start_up=start_up_s, restore=restore_s, other=left_s - restore_s)


def event_times(events: list[Event]) -> list[float]:
    """When events were written; those that do not say so are passed over."""
    times = (event.get("t") for event in events)
    return [float(time) for time in times if isinstance(time, int | float) and math.isfinite(time)]


def _times(events: list[Event], kind: str) -> list[float]:
    return event_times([event for event in events if event["kind"] == kind])
