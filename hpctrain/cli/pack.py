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

    from hpctrain.h5.choose_codec import Choice, Trying
    from hpctrain.h5.pack import PackReport, Progress

_LINE_INTERVAL_S = 5.0
_MB = 1e6


def pack(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="What to pack: see above.")],
    dst: Annotated[
        Path, typer.Argument(metavar="DST", help="Folder to make; it appears whole or not at all.")
    ],
    codec: Annotated[
        str,
        typer.Option(
            help="none, gzip, blosc-lz4, blosc-lz4-bit, blosc-lz4hc, blosc-zstd, blosc-zlib, blosc-blosclz, lz4, zstd; "
            "or auto: try all on a sample, with several chunk sizes, and take the best."
        ),
    ] = "blosc-lz4",
    storage_gb_per_s: Annotated[
        float, typer.Option(help="For --codec auto: what the shared filesystem gives one core.")
    ] = 0.2,
    chunk_samples: Annotated[
        int | None,
        typer.Option(
            help="Samples per chunk. Default: the largest field fills 1 MiB, or a 64th of a small set (but 64 KiB).",
            show_default=False,
        ),
    ] = None,
    shard_mib: Annotated[float, typer.Option(help="About how many raw MiB a shard holds.")] = 256.0,
    size: Annotated[
        int | None,
        typer.Option(help="Scale pictures to N x N pixels.", metavar="N", show_default=False),
    ] = None,
    gray: Annotated[bool, typer.Option("--gray", help="One channel: pictures are (H, W).")] = False,
    keep_encoded: Annotated[
        bool,
        typer.Option(
            "--keep-encoded",
            help="Store JPEG and PNG files as they are, to be decoded while training; with --size N, all must have "
            "N x N pixels.",
        ),
    ] = False,
    field: Annotated[
        list[str] | None,
        typer.Option(
            help="Of HDF5 files: a dataset to pack, as NAME=/path/in/file or /path; again for more. Default: all whose "
            "first extent is that of most bytes.",
            metavar="NAME=PATH",
            show_default=False,
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="float16 or float32: type of float fields. Default: as they come.", show_default=False
        ),
    ] = None,
    keep_bits: Annotated[
        int | None,
        typer.Option(
            help="Round float fields to N bits of mantissa, after --store: relative error at most 2^-(N + 1). "
            "Default: all bits.",
            metavar="N",
            show_default=False,
        ),
    ] = None,
    on_nan: Annotated[
        str, typer.Option(help="keep or refuse: values of float fields that are not finite.")
    ] = "keep",
    threads: Annotated[int, typer.Option(help="Encoding threads; 0: all cores.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a packed set at DST.")] = False,
) -> None:
    """Pack data files into chunked, compressed HDF5 shards.

    SRC is a folder with one sub-folder of images per class; or a table (.csv, .tsv, or a folder with one)
    whose column `file` names images, beside `text`, `label` and other columns; or a .npy file, a folder of
    .npy files, or a .npz file; or an HDF5 file (.h5, .hdf5, .nc), or a folder of them with equal datasets,
    which are joined; or a packed set, to pack it otherwise. Of arrays and datasets, NAME and NAME_offsets
    (1-D) make rows of any length, such as token ids.

    Example: hpctrain pack photos/ packed/ --size 64 --codec blosc-zstd

    Example: hpctrain pack run.h5 packed/ --field u=/fields/velocity --keep-bits 10 --codec auto
    """
    from hpctrain.h5.pack import PackOptions, SourceOptions, pack_path

    options = PackOptions(
        codec=codec,
        chunk_samples=chunk_samples,
        shard_mib=shard_mib,
        threads=threads,
        store=cast("Literal['float16', 'float32'] | None", store),
        overwrite=overwrite,
        keep_bits=keep_bits,
        on_nan=cast("Literal['keep', 'refuse']", on_nan),
        storage_gb_per_s=storage_gb_per_s,
    )
    how = SourceOptions(size, gray, keep_encoded, tuple(field or ()))
    with _progress() as (progress, trying):
        report = pack_path(src, dst, options, how, progress, trying)
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(summary(report))


def summary(report: PackReport) -> str:
    """One line about a finished pack."""
    ratio = report.raw_bytes / max(report.stored_bytes, 1)
    rounded = "".join(f"; {name} rounded to {bits} bits" for name, bits in report.keep_bits.items())
    return (
        f"{report.root}: {report.num_samples} samples in {report.num_shards} shards, "
        f"{report.chunk_samples} per chunk, {report.codec}{rounded}; {report.raw_bytes / _MB:.1f} MB raw, "
        f"{report.stored_bytes / _MB:.1f} MB stored (ratio {ratio:.2f}), "
        f"{report.raw_bytes / _MB / max(report.seconds, 1e-9):.1f} MB/s; identity {report.identity}"
    )


def choice_table(choice: Choice) -> str:
    """All trials as a Markdown table, best first, with the rule below."""
    lines = [
        "| codec | samples per chunk | ratio | encode GB/s | decode GB/s | effective GB/s | |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for trial in sorted(choice.trials, key=lambda item: -item.effective_gb_per_s):
        taken = "taken" if trial == choice.best else ""
        lines.append(
            f"| {trial.codec} | {trial.chunk_samples} | {trial.ratio:.2f} | {trial.encode_gb_per_s:.2f} | "
            f"{trial.decode_gb_per_s:.2f} | {trial.effective_gb_per_s:.3f} | {taken} |"
        )
    return "\n".join([*lines, "", f"rule: {choice.rule}; storage {choice.storage_gb_per_s:g} GB/s per core"])


def _show_choice(choice: Choice) -> None:
    if len(choice.trials) == choice.planned:
        print(choice_table(choice), file=sys.stderr, flush=True)


@contextmanager
def _progress() -> Iterator[tuple[Progress, Trying]]:
    """A bar on a terminal, else a line every few seconds; both on standard error."""
    if not sys.stderr.isatty():
        yield _lines(time.monotonic), _show_choice
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True, redirect_stderr=True) as bar:
        task = bar.add_task("packing", total=None)

        def show(done: int, total: int, raw_bytes: int) -> None:
            bar.update(task, completed=done, total=total, description=f"packing {raw_bytes / _MB:.0f} MB")

        def trying(choice: Choice) -> None:
            bar.update(
                task,
                completed=len(choice.trials),
                total=choice.planned,
                description=f"tried {choice.trials[-1].codec}",
            )
            _show_choice(choice)

        yield show, trying


def _lines(clock: Callable[[], float]) -> Progress:
    started_s: float | None = None  # from the first call on: a choice of codec may come before
    last_s = 0.0

    def show(done: int, total: int, raw_bytes: int) -> None:
        nonlocal started_s, last_s
        now_s = clock()
        if started_s is None:
            started_s = last_s = now_s
        if now_s - last_s < _LINE_INTERVAL_S:
            return
        last_s = now_s
        rate = raw_bytes / _MB / (now_s - started_s)
        print(f"packed {done} of {total} samples, {rate:.1f} MB/s", file=sys.stderr, flush=True)

    return show
