"""`hpctrain env-archive`: ship the Python environment to the nodes as one file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

_LINE_INTERVAL_S = 5.0
_MB = 1e6

env_archive = typer.Typer(
    help="Ship the Python environment to the nodes' own disks as one file.",
    epilog="Example: hpctrain env-archive create env.tar.gz",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@env_archive.command()
def create(
    out: Annotated[
        Path, typer.Argument(metavar="OUT.tar.gz", help="The archive to write.", show_default=False)
    ],
    prefix: Annotated[
        Path | None,
        typer.Option(help="The virtual environment. Default: the one this runs in.", show_default=False),
    ] = None,
) -> None:
    """Write a virtual environment into one archive; run it where the environment is, on the login node.

    Editable packages go in as real ones. The base interpreter (the Python that the environment was made with)
    does not: every node needs it at the same path. `activate` scripts are left out; call bin/python.

    Example: hpctrain env-archive create /scratch/me/env.tar.gz
    """
    from hpctrain.launch.environment.archive import create_archive

    started_s = time.monotonic()
    with _progress("archived") as progress:
        made = create_archive(out, prefix or Path(sys.prefix), progress)
    for warning in made.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(
        f"{out}: {made.header.members} members, {made.header.total_bytes / _MB:.0f} MB, in "
        f"{made.archive_bytes / _MB:.0f} MB; {time.monotonic() - started_s:.1f} s; digest {made.header.digest}"
    )


@env_archive.command()
def unpack(
    archive: Annotated[
        Path, typer.Argument(metavar="ARCHIVE", help="What `create` wrote.", show_default=False)
    ],
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="On the node's own disk; $VARIABLES are expanded.", show_default=False
        ),
    ],
) -> None:
    """Unpack an archive on this node, once, and print the path of its python (and only that).

    Any number of processes may do so at once: one unpacks and the others wait. What is there already is
    used again.

    Example: PYTHON=$(hpctrain env-archive unpack /scratch/me/env.tar.gz '$TMPDIR')
    """
    from hpctrain.launch.environment.unpack import unpack_archive

    with _progress("unpacked") as progress:
        python = unpack_archive(archive, directory, progress)
    typer.echo(python)


@contextmanager
def _progress(verb: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, else a line every few seconds; both on standard error."""
    if not sys.stderr.isatty():
        yield _lines(verb, time.monotonic)
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(verb, total=None)

        def show(done_bytes: int, total_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes)

        yield show


def _lines(verb: str, clock: Callable[[], float]) -> Callable[[int, int], None]:
    started_s = last_s = clock()

    def show(done_bytes: int, total_bytes: int) -> None:
        nonlocal last_s
        now_s = clock()
        if now_s - last_s < _LINE_INTERVAL_S:
            return
        last_s = now_s
        typer.echo(
            f"{verb} {done_bytes / _MB:.0f} of {total_bytes / _MB:.0f} MB in {now_s - started_s:.0f} s",
            err=True,
        )

    return show
