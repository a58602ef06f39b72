"""`hpctrain pack`: data files to a packed set."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from typing import Literal

    from hpctrain.h5.pack import PackReport, Progress

_LINE_INTERVAL_S = 5.0
_MB = 1e6


def pack(
    src: Annotated[
        Path, typer.Argument(metavar="SRC", help="Folder of images, table, or .npy file or folder.")
    ],
    dst: Annotated[
        Path, typer.Argument(metavar="DST", help="Folder to make; it appears whole or not at all.")
    ],
    codec: Annotated[str, typer.Option(help="none, gzip, blosc-lz4, blosc-zstd, lz4 or zstd.")] = "blosc-lz4",
    chunk_samples: Annotated[
        int | None,
        typer.Option(help="Samples per chunk. Default: the largest field fills 256 KiB.", show_default=False),
    ] = None,
    shard_mib: Annotated[float, typer.Option(help="About how many raw MiB a shard holds.")] = 256.0,
    size: Annotated[
        int | None,
        typer.Option(help="Scale pictures to N x N pixels.", metavar="N", show_default=False),
    ] = None,
    gray: Annotated[bool, typer.Option("--gray", help="One channel: pictures are (H, W).")] = False,
    store: Annotated[
        str | None,
        typer.Option(
            help="float16 or float32: type of float fields. Default: as they come.", show_default=False
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="Encoding threads; 0: all cores.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a packed set at DST.")] = False,
) -> None:
    """Pack data files into chunked, compressed HDF5 shards.

    SRC is a folder with one sub-folder of images per class; or a table (.csv, .tsv, or a folder with one)
    whose column `file` names images, beside `text`, `label` and other columns; or a .npy file; or a folder of
    .npy files.

    Example: hpctrain pack photos/ packed/ --size 64 --codec blosc-zstd
    """
    from hpctrain.h5.pack import PackOptions, pack_path

    options = PackOptions(
        codec=codec,
        chunk_samples=chunk_samples,
        shard_mib=shard_mib,
        threads=threads,
        store=cast("Literal['float16', 'float32'] | None", store),
        overwrite=overwrite,
    )
    with _progress() as progress:
        report = pack_path(src, dst, options, size, gray, progress)
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(summary(report))


def summary(report: PackReport) -> str:
    """One line about a finished pack."""
    ratio = report.raw_bytes / max(report.stored_bytes, 1)
    return (
        f"{report.root}: {report.num_samples} samples in {report.num_shards} shards, "
        f"{report.chunk_samples} per chunk; {report.raw_bytes / _MB:.1f} MB raw, {report.stored_bytes / _MB:.1f} MB "
        f"stored (ratio {ratio:.2f}), {report.raw_bytes / _MB / max(report.seconds, 1e-9):.1f} MB/s; "
        f"identity {report.identity}"
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal, else a line every few seconds; both on standard error."""
    if not sys.stderr.isatty():
        yield _lines(time.monotonic)
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("packing", total=None)

        def show(done: int, total: int, raw_bytes: int) -> None:
            bar.update(task, completed=done, total=total, description=f"packing {raw_bytes / _MB:.0f} MB")

        yield show


def _lines(clock: Callable[[], float]) -> Progress:
    started_s = last_s = clock()

    def show(done: int, total: int, raw_bytes: int) -> None:
        nonlocal last_s
        now_s = clock()
        if now_s - last_s < _LINE_INTERVAL_S:
            return
        last_s = now_s
        rate = raw_bytes / _MB / (now_s - started_s)
        print(f"packed {done} of {total} samples, {rate:.1f} MB/s", file=sys.stderr, flush=True)

    return show
