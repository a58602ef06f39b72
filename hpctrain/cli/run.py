"""`hpctrain run`: bring one run to its end, on this machine or in the Slurm job that this process runs in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hpctrain.config import RunConfig
    from hpctrain.launch.slurm_job import SlurmJob
    from hpctrain.resilience.launching import Launcher


def run(
    description: Annotated[
        Path, typer.Argument(metavar="RUN.toml", help="The run description.", show_default=False)
    ],
    num_ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--ranks",
            min=1,
            help="MPI ranks; at most as many as lanes. Default: 1, or all tasks of the Slurm job.",
            show_default=False,
        ),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The run directory; default: runs/NAME.", show_default=False)
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            envvar="HPCTRAIN_LAUNCHER",
            help="auto, mpirun, srun-pmix, srun-pmi2 or cray_shasta; default: the description's.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train under mpirun, or inside a Slurm job under srun, and come back after crashes until the run is done.

    Run the same command again after an interruption: it resumes from the last checkpoint, with any number
    of ranks. Ctrl-C saves the state and leaves; a second Ctrl-C kills at once. In a Slurm job, nodes that fail are left
    out, and the job is requeued before its time is up (see slurm/train.sbatch).

    Exit codes: 0 done; 75 left or requeued; 64, 65, 78 something for you to mend; 70 to 76 given up.

    Example: hpctrain run digits.toml -n 2 --dir /scratch/me/digits
    """
    # Heavy imports wait until the verb runs: `hpctrain --help` answers at once.
    import sys

    from hpctrain.config import load_run
    from hpctrain.launch.slurm_job import current_job, job_is_alive
    from hpctrain.observe.progress import make_progress
    from hpctrain.resilience.supervisor import Supervisor

    config, job = load_run(description), current_job()
    run_dir = directory or Path("runs") / config.name
    if config.data.fields and not (run_dir / "attempts").exists():
        _vet(config)
    supervisor = Supervisor(
        run_dir,
        config,
        _make_launcher(launcher, config, job, num_ranks),
        job=job,
        task_dir=description.resolve().parent,
        progress=make_progress(sys.stderr),
        is_alive=job_is_alive,
    )
    raise typer.Exit(supervisor.run())


def _vet(config: RunConfig) -> None:
    """Look at HDF5 files that were not packed in a process that may crash, before any rank touches them."""
    from hpctrain.h5.vetting import hdf5_files, refuse_damaged

    for path in filter(None, (config.data.train, config.data.evaluate)):
        refuse_damaged(hdf5_files(path), config.data.fields, int(config.data.max_gib * 2**30))


def _make_launcher(
    kind: str | None, config: RunConfig, job: SlurmJob | None, num_ranks: int | None
) -> Launcher:
    """The door to the ranks: mpirun on this machine, unless this is a Slurm job."""
    from hpctrain.config import LAUNCHERS
    from hpctrain.errors import UsageError
    from hpctrain.launch.local import LocalLauncher
    from hpctrain.launch.slurm import SlurmLauncher

    kind = kind or config.cluster.launcher
    if kind not in LAUNCHERS:
        raise UsageError(f"launcher {kind!r}: use one of {', '.join(LAUNCHERS)}")
    if job is not None:
        return SlurmLauncher(job, "srun-pmix" if kind == "auto" else kind, num_ranks)
    if kind not in ("auto", "mpirun"):
        raise UsageError(
            f"launcher {kind} works inside a Slurm job; submit slurm/train.sbatch, or use mpirun"
        )
    return LocalLauncher(num_ranks or 1)
