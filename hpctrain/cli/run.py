"""`hpctrain run`: bring one run to its end on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    description: Annotated[
        Path, typer.Argument(metavar="RUN.toml", help="The run description.", show_default=False)
    ],
    num_ranks: Annotated[
        int, typer.Option("-n", "--ranks", min=1, help="MPI ranks; at most as many as lanes.")
    ] = 1,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The run directory; default: runs/NAME.", show_default=False)
    ] = None,
) -> None:
    """Train on this machine under mpirun, and come back after crashes until the run is done.

    Run the same command again after an interruption: it resumes from the last checkpoint, with any number
    of ranks. Ctrl-C saves the state and leaves; a second Ctrl-C kills at once.

    Exit codes: 0 done; 75 left, run again to resume; 64, 65, 78 something for you to mend; 70 to 76 given up.

    Example: hpctrain run digits.toml -n 2 --dir /scratch/me/digits
    """
    # Heavy imports wait until the verb runs: `hpctrain --help` answers at once.
    import sys

    from hpctrain.config import load_run
    from hpctrain.launch.local import LocalLauncher
    from hpctrain.observe.progress import make_progress
    from hpctrain.resilience.supervisor import Supervisor

    config = load_run(description)
    supervisor = Supervisor(
        directory or Path("runs") / config.name,
        config,
        num_ranks,
        LocalLauncher(),
        task_dir=description.resolve().parent,
        progress=make_progress(sys.stderr),
    )
    raise typer.Exit(supervisor.run())
