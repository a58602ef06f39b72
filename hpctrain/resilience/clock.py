"""When a job whose time is limited must save and leave: as late as it can, from what saving has taken so far."""

from __future__ import annotations

import time

from hpctrain.observe.progress import Pace
from hpctrain.resilience.launching import Job

_ASK_AGAIN_S = 120.0
_PATIENCE_S = 600.0


class JobClock:
    """The end of the job, as its queue says; asked again now and then, because limits are changed.

    Args:
        job: the job; None: no end.
        margin_s: what stays free before the end, for ending the ranks and for coming back.
        walltime_s: the limit where the queue does not say it, counted from now; 0: none.
    """

    def __init__(self, job: Job | None, margin_s: float, walltime_s: float = 0.0) -> None:
        self._job = job
        self._margin_s = margin_s
        self._end_s = time.monotonic() + walltime_s if walltime_s else None
        self._asked_s = 0.0
        self.ask()

    def ask(self) -> None:
        """Ask the queue now; where it does not answer, what was known stays."""
        self._asked_s = time.monotonic()
        left_s = None if self._job is None else self._job.seconds_left()
        if left_s is not None:
            self._end_s = self._asked_s + left_s

    def left_s(self) -> float | None:
        """Seconds until the end; None: no end is known."""
        if self._job is not None and time.monotonic() - self._asked_s > _ASK_AGAIN_S:
            self.ask()
        return None if self._end_s is None else self._end_s - time.monotonic()

    def leave_is_due(self, pace: Pace) -> bool:
        """Whether ranks must be asked to leave now, so that a save fits in before the margin."""
        left_s = self.left_s()
        return left_s is not None and left_s <= self._need_s(pace)

    def is_over(self) -> bool:
        """Whether it is too late for a save: what is left is needed for ending the ranks."""
        left_s = self.left_s()
        return left_s is not None and left_s <= self._margin_s / 2

    def has_room(self, pace: Pace) -> bool:
        """Whether an attempt begun now would come to do anything."""
        left_s = self.left_s()
        return left_s is None or left_s > pace.start_s + self._need_s(pace)

    def warned(self) -> bool:
        """A warning signal came: whether to leave at once.

        Not where the end is near and known: the clock will choose the moment. With an end far away, or none, somebody
        means now.
        """
        self.ask()
        left_s = self.left_s()
        return left_s is None or left_s > _PATIENCE_S

    def _need_s(self, pace: Pace) -> float:
        return self._margin_s + 2 * (pace.save_s + pace.step_s)
