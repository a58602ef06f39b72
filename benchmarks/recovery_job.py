"""One run directory and the Slurm job that has it, seen from outside the mini cluster on which it runs."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from benchmarks.environment import ROOT
from benchmarks.recovery_times import last_step
from benchmarks.training import BenchmarkFailed
from hpctrain.errors import HangError
from hpctrain.minicluster.cluster import Cluster
from hpctrain.minicluster.namespaces import SLURM_VARIABLES
from hpctrain.minicluster.spec import SSD
from hpctrain.resilience.attempts import ATTEMPT_VARIABLE, StartRecord, attempt_dir, read_json, read_start
from hpctrain.resilience.processes import is_gone

SCRIPT: Final = ROOT / "slurm" / "train.sbatch"
"""What is submitted: the script that ships."""

_HOURS: Final = "--time=5:00:00"
"""So much is left that a warning means now."""
_WAIT_S: Final = 150.0
_POLL_S: Final = 0.02
_ASK_S: Final = 3.0
_LOG_LINES: Final = 15
_OVER: Final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


class Job:
    """One run directory, and the job that has it now."""

    def __init__(self, cluster: Cluster, folder: Path, options: tuple[str, ...]) -> None:
        self._cluster, self._folder, self._options = cluster, folder, options
        self.directory = folder / "run"
        self.srun_log = attempt_dir(self.directory, 1) / "logs" / "srun.log"
        self.job = ""

    def submit(self) -> None:
        """Hand the script to sbatch."""
        log = f"--output={self._folder / 'job.log'}"
        options = ["--parsable", "--cpus-per-task=1", _HOURS, log, *self._options]
        arguments: list[str | Path] = [self._folder / "run.toml", "--dir", self.directory]
        answer = self._cluster.run("sbatch", *options, SCRIPT, *arguments, cwd=ROOT, env=_job_environment())
        if answer.returncode != 0:
            raise BenchmarkFailed(f"sbatch refuses {SCRIPT}: {answer.stderr.strip()}")
        self.job = answer.stdout.strip().split(";")[0]

    def until_step(self, step: int) -> None:
        """Wait until rank 0 of the first attempt has reported this step."""
        first = attempt_dir(self.directory, 1)
        self.until(f"step {step}", lambda: last_step(first) >= step)

    def rank(self, number: int) -> tuple[str, int]:
        """Host of a rank of the first attempt, and its process id there."""
        raw = read_json(attempt_dir(self.directory, 1) / "ranks" / f"{number}.pid.json")
        if raw is None:
            raise BenchmarkFailed(f"rank {number} of {self.directory} did not say where it runs")
        return str(raw["host"]), int(raw["pid"])

    def start(self) -> StartRecord:
        """The first attempt's start record."""
        found = read_start(attempt_dir(self.directory, 1))
        if found is None:
            raise BenchmarkFailed(f"{self.directory}: attempt 1 has no start record")
        return found

    def await_no_process(self, processes: list[psutil.Process]) -> float:
        """Wait until no process of the run's attempts is left, `processes` to begin with; returns when that was."""
        left, looked_s = processes, time.time()

        def none_left() -> bool:
            nonlocal left, looked_s
            looked_s = time.time()
            left = [process for process in left if not is_gone(process.pid)] or processes_of(self.directory)
            return not left

        self.until("all ranks to end", none_left)
        return looked_s

    def is_requeued(self) -> bool:
        """Whether Slurm will start the job again."""
        found = self._facts()
        return found.get("JobState") == "PENDING" or int(found.get("Restarts", 0)) > 0

    def cancel(self) -> None:
        """End the job for good; a second call changes nothing."""
        job, self.job = self.job, ""
        if job:
            self._cluster.run("scancel", job)
            self.until(f"the end of job {job}", lambda: self._facts(job).get("JobState") in _OVER)

    def until(self, what: str, reached: Callable[[], bool]) -> None:
        """Wait; raises `HangError` after the deadline, `BenchmarkFailed` where the job ended meanwhile."""
        deadline_s, asked_s = time.monotonic() + _WAIT_S, time.monotonic()
        while not reached():
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise HangError(f"waited {_WAIT_S:g} s for {what}; {self._last_words()}")
            if self.job and now_s - asked_s > _ASK_S:
                asked_s = now_s
                if (state := self._facts().get("JobState")) in _OVER:
                    raise BenchmarkFailed(f"waited for {what}, but the job {state}; {self._last_words()}")
            time.sleep(_POLL_S)

    def _facts(self, job: str = "") -> dict[str, str]:
        answer = self._cluster.run("scontrol", "show", "job", "-o", job or self.job)
        return dict(re.findall(r"(\w+)=(\S*)", answer.stdout))

    def _last_words(self) -> str:
        log = self._folder / "job.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        return "its last words:\n" + "\n".join(lines[-_LOG_LINES:])


class Growth:
    """When a file grew for the first time since this object was made: srun speaks when something happens to ranks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = self._now()
        self.grown_unix_s = math.inf

    def look(self) -> bool:
        """Look now; always True, so that it can stand in a condition."""
        if self._now() > self._size:
            self.grown_unix_s = min(self.grown_unix_s, time.time())
        return True

    def _now(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """The processes of a run's attempts, on all hosts: launchers and ranks. Only root sees them all."""
    prefix, found = f"{run_dir.resolve() / 'attempts'}{os.sep}", []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it ended meanwhile
            marked = process.environ().get(ATTEMPT_VARIABLE, "").startswith(prefix)
            if marked and not is_gone(process.pid):
                found.append(process)
    return found


def _job_environment() -> dict[str, str]:
    """What a user has who activated this environment: hpctrain is found, and nothing of another Slurm is there."""
    foreign = (*SLURM_VARIABLES, "HPCTRAIN_", "OMPI_", "PMIX_", "PRTE_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '/usr/bin:/bin')}",
        "PYTHONPATH": os.pathsep.join(paths),
        "HPCTRAIN_SSD": str(SSD),
        "OMPI_MCA_btl": "^ofi",  # there is no fabric here, and looking for one takes a second of each start
    }
