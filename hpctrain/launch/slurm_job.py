"""The Slurm job that this process runs in, through squeue, sinfo, scancel, scontrol and sbatch.

Each answer may be missing: a site hides scontrol, a container has none of these, slurmctld restarts. What is not known
is None, and what follows from that is the caller's to decide.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.durable import replace_file
from hpctrain.launch.hostlist import expand_nodes
from hpctrain.resilience.launching import Comeback

SCRIPT_VARIABLE = "HPCTRAIN_BATCH_SCRIPT"
"""Environment variable: the batch script, for a successor where this job may not be requeued."""
ARGUMENTS_VARIABLE = "HPCTRAIN_BATCH_ARGUMENTS"
"""Environment variable: the arguments of that script, one per line (a shell would quote them in its own ways)."""
SUBMISSION_VARIABLE = "HPCTRAIN_SUBMISSION"
"""Environment variable of a successor: the id of the job that the user submitted."""

_ANSWER_TIMEOUT_S = 15.0
_REQUEUE_TIMEOUT_S = 60.0
# A user's own defaults for these commands (filters, formats) would change what they answer.
_MISLEADING = ("SQUEUE_", "SINFO_", "SCANCEL_", "SLURM_TIME_FORMAT")
_RUNNING_STATES = ("RUNNING", "SIGNALING", "RESIZING")
_REQUEUE_DEADLINE_S = 120.0
_BY_HAND = "submit the same script again to go on"
_POLL_S = 0.2
_RETRY_S = 2.0
# "4-03:02:01", "03:02:01", "02:01"; anything else (UNLIMITED, NOT_SET, INVALID) is no number
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
# squeue(1), JOB STATE CODES: these do not come back by themselves, all others wait or run
_ENDED_STATES = frozenset(
    (
        *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
        *("OUT_OF_MEMORY", "REVOKED"),
    )
)


class SlurmJob:
    """One job. `environment` is that of the batch script (sbatch(1), OUTPUT ENVIRONMENT VARIABLES)."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.job_id = environment["SLURM_JOB_ID"]
        array = environment.get("SLURM_ARRAY_JOB_ID")
        # the plain id of one member of an array can be that of the whole array
        self.id = f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else self.job_id
        self.submission = environment.get(SUBMISSION_VARIABLE) or self.id
        self.restart = int(environment.get("SLURM_RESTART_COUNT") or 0)
        self.submitted_unix_s = self._submitted()
        self._script = environment.get(SCRIPT_VARIABLE, "")

    def seconds_left(self) -> float | None:
        """Until Slurm ends the job; None: no limit, or not known. The variable is empty on older Slurm."""
        end = self._environment.get("SLURM_JOB_END_TIME", "")
        said = _ask(["squeue", "-h", "-j", self.id, "-o", "%L %e"])
        left = (said or "").split()
        # the time limit less the time used, and the end: only that knows of preemption, and of limits that were changed
        known = [parse_time(left[0]), _seconds_until(left[1])] if len(left) == 2 else []
        if any(item is not None for item in known):
            return min(item for item in known if item is not None)
        return float(end) - time.time() if end.isdigit() and int(end) else None

    def state(self) -> str | None:
        """The state of this start of the job, such as RUNNING; REQUEUED where a later one is there; None: not known."""
        said = (_ask(["squeue", "-h", "-j", self.id, "-O", "State:30,RestartCnt:10"]) or "").split()
        if not said:
            return None
        return "REQUEUED" if said[1:] and said[1] != str(self.restart) else said[0]

    def is_alive(self, job: str) -> bool | None:
        """As `job_is_alive`."""
        return job_is_alive(job)

    def nodes(self) -> dict[str, bool] | None:
        """The nodes that the job still has, and whether Slurm believes each alive; None: not known."""
        said = _ask(["squeue", "-h", "-j", self.id, "-o", "%N"])
        names = expand_nodes((said or "").strip()) if said and "(" not in said else []
        if not names:
            return None
        # -a: a site may hide partitions. A node that is hidden all the same counts as alive: it is asked itself.
        states = _ask(["sinfo", "-a", "-h", "-N", "-n", said.strip() if said else "", "-o", "%N %T"]) or ""
        known = dict(line.split() for line in states.splitlines() if len(line.split()) == 2)
        return {node: is_usable(known.get(node, "allocated")) for node in names}

    def steps(self, prefix: str) -> list[str] | None:
        """Ids of the job's steps whose name begins with `prefix`; None: not known."""
        said = _ask(["squeue", "-h", "-s", "-j", self.id, "-o", "%i %j"], unknown_job="")
        if said is None:
            return None
        pairs = [line.split(maxsplit=1) for line in said.splitlines() if len(line.split()) == 2]
        return [step for step, name in pairs if name.startswith(prefix)]

    def end_steps(self, prefix: str, timeout_s: float) -> list[str] | None:
        """Kill the job's steps of that name, and wait for Slurm to see them end; returns those it still lists.

        One that had a node which failed may stay listed for ever: Slurm waits for a word from that node. None: Slurm
        does not answer.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            left = self.steps(prefix)
            for step in left or ():
                _ask(["scancel", "-s", "KILL", step])
            if left == [] or time.monotonic() > deadline_s:
                return left
            time.sleep(_POLL_S if left else _RETRY_S)

    def come_back(self) -> Comeback:
        """Requeue the job, but only while it is RUNNING: what a user cancelled stays cancelled.

        Where requeueing is forbidden, or there is no scontrol, a successor is submitted that waits for this job's end.
        """
        state = self._settled_state()
        if state not in (None, *_RUNNING_STATES):
            return Comeback(False, f"job {self.id} is {state}, so it is not requeued; {_BY_HAND}")
        refused = self._requeue()
        if refused is None or self.state() in ("REQUEUED", "PENDING"):  # late answers are answers
            return Comeback(True, f"job {self.id} is requeued and will go on by itself")
        if (state := self.state()) not in (None, *_RUNNING_STATES):  # cancelled meanwhile
            return Comeback(False, f"job {self.id} is {state}, so nothing follows it; {_BY_HAND}")
        return self._succeed(refused)

    def keep_script(self, run_dir: Path) -> None:
        """Copy the batch script into the run directory: Slurm's own copy ends with the job, and is on one node only."""
        copy = run_dir / "batch.sbatch"
        with contextlib.suppress(OSError):
            if self._script and Path(self._script).is_file():
                replace_file(copy, Path(self._script).read_bytes())
        if copy.exists():
            self._script = str(copy)

    def _requeue(self) -> str | None:
        """Why the job could not be requeued; None: it was."""
        if shutil.which("scontrol") is None:
            return "scontrol is not on PATH"
        answer = _run(["scontrol", "requeue", self.id], _REQUEUE_TIMEOUT_S)
        if answer is None:
            return "scontrol does not answer"
        said = " ".join((answer.stderr or answer.stdout).split())
        return None if answer.returncode == 0 else said or f"scontrol ended with code {answer.returncode}"

    def _succeed(self, refused: str) -> Comeback:
        """Submit a successor; `refused` says why this job cannot be requeued."""
        command = self.successor_command()
        if command is None or shutil.which("sbatch") is None:
            why = f"{SCRIPT_VARIABLE} is not set" if command is None else "sbatch is not on PATH"
            words = f"job {self.id} cannot be requeued ({refused}), nor can a successor be submitted ({why})"
            return Comeback(False, f"{words}; {_BY_HAND}")
        answer = _run(command)
        if answer is None or answer.returncode != 0:
            said = "no answer" if answer is None else " ".join((answer.stderr or answer.stdout).split())
            words = (
                f"job {self.id} cannot be requeued ({refused}) and sbatch refuses a successor ({said}); "
                f"to go on: {shlex.join(command)}"
            )
            return Comeback(False, words)
        number = answer.stdout.split(";")[0].strip()
        words = f"job {self.id} cannot be requeued ({refused}): job {number} will go on after it"
        return Comeback(True, words, successor=True)

    def cancel(self) -> None:
        """End the job."""
        _ask(["scancel", self.id])

    def successor_command(self) -> list[str] | None:
        """The sbatch command line that submits this job's script again; None where the script is not known.

        Options that were given to sbatch, and not in the script, are rebuilt from what the job was given.
        """
        if not self._script:
            return None
        given = {
            "--partition": self._environment.get("SLURM_JOB_PARTITION"),
            "--account": self._environment.get("SLURM_JOB_ACCOUNT"),
            "--qos": self._environment.get("SLURM_JOB_QOS"),
            "--job-name": self._environment.get("SLURM_JOB_NAME"),
            "--array": self._environment.get("SLURM_ARRAY_TASK_ID"),
            "--nodes": self._environment.get("SLURM_JOB_NUM_NODES"),
            "--ntasks": self._environment.get("SLURM_NTASKS"),
            "--ntasks-per-node": self._environment.get("SLURM_NTASKS_PER_NODE"),
            "--cpus-per-task": self._environment.get("SLURM_CPUS_PER_TASK"),
            "--gpus": self._environment.get("SLURM_GPUS"),
            "--gpus-per-node": self._environment.get("SLURM_GPUS_PER_NODE"),
            "--gpus-per-task": self._environment.get("SLURM_GPUS_PER_TASK"),
            "--mem": self._environment.get("SLURM_MEM_PER_NODE"),
            "--mem-per-cpu": self._environment.get("SLURM_MEM_PER_CPU"),
            "--reservation": self._environment.get("SLURM_JOB_RESERVATION"),
            "--constraint": _given(_ask(["squeue", "-h", "-j", self.id, "-o", "%f"])),
            "--chdir": self._environment.get("SLURM_SUBMIT_DIR"),
            "--time": _given(_ask(["squeue", "-h", "-j", self.id, "-o", "%l"])),
            "--output": _output_of("/proc/self/fd/1"),
        }
        options = [f"{key}={value}" for key, value in given.items() if value]
        # a count of restarts that leaked into another job would make its own restarts look old
        export = f"--export=ALL,{SUBMISSION_VARIABLE}={self.submission},SLURM_RESTART_COUNT=0"
        first = ["sbatch", "--parsable", f"--dependency=afterany:{self.job_id}", "--open-mode=append", export]
        arguments = self._environment.get(ARGUMENTS_VARIABLE, "").splitlines()
        return [*first, *options, self._script, *arguments]

    def _settled_state(self) -> str | None:
        """The state; waits for a slurmctld that restarts just now."""
        deadline_s = time.monotonic() + _REQUEUE_DEADLINE_S
        while shutil.which("squeue") is not None:
            state = self.state()
            if state is not None or time.monotonic() > deadline_s:
                return state
            time.sleep(_RETRY_S)
        return None

    def _submitted(self) -> float | None:
        return _unix_time((_ask(["squeue", "-h", "-j", self.id, "-o", "%V"]) or "").strip())


