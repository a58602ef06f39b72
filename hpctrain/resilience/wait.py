"""When to stop waiting for a launcher: ranks that died or finished must not be outlived by it for long."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from hpctrain.config import ResilienceSection
from hpctrain.resilience.exits import EndRecord, FailureClass, read_end_records
from hpctrain.resilience.processes import RankProcess, is_gone, started_ranks

_CHECK_S = 0.5
_QUIET = (FailureClass.DONE, FailureClass.LEAVE)


class AttemptWatch:
    """Deadlines of one attempt, seen from outside.

    - No rank has started within `start_timeout_s`: the launcher hangs.
    - A rank ended otherwise than done or leaving, or vanished from this host: the rest cannot go on. The launcher has
      `linger_s` to end them.
    - Every rank ended: the launcher has `linger_s` to follow.
    - Some ranks are done or have left: the others have `hang_timeout_s` more to follow.
    """

    def __init__(self, directory: Path, num_ranks: int, limits: ResilienceSection, linger_s: float) -> None:
        self._directory = directory
        self._num_ranks = num_ranks
        self._limits = limits
        self._linger_s = linger_s
        self._began_s = time.monotonic()
        self._checked_s = 0.0
        self._since: dict[str, float] = {}
        self._records: dict[int, EndRecord] = {}
        self._started: dict[int, RankProcess] = {}

    def overdue(self) -> str | None:
        """Why the attempt must be killed now, or None. Looks at the files at most every half second."""
        now_s = time.monotonic()
        if now_s - self._checked_s < _CHECK_S:
            return None
        self._checked_s = now_s
        condition, allowed_s, words = self._condition()
        if condition == "running":
            self._since.clear()
            return None
        since_s = self._since.setdefault(condition, self._began_s if condition == "starting" else now_s)
        return f"{words} ({allowed_s:g} s)" if now_s - since_s > allowed_s else None

    def _condition(self) -> tuple[str, float, str]:
        """The state of the attempt, how long it may last, and what to say when it lasts longer."""
        self._look()
        records, started = self._records, self._started
        gone = {rank for rank, process in started.items() if process.is_here and is_gone(process.pid)}
        ended = gone | set(records)
        broken = [rank for rank in ended if rank not in records or records[rank].failure not in _QUIET]
        if broken:
            return (
                "broken",
                self._linger_s,
                f"rank {min(broken)} ended and the launcher did not end the others",
            )
        if len(ended) >= self._num_ranks:
            return "ended", self._linger_s, "all ranks ended and the launcher did not"
        if ended:
            allowed_s = self._limits.hang_timeout_s + self._linger_s
            return "leaving", allowed_s, f"rank {min(ended)} is finished and the others did not follow"
        if len(started) < self._num_ranks:
            allowed_s = self._limits.start_timeout_s + self._linger_s
            return "starting", allowed_s, f"only {len(started)} of {self._num_ranks} ranks started in time"
        return "running", 0.0, ""

    def _look(self) -> None:
        """Take in what the ranks have written; nothing new where a shared filesystem does not answer just now."""
        with contextlib.suppress(OSError):
            # Both are written once per rank: at a thousand ranks, reading all of them all the time would be felt.
            self._records = read_end_records(self._directory, self._records)
            self._started = started_ranks(self._directory, self._started)
