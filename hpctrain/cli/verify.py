"""`hpctrain verify`: is the data still what was packed?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hpctrain.staging.verify.findings import VerifyReport

_MAX_LINES = 50
_MB = 1e6


def verify(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="A packed set, an HDF5 file, or a folder of HDF5 files.")
    ],
    decode: Annotated[
        bool,
        typer.Option("--decode", help="Also decode every chunk. Chunks without a digest are decoded anyway."),
    ] = False,
    threads: Annotated[int, typer.Option(min=0, max=1024, help="Checking threads; 0: all cores.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Check every stored chunk of DATA, and name all that is bad: file, dataset, chunk, samples, place in the file.

    A packed set is compared with the digests beside its chunks and with its manifest. Other HDF5 files have no
    digests: their chunks are decoded, and Fletcher32 sums compared where there are some. What the kernel still holds
    of the files in memory is read from there.

    Ends with 0 when all is right, 65 when something is bad, and 74 when the only thing wrong is that the disk does not
    give some of the bytes.

    Example: hpctrain verify packed/

    Example: hpctrain verify run.h5 --json
    """
    from hpctrain.errors import DataError, StorageError
    from hpctrain.staging.verify.verification import verify_set

    with byte_progress() as show:
        report = verify_set(
            data, decode=decode, threads=threads, progress=lambda done, total: show("verify", done, total)
        )
    if as_json:
        import json

        typer.echo(json.dumps(_document(report), indent=1))
    else:
        _show(report)
    if report.sound:
        return
    count = f"{len(report.findings)} things are wrong with {data}"
    if report.only_unreadable:
        raise StorageError(
            f"{count}: the disk does not give some bytes; check it and run again, or {_mend(data)}"
        )
    raise DataError(f"{count}; {_mend(data)}")


def _mend(data: Path) -> str:
    return (
        f"mend it from a backup with `hpctrain restore STORE --repair {data}`, copy the files named anew from a good "
        "copy, or pack the source again"
    )


def _show(report: VerifyReport) -> None:
    from hpctrain.cli.inspect import plain

    for finding in report.findings[:_MAX_LINES]:
        typer.echo(plain(str(finding)))
    if len(report.findings) > _MAX_LINES:
        typer.echo(f"and {len(report.findings) - _MAX_LINES} more (--json shows all)")
    for note in report.notes:
        typer.echo(plain(f"note: {note}"))
    if report.unvouched_chunks:
        typer.echo(
            f"note: {report.unvouched_chunks} of {report.num_chunks} chunks have neither a digest nor a Fletcher32 sum "
            "to compare with: only what does not decode was found"
        )
    typer.echo(plain(_summary(report)))


def _summary(report: VerifyReport) -> str:
    how = ", decoded" if report.decoded else ""
    verdict = "all right" if report.sound else f"{len(report.findings)} things are wrong"
    return (
        f"{report.root}: {verdict}; {report.num_chunks} chunks in {report.num_files} files{how}; "
        f"{report.num_bytes / _MB:.1f} MB, {report.num_bytes / _MB / max(report.seconds, 1e-9):.1f} MB/s"
    )


def _document(report: VerifyReport) -> dict[str, object]:
    from dataclasses import asdict

    document = asdict(report) | {"root": str(report.root), "sound": report.sound}
    document["findings"] = [asdict(item) | {"path": str(item.path)} for item in report.findings]
    return document


@contextmanager
def byte_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Shows work on bytes, with its rate and the time that is left: called with the verb, bytes done, bytes in all."""
    from hpctrain.cli.progress import amount, display

    def words(done: int, total: int, elapsed_s: float) -> str:
        left_s = elapsed_s * (total - done) / max(done, 1)
        return f"{amount(done, total, 'MB', elapsed_s)}, {left_s:.0f} s left"

    with display() as show:
        yield lambda verb, done, total: show(verb, done, total, lambda spent_s: words(done, total, spent_s))
