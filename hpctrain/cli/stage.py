"""`hpctrain stage`: copy a run's data to the nodes before it begins, look at the copies, or remove them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hpctrain.errors import UsageError

_GIB = 1 << 30


def stage(
    description: Annotated[
        Path, typer.Argument(metavar="RUN.toml", help="The run description.", show_default=False)
    ],
    num_ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--ranks",
            min=1,
            help="MPI ranks that the run will have, as many on each node. Default: one per node, or all tasks of the "
            "Slurm job.",
            show_default=False,
        ),
    ] = None,
    status: Annotated[
        bool, typer.Option("--status", help="Show the copies of all sets on the nodes, and who uses them.")
    ] = False,
    clean: Annotated[bool, typer.Option("--clean", help="Remove the copies of this run's data.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --status: as JSON, one line a node.")] = False,
) -> None:
    """Copy the chunks that each node will keep from the shared filesystem to its staging.dirs.

    A run does this by itself while it trains; this is for filling nodes before, such as in a job of its own. In a Slurm
    job of several nodes it works on all of them. It can be interrupted and run again: what is there is not read again.

    Exit codes: 0 all is there; 74 not all of it; 64, 65, 78 something for you to mend.

    Example: hpctrain stage digits.toml --status
    """
    if status and clean:
        raise UsageError("--status and --clean are two commands: give one of them")
    nodes = _job_nodes()
    ranks = num_ranks or _job_tasks() or len(nodes)
    if ranks < len(nodes):
        raise UsageError(f"{ranks} ranks on {len(nodes)} nodes: give -n at least {len(nodes)}")
    action = "status" if status else "clean" if clean else "stage"
    program = [sys.executable, "-m", "hpctrain.training.prestage", str(description), "--action", action]
    program += ["--nodes", str(len(nodes)), "--ranks", str(ranks)]
    if len(nodes) == 1:
        command, environment = [*program, "--node", "0"], dict(os.environ)
    else:
        command, environment = _on_all(nodes, program)
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE if status else None, text=True, check=False
    )
    if status and done.returncode == 0:
        lines = done.stdout.splitlines()
        print(done.stdout.strip() if as_json else "\n".join(_table([json.loads(line) for line in lines])))
    raise typer.Exit(done.returncode)


def _on_all(nodes: list[str], program: list[str]) -> tuple[list[str], dict[str, str]]:
    """A job step with one task on each node."""
    from hpctrain.launch.sweep import HELPER_OPTIONS, helper_environment, srun_command

    numbered = ["sh", "-c", 'exec "$@" --node "$SLURM_NODEID"', "stage", *program]
    how = [*HELPER_OPTIONS, "--job-name=hpctrain-stage"]
    return [*srun_command(nodes, len(nodes)), *how, *numbered], helper_environment(os.environ)


def _job_nodes() -> list[str]:
    """The nodes of the Slurm job whose batch script this is; this one alone elsewhere."""
    if "SLURM_JOB_ID" not in os.environ or "SLURM_STEP_ID" in os.environ:
        return ["here"]
    from hpctrain.launch.hostlist import expand_nodes

    return expand_nodes(os.environ.get("SLURM_JOB_NODELIST", "")) or ["here"]


def _job_tasks() -> int | None:
    from hpctrain.launch.hostlist import expand_counts

    counts = os.environ.get("SLURM_TASKS_PER_NODE")
    return sum(expand_counts(counts)) if counts and "SLURM_STEP_ID" not in os.environ else None


def _table(nodes: list[dict[str, Any]]) -> list[str]:
    """One line for each copy."""
    lines = []
    for node in nodes:
        for item in node["mirrors"]:
            used = "in use" if item["is_owned"] else "free"
            kind = "memory" if item["is_memory"] else "disk"
            lines.append(
                f"{node['node']}: {item['path']}: {item['present_chunks']} of {item['total_chunks']} chunks, "
                f"{item['present_bytes'] / _GIB:.2f} of {item['total_bytes'] / _GIB:.2f} GiB, {kind}, {used}"
            )
        if not node["mirrors"]:
            lines.append(f"{node['node']}: nothing is staged")
    return lines
