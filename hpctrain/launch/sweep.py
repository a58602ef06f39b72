"""Job steps beside the ranks: how every srun begins, and one that sees to it that a node is clean."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.resilience.attempts import ATTEMPT_VARIABLE
from hpctrain.resilience.scratch import scratch_prefix

_SWEEP_TIMEOUT_S = 20.0
_STRAGGLER_TIMEOUT_S = 5.0
_POLL_S = 0.05
_CHUNK_NODES = 32
_MAX_STEPS = 64  # each is a process and a pipe
# They would overrule the placement, or make srun warn that it does not fit. srun takes SLURM_GPUS for its --gpus: those
# of the whole job, for each of its steps.
_OVERRULING = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_DISTRIBUTION"),
    "SLURM_HOSTFILE",
    *("SLURM_GPUS", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE"),
)
# What each rank is to have. srun also refuses some of these beside `--gres=none`.
_FOR_RANKS = (
    *("SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_TRES_PER_TASK"),
    "SLURM_CPUS_PER_TASK",
)

HELPER_OPTIONS = ("--mpi=none", "--gres=none")
"""Of a step that computes nothing: without the second, it asks for the GPUs that the job was submitted with."""

# Kills processes whose environment holds $1 (an attempt of the run) until none is left, removes /dev/shm/$2*, and says
# the node's name: without it, something is left.
_SWEEP = """\
for second in 1 2 3 4 5 6 7 8 9 10; do
  found=$(grep -lsazF -- "$1" /proc/[0-9]*/environ | sed 's|/proc/||; s|/environ||')
  if [ -z "$found" ]; then rm -rf -- "/dev/shm/$2"*; echo "$SLURMD_NODENAME"; exit 0; fi
  kill -9 $found 2>/dev/null
  sleep 1
done
exit 1"""


def srun_command(nodes: Sequence[str], num_tasks: int, task_nodes: Sequence[str] = ()) -> list[str]:
    """The beginning of every srun: where, and how many.

    `--no-kill`: the failure of a node does not end the job. `--overlap`: the step of an attempt that lost a node stays
    in Slurm's books, and must not keep the next one from the same cores.

    Slurm goes through the nodes in an order of its own, whatever that of `nodes`, unless it gets the node of each task.
    """
    names = ",".join(task_nodes or nodes)
    where = [f"--nodes={len(nodes)}", f"--nodelist={names}", f"--ntasks={num_tasks}"]
    order = ["--distribution=arbitrary"] if task_nodes else []
    return ["srun", "--no-kill", "--overlap", "--export=ALL", *where, *order]


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the batch script, less what would overrule where a step is to run."""
    return {key: value for key, value in environment.items() if key not in _OVERRULING}


def helper_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """As `step_environment`, less also what ranks are to have."""
    return {key: value for key, value in step_environment(environment).items() if key not in _FOR_RANKS}


def sweep(nodes: Sequence[str], run_dir: Path, environment: Mapping[str, str]) -> set[str]:
    """Have each node kill processes of this run and remove their shared memory; returns the nodes that did.

    Slurm itself notices a dead node only after SlurmdTimeout, often five minutes.
    """
    chunks = [nodes[first : first + _CHUNK_NODES] for first in range(0, len(nodes), _CHUNK_NODES)]
    swept = sweep_groups(chunks, run_dir, environment)
    # A step on a node that is gone does not start on the others of its chunk either: each by itself.
    return swept | sweep_groups([[node] for node in nodes if node not in swept], run_dir, environment)


def sweep_groups(
    groups: Sequence[Sequence[str]],
    run_dir: Path,
    environment: Mapping[str, str],
    timeout_s: float | None = None,
) -> set[str]:
    """One sweeping step per group of nodes, many at once; returns the nodes that answered.

    A step has `timeout_s` (20 s), but little more than the last one that answered. One that cannot be started is no
    answer.
    """
    timeout_s = _SWEEP_TIMEOUT_S if timeout_s is None else timeout_s
    waiting, swept, answered_s = list(groups), set[str](), math.inf
    running: dict[subprocess.Popen[str], float] = {}
    while waiting or running:
        while waiting and len(running) < _MAX_STEPS:
            with contextlib.suppress(OSError):
                running[_start_sweep(waiting.pop(0), run_dir, environment)] = time.monotonic()
        for step, started_s in list(running.items()):
            straggles_s = max(started_s, answered_s) + _STRAGGLER_TIMEOUT_S
            if step.poll() is None and time.monotonic() < min(started_s + timeout_s, straggles_s):
                continue
            del running[step]
            step.kill()
            if names := step.communicate()[0].split():
                swept.update(names)
                answered_s = time.monotonic()
        time.sleep(_POLL_S)
    return swept


def _start_sweep(
    nodes: Sequence[str], run_dir: Path, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    marks = [f"{ATTEMPT_VARIABLE}={run_dir.resolve() / 'attempts'}{os.sep}", scratch_prefix(run_dir)]
    how = [*HELPER_OPTIONS, "--immediate=10", "--quiet", "--job-name=hpctrain-sweep"]
    return subprocess.Popen(
        [*srun_command(nodes, len(nodes)), *how, "sh", "-c", _SWEEP, "sweep", *marks],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=helper_environment(environment),
    )
