"""`hpctrain inspect`: what is in HDF5 files, how it is read, and what that costs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from hpctrain.h5.survey_facts import DatasetSurvey, FileSurvey

_LINE_INTERVAL_S = 5.0
_PIPED_WIDTH = 10_000  # where there is no terminal, nothing is cut
_MAX_SHARDS = 3
_MAX_LINES = 50


def inspect(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="HDF5 files, or folders of packed sets.")
    ],
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples in a lane's batch, for the read amplification.")
    ] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
    verify_chunks: Annotated[
        int, typer.Option(min=0, help="Chunks per dataset that are compared with libhdf5; 0: none.")
    ] = 4,
    max_gib: Annotated[
        float, typer.Option(min=0, help="Raw GiB that a dataset of a small file may claim.")
    ] = 64.0,
) -> None:
    """What is in HDF5 files: every dataset with its layout, how it is read and why, and what random reads cost.

    Amplification is the bytes that must be decoded for random samples (1, or a batch) over the bytes they hold.
    Each file is looked at by a process of its own, which may crash on it. Ends with 65 when something is damaged,
    cannot be read, or is refused, after showing everything else.

    Example: hpctrain inspect fields.h5 packed/ --batch-size 32
    """
    import json

    from hpctrain.errors import DataError, UsageError
    from hpctrain.h5.survey import survey
    from hpctrain.h5.survey_facts import Limits

    if not math.isfinite(max_gib):
        raise UsageError(f"--max-gib {max_gib}: give a number of GiB")
    limits = Limits(max_bytes=int(max_gib * 2**30))
    paths, notes = _expand(files)
    found = []
    for number, path in enumerate(paths, 1):
        with _progress(f"{number}/{len(paths)} {path}") as progress:
            found.append(survey(path, limits, verify_chunks, progress))
        if not as_json:
            _show_file(found[-1], batch_size)
    if as_json:
        document = {"files": [_document(item, batch_size) for item in found], "notes": notes}
        typer.echo(json.dumps(document, indent=1))
    else:
        for note in notes:
            typer.echo(plain(note))
    bad = [item for item in found if not item.sound]
    if bad:
        raise DataError(
            f"{len(bad)} of {len(found)} files are refused, or hold something damaged or unreadable: see above"
        )


def plain(text: str) -> str:
    """Text from a file nobody vouches for: what a terminal would obey, or cannot show, becomes an escape."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _expand(files: list[Path]) -> tuple[list[Path], list[str]]:
    """The files to look at, a few shards for a packed set; and what to say about that."""
    from hpctrain.errors import UsageError
    from hpctrain.h5.manifest import read_manifest

    paths, notes = [], []
    for path in files:
        if not path.exists():
            raise UsageError(f"{path}: there is no such file; name HDF5 files or folders of packed sets")
        if not path.is_dir():
            paths.append(path)
            continue
        shards = [path / entry["file"] for entry in read_manifest(path)["shards"]]
        paths += shards[:_MAX_SHARDS]
        if len(shards) > _MAX_SHARDS:
            notes.append(f"{path}: the first {_MAX_SHARDS} of {len(shards)} shards were looked at")
    return paths, notes


def _show_file(found: FileSurvey, batch_size: int) -> None:
    from hpctrain.h5.advice import advice, size_words

    shown = _shown(found)
    holds = f"{size_words(found.file_bytes)}, {_count(found.num_groups, 'group')}, {_count(len(shown), 'dataset')}"
    typer.echo(plain(f"{found.path}: {'refused' if found.refused else holds}"))
    if shown:
        _print_table(_table(shown, batch_size))
    _lines("links that are not followed:", [f"{i.name} -> {i.target} ({i.kind})" for i in found.links])
    _lines("refused:", [found.refused] if found.refused else [])
    _lines("damaged or unreadable:", [f"{item.name}: {item.cause}" for item in found.findings])
    _lines("not all was looked at:", [found.cut] if found.cut else [])
    words = advice(found, batch_size)
    if words:
        typer.echo(plain(f"advice: {words}"))
    typer.echo()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _shown(found: FileSurvey) -> list[DatasetSurvey]:
    """All datasets, without the digests that `pack` keeps beside the data."""
    from hpctrain.h5.advice import is_internal

    return [item for item in found.datasets if not is_internal(item)]


def _lines(title: str, lines: list[str]) -> None:
    if not lines:
        return
    typer.echo(title)
    for line in lines[:_MAX_LINES]:
        typer.echo(f"  {plain(line)}")
    if len(lines) > _MAX_LINES:
        typer.echo(f"  and {len(lines) - _MAX_LINES} more (--json shows all)")


def _table(datasets: list[DatasetSurvey], batch_size: int) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("dataset", "shape", "type", "chunk", "filters"):
        table.add_column(title, overflow="fold")
    for title in ("raw", "stored", "ratio", "samples/chunk", "amplif. of 1", f"of {batch_size}"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("read by", overflow="fold")
    for item in datasets:
        table.add_row(*map(plain, _row(item, batch_size)))
    return table


def _row(item: DatasetSurvey, batch_size: int) -> list[str]:
    from hpctrain.h5.advice import read_amplification, samples_per_chunk, size_words

    def number(value: float | None, words: str) -> str:
        return "-" if value is None else format(value, words)

    return [
        item.name,
        _shape_words(item.shape) if item.shape is not None else "empty",
        item.dtype,
        _shape_words(item.chunk_shape) if item.chunk_shape else item.layout,
        ", ".join(item.filters) or "none",
        size_words(item.raw_bytes),
        size_words(item.stored_bytes),
        number(item.ratio, ".2f"),
        number(samples_per_chunk(item), ","),
        number(read_amplification(item, 1), ",.1f"),
        number(read_amplification(item, batch_size), ",.1f"),
        _road_words(item),
    ]


def _shape_words(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _road_words(item: DatasetSurvey) -> str:
    if item.road == "none":
        return "nothing: see below"
    return f"{item.road}: {item.reason}" if item.reason else item.road


def _print_table(table: Table) -> None:
    from rich.console import Console

    width = None if Console().is_terminal else _PIPED_WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _document(found: FileSurvey, batch_size: int) -> dict[str, Any]:
    from dataclasses import asdict

    from hpctrain.h5.advice import advice, read_amplification, samples_per_chunk

    datasets = [
        asdict(item)
        | {
            "ratio": item.ratio,
            "samples_per_chunk": samples_per_chunk(item),
            "amplification_sample": read_amplification(item, 1),
            "amplification_batch": read_amplification(item, batch_size),
        }
        for item in found.datasets
    ]
    return asdict(found) | {
        "path": str(found.path),
        "datasets": datasets,
        "advice": advice(found, batch_size),
        "batch_size": batch_size,
    }


@contextmanager
def _progress(title: str) -> Iterator[Callable[[str], None]]:
    """The object that is looked at: on a terminal in place, else a line every few seconds; on standard error."""
    if not sys.stderr.isatty():
        yield _progress_lines(title)
        return
    from rich.console import Console

    with Console(stderr=True, markup=False).status(plain(title)) as status:
        yield lambda name: status.update(plain(f"{title} {name}"))


def _progress_lines(title: str) -> Callable[[str], None]:
    last_s = time.monotonic()
    count = 0

    def show(name: str) -> None:
        nonlocal last_s, count
        count += 1
        if time.monotonic() - last_s >= _LINE_INTERVAL_S:
            last_s = time.monotonic()
            print(plain(f"inspect {title}: {name} ({count} objects so far)"), file=sys.stderr, flush=True)

    return show
