"""`hpctrain backup`: keep packed sets in a store, generation by generation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.cli.progress import progress

if TYPE_CHECKING:
    from hpctrain.staging.backup import BackupReport, Generation

_MB = 1e6


def backup(
    places: Annotated[
        list[Path],
        typer.Argument(
            metavar="[DATA] DEST", help="A packed set, and the store; the store alone with the options."
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the set in the store. Default: that of the folder DATA.", show_default=False
        ),
    ] = None,
    prune: Annotated[
        int | None,
        typer.Option(
            help="Keep the newest KEEP generations of each set; then remove what no generation needs.",
            metavar="KEEP",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Read all of the store; name what is missing or damaged and what that harms. The next backup of a set "
            "that has it puts it back.",
        ),
    ] = False,
    show_list: Annotated[
        bool, typer.Option("--list", help="Show sets and generations: dates, sizes, what each added.")
    ] = False,
) -> None:
    """Add a packed set to a backup store; only what the store does not have is written.

    DEST is a folder, made where there is none, that holds any number of sets and generations; chunks that are the
    same are kept once. All of DATA is read: damaged chunks are named, and there is no new generation then (65).
    With --prune and --verify this is done after the backup; with DEST alone there is none.

    Example: hpctrain backup packed/ /archive/store --name digits --prune 7

    Example: hpctrain backup /archive/store --list
    """
    from hpctrain.errors import UsageError

    data, dest = _places(places)
    if data is None and not (show_list or verify or prune is not None):
        raise UsageError(
            f"name the store, too: hpctrain backup {dest} DEST; or give --list, --verify or --prune KEEP"
        )
    if data is None and name is not None:
        raise UsageError("--name names a set that is backed up: give DATA, too")
    if data is not None:
        _back_up(data, dest, name)
    if prune is not None:
        _prune(dest, prune)
    if verify:
        _verify(dest)
    if show_list:
        _list(dest)


def _places(places: list[Path]) -> tuple[Path | None, Path]:
    from hpctrain.errors import UsageError

    if len(places) > 2:
        raise UsageError(f"{len(places)} folders are given; give DATA and DEST, or DEST alone")
    return (None, places[0]) if len(places) == 1 else (places[0], places[1])


def _back_up(data: Path, dest: Path, name: str | None) -> None:
    from hpctrain.staging.backup import back_up

    with progress("backing up") as advance:
        report = back_up(data, dest, name, advance)
    _warn(report.problems)
    print(summary(report))


def summary(report: BackupReport) -> str:
    """One line about a finished backup."""
    ratio = report.read_bytes / max(report.added_bytes, 1)
    return (
        f"{report.generation.label}: {report.read_bytes / _MB:.1f} MB read, {report.new_chunks} of {report.num_chunks} "
        f"chunks new, {report.added_bytes / _MB:.3f} MB added (ratio {ratio:.1f}), "
        f"{report.read_bytes / _MB / max(report.seconds, 1e-9):.1f} MB/s; identity {report.generation.identity}"
    )


def _prune(dest: Path, keep: int) -> None:
    from hpctrain.staging.backup import prune

    with progress("pruning") as advance:
        report = prune(dest, keep, advance)
    _warn(report.problems)
    freed = report.bytes_before - report.bytes_after
    removed = ", ".join(report.removed) or "no generation"
    print(f"{dest}: {removed} removed; {freed / _MB:.3f} MB freed, {report.bytes_after / _MB:.3f} MB kept")


def _verify(dest: Path) -> None:
    from hpctrain.errors import DataError
    from hpctrain.staging.backup import check_store

    with progress("verifying") as advance:
        report = check_store(dest, advance)
    _warn(report.notes)
    rate = report.num_bytes / _MB / max(report.seconds, 1e-9)
    words = f"{report.num_objects} objects, {report.num_bytes / _MB:.1f} MB, {rate:.1f} MB/s"
    if report.problems:
        raise DataError(
            f"{dest}: {words}; {len(report.problems)} problems:\n  "
            + "\n  ".join(report.problems)
            + "\nback up "
            "again the sets that still have what is missing: that puts it back"
        )
    print(f"{dest}: {words}: all right; {report.num_generations} generations can be restored")


def _list(dest: Path) -> None:
    from hpctrain.staging.backup import list_generations
    from hpctrain.staging.backup.store import open_store

    generations, problems = list_generations(open_store(dest))
    for line in table(generations):
        print(line)
    _warn(problems)


def table(generations: list[Generation]) -> list[str]:
    """All generations, a line each, below a head."""
    from hpctrain.cli.inspect import plain

    head = ("SET@GENERATION", "DATE (UTC)", "MB", "CHUNKS", "MB ADDED", "FROM")
    rows = [
        (
            item.label,
            item.created,
            f"{item.num_bytes / _MB:.1f}",
            str(sum(recipe.num_chunks for recipe in item.files)),
            f"{item.added_bytes / _MB:.3f}",
            plain(item.source),
        )
        for item in generations
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if 2 <= column <= 4 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def _warn(problems: tuple[str, ...] | list[str]) -> None:
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
