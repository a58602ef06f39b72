"""What Slurm says of a job: `squeue` while it is there, `sacct` afterwards; else why nothing is known.

Formats: `squeue -o` (%T state, %r reason) and `sacct --parsable2`; both have been stable since Slurm 20.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

_TIMEOUT_S = 5.0
"""squeue tries for much longer when the controller does not answer; a user who asks for the status does not wait."""
_WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
_AT_WORK = {
    "RUNNING",
    "CONFIGURING",
    "COMPLETING",
    "STAGE_OUT",
    "SIGNALING",
    "RESIZING",
    "SUSPENDED",
    "STOPPED",
}


@dataclass(frozen=True)
class SlurmState:
    """The state of `job`; None: not known. `detail` is the reason that Slurm gives, or why nothing is known."""

    job: str
    state: str | None
    detail: str

    @property
    def is_waiting(self) -> bool:
        """Whether Slurm will start the job, or start it again."""
        return self.state in _WAITING

    @property
    def is_at_work(self) -> bool:
        """Whether the job holds its nodes."""
        return self.state in _AT_WORK

    def __str__(self) -> str:
        """State and detail on one line."""
        return f"{self.state or 'not known'}" + (f" ({self.detail})" if self.detail else "")


def ask_slurm(job: str) -> SlurmState:
    """Ask for the state of a job; never raises, and never takes longer than two timeouts of 5 s."""
    queued, why = _answer(["squeue", "-h", "-j", job, "-o", "%T|%r"])
    if queued:
        return parse_squeue(job, queued)
    past, why_not = _answer(["sacct", "-n", "-P", "-X", "-j", job, "-o", "State,ExitCode"])
    if past:
        return parse_sacct(job, past)
    return SlurmState(job, None, why or why_not or "neither squeue nor sacct knows the job")


def parse_squeue(job: str, text: str) -> SlurmState:
    """From `squeue -o '%T|%r'`; of a job array the first task counts."""
    state, _, reason = text.splitlines()[0].partition("|")
    return SlurmState(job, state, "" if reason == "None" else reason)


def parse_sacct(job: str, text: str) -> SlurmState:
    """From `sacct -P -o State,ExitCode`, where a user's cancellation reads `CANCELLED by 1000|0:15`."""
    state, _, code = text.splitlines()[-1].partition("|")
    word, _, by_whom = state.partition(" ")
    return SlurmState(job, word, ", ".join(filter(None, [by_whom, f"exit code {code}" if code else ""])))


def _answer(command: list[str]) -> tuple[str, str]:
    """What a command prints, or why it printed nothing (empty: it just had nothing to say)."""
    name = command[0]
    if shutil.which(name) is None:
        return "", f"{name} is not on PATH"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"{name} did not answer in {_TIMEOUT_S:g} s"
    except OSError as error:
        return "", f"{name} cannot be run: {error.strerror}"
    if done.returncode == 0:
        return done.stdout.strip(), ""
    said = done.stderr.strip().splitlines()
    return "", said[-1] if said else f"{name} ended with code {done.returncode}"
