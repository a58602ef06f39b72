"""Job steps beside the ranks: how every srun begins, and one that sees to it that a node is clean."""

from __future__ import annotations

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
# They would overrule the placement, or make srun warn that it does not fit.
_OVERRULING = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_DISTRIBUTION")
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


def srun_command(nodes: Sequence[str], num_tasks: int) -> list[str]:
    """The beginning of every srun: where, and how many.

    `--no-kill`: the failure of a node does not end the job. `--overlap`: the step of an attempt that lost a node stays
    in Slurm's books, and must not keep the next one from the same cores.
    """
    where = [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", f"--ntasks={num_tasks}"]
    return ["srun", "--no-kill", "--overlap", "--export=ALL", *where]


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the batch script, less what would overrule where a step is to run."""
    return {key: value for key, value in environment.items() if key not in _OVERRULING}


def sweep(nodes: Sequence[str], run_dir: Path, environment: Mapping[str, str]) -> set[str]:
    """Have each node kill processes of this run and remove their shared memory; returns the nodes that did.

    Slurm itself notices a dead node only after SlurmdTimeout, often five minutes.
    """
    swept = sweep_groups([nodes], run_dir, environment) if nodes else set()
    if swept.issuperset(nodes):
        return swept
    # A step on a node that is gone does not start on the others either: each by itself.
    return swept | sweep_groups([[node] for node in nodes if node not in swept], run_dir, environment)


def sweep_groups(groups: Sequence[Sequence[str]], run_dir: Path, environment: Mapping[str, str]) -> set[str]:
    """One sweeping step per group of nodes, all at once; late ones get little time once somebody has answered."""
    steps = [_start_sweep(group, run_dir, environment) for group in groups]
    deadline_s = time.monotonic() + _SWEEP_TIMEOUT_S
    while running := [step for step in steps if step.poll() is None]:
        if len(running) < len(steps):
            deadline_s = min(deadline_s, time.monotonic() + _STRAGGLER_TIMEOUT_S)
        if time.monotonic() > deadline_s:
            break
        time.sleep(_POLL_S)
    for step in running:
        step.kill()
    return {node for step in steps for node in step.communicate()[0].split()}


def _start_sweep(
    nodes: Sequence[str], run_dir: Path, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    marks = [f"{ATTEMPT_VARIABLE}={run_dir.resolve() / 'attempts'}{os.sep}", scratch_prefix(run_dir)]
    how = ["--immediate=10", "--mpi=none", "--quiet", "--job-name=hpctrain-sweep"]
    return subprocess.Popen(
        [*srun_command(nodes, len(nodes)), *how, "sh", "-c", _SWEEP, "sweep", *marks],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=step_environment(environment),
    )
