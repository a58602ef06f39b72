"""`owner.json`: who owns a run directory, and how one who wants it is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.errors import ConfigError


@dataclass(frozen=True)
class Owner:
    """`owner.json`. `heartbeat` only counts: clocks of two hosts need not agree. `job` is "" outside Slurm."""

    host: str
    pid: int
    boot_id: str
    attempt: int
    heartbeat: int
    job: str = ""
    restart: int = 0

    def __str__(self) -> str:
        """Host, pid, attempt and job for a message."""
        job = f", Slurm job {self.job}, restart {self.restart}" if self.job else ""
        return f"host {self.host}, pid {self.pid}, attempt {self.attempt}{job}"

    def is_same(self, other: Owner) -> bool:
        """Whether both are one supervisor, at whatever attempt and heartbeat."""
        return self == replace(other, attempt=self.attempt, heartbeat=self.heartbeat)

    def is_earlier_start_of(self, other: Owner) -> bool:
        """Whether the job of `other` was requeued since."""
        return bool(self.job) and self.job == other.job and self.restart < other.restart


def in_use(run_dir: Path, owner: Owner | None) -> ConfigError:
    """The refusal where a process owns the directory; None: it did not say yet who it is."""
    who = "another process" if owner is None else str(owner)
    how = "for it to end" if owner is None else f"for it, or end it there with `kill {owner.pid}`"
    return ConfigError(f"run directory {run_dir} is in use by {who}; wait {how}, or choose another --dir")


def in_use_by_job(run_dir: Path, owner: Owner) -> ConfigError:
    """The refusal where a job owns the directory that is running, or waits to be started again."""
    return ConfigError(
        f"run directory {run_dir} is in use by Slurm job {owner.job} (host {owner.host}, attempt {owner.attempt}): "
        f"wait for it, or end it with `scancel {owner.job}`, or choose another --dir"
    )


def requeued_since(run_dir: Path, owner: Owner, restart: int) -> ConfigError:
    """The refusal where the job of start `restart` was requeued, and its later start is the owner."""
    return ConfigError(
        f"run directory {run_dir} is in use by a later start of this job ({owner}; this is restart {restart}): "
        "leave it to that one, or remove owner.json there if that start is long gone"
    )