def job_is_alive(job: str) -> bool | None:
    """Whether a job of this cluster waits or runs; None: Slurm does not say, or there is none here."""
    if shutil.which("squeue") is None:
        return None
    said = _ask(["squeue", "-h", "-j", job, "-o", "%T"], unknown_job="")
    return None if said is None else any(state not in _ENDED_STATES for state in said.split())


def current_job(environment: Mapping[str, str] | None = None) -> SlurmJob | None:
    """The Slurm job whose batch script this process belongs to, or None."""
    environment = os.environ if environment is None else environment
    return SlurmJob(environment) if environment.get("SLURM_JOB_ID") else None


def parse_time(text: str) -> float | None:
    """Seconds in a time as squeue prints it (`1-02:03:04`, `02:03`); None for `UNLIMITED` and such."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def is_usable(state: str) -> bool:
    """Whether a node in this state (sinfo(1), NODE STATE CODES) can run a job step of a job that has it."""
    bad = ("down", "fail", "power", "reboot", "unk", "inval", "perfctrs", "blocked")
    return not state.endswith("*") and not state.startswith(bad)


def _ask(command: Sequence[str], unknown_job: str | None = None) -> str | None:
    """What a command prints; None where it fails. `unknown_job` is the answer for a job that Slurm has forgotten."""
    answer = _run(command)
    if answer is None:
        return None
    if answer.returncode != 0:
        return unknown_job if "Invalid job id" in answer.stderr else None
    return answer.stdout


def _run(command: Sequence[str], timeout_s: float | None = None) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s or _ANSWER_TIMEOUT_S,
            env={key: value for key, value in os.environ.items() if not key.startswith(_MISLEADING)},
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _given(text: str | None) -> str | None:
    """An answer of squeue; None for none, and for its words for nothing."""
    word = (text or "").strip()
    return word if word and word not in ("(null)", "N/A", "NOT_SET", "INVALID") else None


def _seconds_until(text: str) -> float | None:
    """Seconds until a moment as squeue prints it (`2026-11-30T21:18:28`); None for `N/A` and such."""
    moment = _unix_time(text)
    return None if moment is None else max(moment - time.time(), 0.0)


def _unix_time(text: str) -> float | None:
    with contextlib.suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    return None


def _output_of(descriptor: str) -> str | None:
    """The file that standard output goes to, so that a successor appends to the same."""
    with contextlib.suppress(OSError):
        target = Path(descriptor).resolve()
        return str(target).replace("%", "%%") if target.is_file() else None
    return None
