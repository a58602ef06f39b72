"""`hpctrain recall`: a packed set back from the cold tier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def recall(
    archived: Annotated[
        Path, typer.Argument(metavar="COLD_DIR/NAME", help="The set, as `hpctrain archive` left it.")
    ],
    dst: Annotated[
        Path, typer.Argument(metavar="DST", help="Folder to make; it appears whole or not at all.")
    ],
    codec: Annotated[
        str | None,
        typer.Option(
            help="Pack it with this codec on the way (see `hpctrain pack --help`). Default: the one it had before it "
            "was archived.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave it in the archive, too.")] = False,
) -> None:
    """Move an archived set back.

    Without --codec it becomes what it was, byte for byte and with the same identity, so that runs that began with it
    can go on. Where other versions of the libraries encode it otherwise, a warning says so: the values are the same,
    runs that began with it are refused, and the set stays in the archive.

    The copy is read back from the disk and every chunk of it checked before the archived one is removed. Killed or
    failed at any point, run the same command again. Ends with 65 when the archived set is damaged, and 74 when reading
    or writing fails or there is no room; nothing is removed then.

    Example: hpctrain recall /archive/me/train packed/train
    """
    from hpctrain.cli.archive import tell
    from hpctrain.cli.verify import byte_progress
    from hpctrain.staging.cold.tier import recall_set

    with byte_progress() as show:
        moved = recall_set(archived, dst, codec, keep, show)
    tell(moved, "recalled")
