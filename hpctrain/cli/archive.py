"""`hpctrain archive`: a packed set to the cold tier."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hpctrain.staging.cold.tier import Moved

_MB = 1e6


def archive(
    data: Annotated[Path, typer.Argument(metavar="SET", help="The packed set to move.")],
    cold_dir: Annotated[
        Path,
        typer.Argument(metavar="COLD_DIR", help="The archive: a folder that is there; SET keeps its name."),
    ],
    codec: Annotated[
        str | None,
        typer.Option(
            help="Pack it with this codec on the way, such as blosc-zstd (see `hpctrain pack --help`). Default: as is.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave SET where it is, too.")] = False,
) -> None:
    """Move a packed set to the archive.

    The copy is read back from the disk and every chunk of it checked before SET is removed. A run that uses SET needs
    it where it is: nothing tells here whether there is one, so make sure that none is running or waiting to go on, or
    use --keep. Killed or failed at any point, SET is whole in one place at least; run the same command again.

    With --codec the archived copy is another set of the same values. A file beside it says what SET was, and `hpctrain
    recall` makes that of it again, so that runs that began with SET can go on.

    Ends with 65 when SET is damaged, and 74 when reading or writing fails or there is no room; nothing is removed then.

    Example: hpctrain archive packed/train /archive/me --codec blosc-zstd
    """
    from hpctrain.cli.verify import byte_progress
    from hpctrain.staging.cold.tier import archive_set

    with byte_progress() as show:
        moved = archive_set(data, cold_dir, codec, keep, show)
    tell(moved, "archived")
    typer.echo(f"next: hpctrain recall {moved.target} {moved.source}")


def tell(moved: Moved, done: str) -> None:
    """Say what came of a move."""
    for warning in moved.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if moved.went_on:
        typer.echo(f"an earlier run had made {moved.target}; it was not made again")
    size = f"{moved.target_bytes / _MB:.1f} MB"
    if moved.source_bytes:
        size = f"{moved.source_bytes / _MB:.1f} MB, now {size}"
    fate = "was removed" if moved.removed else "stays"
    typer.echo(
        f"{done} {moved.source} as {moved.target}: {size}, {moved.codec}, every chunk checked; {moved.source} {fate}; "
        f"identity {moved.identity}"
    )
