"""`hpctrain restore`: packed sets out of a backup store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.progress import progress

_MB = 1e6


def restore(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="What `hpctrain backup` made.")],
    which: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME[@GENERATION]]", help="A set in it; the newest generation if none is named."
        ),
    ] = None,
    dst: Annotated[
        Path | None, typer.Argument(metavar="[DST]", help="Folder to make; it appears whole or not at all.")
    ] = None,
    repair: Annotated[
        Path | None,
        typer.Option(
            help="Mend the packed set DATA in place instead: damaged chunks, and where the store has this very set all "
            "else in its files, too. NAME[@GENERATION] says which it is where its dataset.json is damaged.",
            metavar="DATA",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a packed set at DST.")] = False,
) -> None:
    """Rebuild a packed set from a backup store, byte for byte, or mend a damaged one in place.

    Every object is verified while it is read. Ends with 65 where the store lacks something, and names it: then nothing
    is restored; a repair mends what it can.

    Example: hpctrain restore /archive/store digits@3 packed/

    Example: hpctrain restore /archive/store --repair packed/
    """
    from hpctrain.errors import UsageError

    if repair is not None:
        if dst is not None or overwrite:
            raise UsageError("--repair works on DATA in place: give no DST and no --overwrite with it")
        _repair(store, repair, which)
    elif which is None or dst is None:
        raise UsageError(
            f"say what to restore and where: hpctrain restore {store} NAME[@GENERATION] DST; "
            f"`hpctrain backup {store} --list` shows what there is"
        )
    else:
        _restore(store, which, dst, overwrite)


def _restore(store: Path, which: str, dst: Path, overwrite: bool) -> None:
    from hpctrain.staging.backup import restore

    with progress("restoring") as advance:
        report = restore(store, which, dst, overwrite, advance)
    num_bytes = report.generation.num_bytes
    print(
        f"{report.root}: {report.generation.label}, {len(report.generation.files)} files, {num_bytes / _MB:.1f} MB, "
        f"{num_bytes / _MB / max(report.seconds, 1e-9):.1f} MB/s; identity {report.generation.identity}"
    )


def _repair(store: Path, data: Path, which: str | None) -> None:
    from hpctrain.errors import DataError
    from hpctrain.staging.backup import repair

    with progress("checking") as advance:
        report = repair(store, data, which, advance)
    for place in report.mended:
        print(f"mended: {place}")
    truth = f"{report.truth}" if report.truth else "the digests of its chunks"
    if report.lost:
        raise DataError(
            f"{data}: {len(report.lost)} pieces are damaged still, {len(report.mended)} were mended "
            f"(compared with {truth}):\n  " + "\n  ".join(report.lost)
        )
    print(
        f"{data}: {report.checked_bytes / _MB:.1f} MB compared with {truth}; {len(report.mended)} places mended, all "
        f"right now; {report.checked_bytes / _MB / max(report.seconds, 1e-9):.1f} MB/s"
    )
