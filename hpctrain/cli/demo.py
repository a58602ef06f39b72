"""`hpctrain demo`: the promise, shown in some minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Folder for data and runs; kept.")] = Path(
        "runs/demo"
    ),
    recipe: Annotated[
        str | None,
        typer.Option(help="emoji or digits; default: emoji where npm is there.", show_default=False),
    ] = None,
) -> None:
    """Show the promise: pack, stage, train on 2 ranks, kill one, come back, and compare the weights.

    Trains twice: once with a rank killed by SIGKILL in mid-epoch, once undisturbed. The digests of the final weights
    must be equal.

    Example: hpctrain demo --recipe digits
    """
    from rich.console import Console
    from rich.table import Table

    from hpctrain.recipes.demo import DemoFailed, run_demo

    report = run_demo(directory, recipe, lambda text: typer.echo(text))
    table = Table(show_header=False, title="hpctrain demo", title_justify="left")
    for name, value in report.rows():
        table.add_row(name, value, end_section=name == "restarts")
    Console(width=None if Console().is_terminal else 120).print(table)
    if not report.equal:
        raise DemoFailed(
            f"the two runs ended with different weights; compare {report.run_dirs[0]} and {report.run_dirs[1]}"
        )
