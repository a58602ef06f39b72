"""One scenario's place on the mini cluster: folder, partition, jobs of the shipped scripts, waits with deadlines."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hpctrain.minicluster.cluster import Cluster
from hpctrain.resilience.attempts import ATTEMPT_VARIABLE, Attempt, list_attempts, read_json
from hpctrain.resilience.scratch import scratch_prefix
from tests.support import ROOT
from tests.toy import toy_run

WAIT_S = 400.0
_POLL_S = 0.3
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


@dataclass(frozen=True)
class JobFacts:
    """What `scontrol show job` says."""

    state: str
    restarts: int
    nodes: str
    batch_host: str
    exit_code: int


@dataclass
class Lab:
    """Where one scenario is played."""

    cluster: Cluster
    name: str
    data: Path
    partition: str
    folder: Path = field(init=False)
    jobs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = self.cluster.spec.shared_dir / self.name
        self.folder.mkdir()

    @property
    def run_dir(self) -> Path:
        """The run directory of `submit`."""
        return self.folder / "run"

    def submit(
        self,
        *options: str,
        script: str = "train.sbatch",
        arguments: Sequence[str | Path] | None = None,
        sleep_s: float = 0.1,
        faults: str = "",
        environment: dict[str, str] | None = None,
        **changes: Any,
    ) -> str:
        """sbatch a script of `slurm/`, by default with a toy run; returns the job's id.

        `changes` are `section__key=value` of the run description, or `task_...` for options of the Task.
        """
        if arguments is None:
            arguments = [self.describe(sleep_s=sleep_s, **changes), "--dir", self.run_dir]
        variables = {"HPCTRAIN_FAULTS": faults} if faults else {}
        answer = self.slurm(
            *("sbatch", "--parsable", f"--partition={self.partition}", f"--output={self.folder / 'job.log'}"),
            *("--cpus-per-task=1", *options, str(ROOT / "slurm" / script), *map(str, arguments)),
            environment=variables | (environment or {}),
        )
        self.jobs.append(answer.strip().split(";")[0])
        return self.jobs[-1]

    def describe(self, name: str = "toy", sleep_s: float = 0.1, **changes: Any) -> Path:
        """A run description in a folder of its own."""
        options = {
            key.removeprefix("task_"): changes.pop(key) for key in list(changes) if key.startswith("task_")
        }
        settings = {
            "task__options": {"sleep_s": sleep_s, **options},
            "staging__dir": "$HPCTRAIN_SSD/hpctrain",
            "resilience__leave_margin_s": 8,
            "resilience__hang_timeout_s": 60,
            "resilience__start_timeout_s": 120,
        }
        return toy_run(self.folder / name, self.data, **(settings | changes))

    def slurm(
        self, *command: str | Path, environment: dict[str, str] | None = None, check: bool = True
    ) -> str:
        """Run a command of Slurm on the head; returns what it printed."""
        answer = self.cluster.run(
            *command, env=job_environment() | (environment or {}), cwd=ROOT, timeout_s=60
        )
        if check and answer.returncode != 0:
            raise AssertionError(f"{' '.join(map(str, command))}: {answer.stderr or answer.stdout}")
        return answer.stdout

    def facts(self, job: str) -> JobFacts:
        """The job as Slurm sees it."""
        text = self.slurm("scontrol", "show", "job", job)
        found = dict(re.findall(r"(\w+)=(\S*)", text))
        code = int(found["ExitCode"].split(":")[0])
        nodes, host = found.get("NodeList", ""), found.get("BatchHost", "")
        return JobFacts(found["JobState"], int(found["Restarts"]), nodes, host, code)

    def until(self, what: str, reached: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
        """Wait for a truthy answer; the error says what the job said meanwhile."""
        deadline_s = time.monotonic() + timeout_s
        while not (answer := reached()):
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{self.name}: waited {timeout_s:g} s for {what}\n{self.report()}")
            time.sleep(_POLL_S)
        return answer

    def until_step(self, step: int, attempt: int = 1, run_dir: Path | None = None) -> None:
        """Wait until rank 0 of an attempt says that it has done this step."""
        events = (run_dir or self.run_dir) / "attempts" / f"a{attempt:04d}" / "events" / "rank-0.jsonl"
        self.until(f"step {step} of attempt {attempt}", lambda: last_step(events) >= step)

    def until_over(self, job: str) -> JobFacts:
        """Wait until a job has ended for good."""
        return self.until(f"the end of job {job}", lambda: (f := self.facts(job)).state in _OVER and f)

    def finish(
        self, job: str, digest: str, run_dir: Path | None = None, *, cancelled_before: bool = False
    ) -> JobFacts:
        """Wait until the job has ended, with the weights it would have had; nothing of it is left."""
        facts = self.until_over(job)
        assert facts.state == "COMPLETED", self.report()
        assert self.result(run_dir)["state_digest"] == digest, self.report()
        self.nothing_is_left(shared_memory=not cancelled_before)
        return facts

    def result(self, run_dir: Path | None = None) -> dict[str, Any]:
        """`result.json`."""
        return read_json((run_dir or self.run_dir) / "result.json") or {}

    def attempts(self, run_dir: Path | None = None) -> list[Attempt]:
        """The ledger."""
        return list_attempts(run_dir or self.run_dir)

    def endings(self) -> list[str]:
        """The class of each attempt, the oldest first; `died` where its supervisor left no end record."""
        return ["died" if item.end is None else str(item.end.failure) for item in self.attempts()]

    def log(self) -> str:
        """What the supervisors said."""
        path = self.folder / "job.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def report(self) -> str:
        """All that may explain a failure."""
        parts = [f"--- job.log\n{self.log()[-4000:]}"]
        for path in sorted(self.folder.glob("run*/attempts/*/logs/*.log")):
            if path.stat().st_size:
                parts.append(f"--- {path}\n{path.read_text(errors='replace')[-1500:]}")
        for job in self.jobs:
            parts.append(f"--- job {job}\n{self.slurm('scontrol', 'show', 'job', job, check=False)}")
        hosts = self.cluster.spec.host_dir("head").parent
        for path in sorted(hosts.glob("*/log/slurm*.log")):
            lines = path.read_text(errors="replace").splitlines()
            found = [line for line in lines if any(re.search(rf"\b{job}\b", line) for job in self.jobs)]
            parts += [
                f"--- {path}",
                *(line for line in found[-25:] if "error" in line or path.name == "slurmctld.log"),
            ]
        return "\n".join(parts)

    def nothing_is_left(self, shared_memory: bool = True) -> None:
        """Of this scenario's runs, no process (those of all hosts are seen from here) and no shared memory is left.

        A job that is cancelled gets no further job step: what its ranks leave in the shared memory of other nodes stays
        until the run comes by again.
        """
        self.until("all processes to end", lambda: not processes_below(self.folder), 60)
        if not shared_memory:
            return
        for run_dir in self.folder.glob("**/attempts"):
            for host in set(self.cluster.hosts()) & set(self.cluster.spec.partitions[self.partition]):
                found = self.cluster.run("ls", "/dev/shm", host=host).stdout
                assert scratch_prefix(run_dir.parent) not in found, f"{host}: {found}"

    def nodes_are_idle(self, *nodes: str) -> None:
        """Slurm calls these nodes idle."""
        self.cluster.await_states(nodes, "idle", timeout_s=60)


def job_environment() -> dict[str, str]:
    """What a user has who activated an environment: the product and the tests' Task can be imported, and no more."""
    return {
        **{
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM_", "HPCTRAIN_", "OMPI_"))
        },
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HPCTRAIN_SSD": "/mnt/ssd",
        "OMPI_MCA_btl": "^ofi",  # there is no fabric here, and looking for one takes a second of each start
        "OMPI_MCA_mpi_yield_when_idle": "1",  # all nodes share the cores of this machine
    }


def processes_below(folder: Path) -> list[int]:
    """Processes that were started for an attempt of a run in `folder`, or that name it in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            marked = process.environ().get(ATTEMPT_VARIABLE, "").startswith(f"{folder}/")
            if marked or any(f"{folder}/" in word for word in process.cmdline()[1:]):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return [pid for pid in found if pid != os.getpid()]


def last_step(events: Path) -> int:
    """The last step in an event file; -1: none."""
    step = -1
    if events.exists():
        for line in events.read_text(errors="replace").splitlines():
            if '"kind":"step"' in line:
                try:
                    step = json.loads(line)["step"]
                except ValueError:
                    continue
    return step
