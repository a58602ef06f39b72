"""The ranks of one attempt, as a job step."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from hpctrain.resilience.processes import Descendants, RankProcess, started_ranks
from hpctrain.resilience.scratch import leave_scratch
from hpctrain.resilience.words import read_log, srun_lost_nodes

_LOOK_S = 1.0


class SlurmRanks:
    """The ranks of one attempt, as a job step."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        directory: Path,
        num_ranks: int,
        descendants: Descendants,
        log: Path,
        end_steps: Callable[[], object],
        seen: Callable[[Iterable[str]], None],
    ) -> None:
        self.process = process
        self._directory, self._num_ranks, self._log = directory, num_ranks, log
        self._descendants, self._end_steps, self._seen = descendants, end_steps, seen
        self._started: dict[int, RankProcess] = {}
        self._asked = False
        self._looked_s = 0.0
        descendants.started(process.pid)

    def ask_to_leave(self) -> None:
        """SIGUSR1 to all ranks, through srun, once all of them can take it.

        A process that has not come as far as its handlers would die of it; the supervisor's clock ends an attempt that
        takes too long to start.
        """
        if self._asked:
            return
        with contextlib.suppress(OSError):  # the shared filesystem: the next call looks again
            self._started = started_ranks(self._directory, self._started)
        if len(self._started) >= self._num_ranks:
            self._asked = True
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGUSR1)

    def lost_node(self) -> str | None:
        """The first node of which srun says that it failed."""
        if time.monotonic() - self._looked_s < _LOOK_S:
            return None
        self._looked_s = time.monotonic()
        lost = srun_lost_nodes(read_log(self._log))
        self._seen(lost)
        return next(iter(lost), None)

    def end(self) -> None:
        """End the job step, then srun. What a lost node keeps Slurm from confirming, the next placement looks at."""
        try:
            self._end_steps()
        finally:
            self._descendants.end_all()
            leave_scratch(
                self._directory
            )  # a supervisor that lost the run sweeps no nodes; this one is its own
            self._seen(srun_lost_nodes(read_log(self._log)))  # srun may have said it last of all
