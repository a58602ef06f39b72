"""What the supervisor asks of the world around it: something that starts ranks, and the job that it runs in itself.

`hpctrain.launch` has the two doors: mpirun on this machine, and job steps of a Slurm job.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpctrain.config import RunConfig
from hpctrain.resilience.words import LauncherWord


@dataclass(frozen=True)
class Placement:
    """Where the ranks of an attempt run: `num_ranks` on `nodes`; `lost` are nodes of the job that do not answer."""

    nodes: tuple[str, ...]
    num_ranks: int
    lost: tuple[str, ...] = ()


class Ranks(Protocol):
    """The ranks of one attempt."""

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The launcher: it ends when they have."""

    def ask_to_leave(self) -> None:
        """Tell every rank that runs, once; to be called until they have left."""

    def lost_node(self) -> str | None:
        """A node that failed under them, as far as the launcher says."""

    def end(self) -> None:
        """Kill what is left of them, on every node, and see that nothing is.

        Raises:
            HangError: something is, or it cannot be found out: starting anew beside it is not safe.
        """


class Launcher(Protocol):
    """A door to the ranks."""

    def check(self, config: RunConfig) -> None:
        """Raise `ConfigError` where ranks cannot be launched as `config` asks."""

    def place(self, run_dir: Path, config: RunConfig, *, again: bool) -> Placement | None:
        """Where the next attempt can run; None: nowhere, there are not enough nodes.

        Args:
            run_dir: the run directory.
            config: the run description.
            again: an attempt has failed: see first which nodes still answer, and that nothing of it is left there.

        Raises:
            HangError: it cannot be found out.
        """

    def start(self, run_dir: Path, attempt: int, placement: Placement, config: RunConfig) -> Ranks:
        """Start the ranks of an attempt. Raises `OSError` where this host has no process left for that."""

    def log(self, run_dir: Path, attempt: int) -> Path:
        """The file with the launcher's own words."""

    def word(self, log: str, pids: dict[int, int]) -> LauncherWord | None:
        """What the launcher says about the first rank that ended badly (see `hpctrain.resilience.words`)."""

    def clean(self, run_dir: Path) -> None:
        """Remove what killed ranks and launchers may have left behind."""


@dataclass(frozen=True)
class Comeback:
    """Whether the job will run again by itself (as a `successor`: once this one has ended), and one sentence."""

    assured: bool
    words: str
    successor: bool = False


class Job(Protocol):
    """The batch job that the supervisor runs in."""

    id: str
    """What the queue calls it."""
    submission: str
    """The job that the user submitted: another one where a successor took its place."""
    restart: int
    """How often it was requeued."""
    submitted_unix_s: float | None

    def seconds_left(self) -> float | None:
        """Until the queue ends it, as of now; None: no limit, or not known."""

    def is_alive(self, job: str) -> bool | None:
        """Whether another job waits or runs; None: not known."""

    def keep_script(self, run_dir: Path) -> None:
        """Keep in the run directory what a successor of the job needs."""

    def come_back(self) -> Comeback:
        """See to it that the job runs again after it has ended."""
