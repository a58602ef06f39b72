"""`hpctrain pack`: data files to a packed set."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hpctrain.cli import pack_options as opt
from hpctrain.cli.progress import amount, display

if TYPE_CHECKING:
    from typing import Literal

    from hpctrain.h5.choose_codec import Choice
    from hpctrain.h5.pack import PackReport, Watch
    from hpctrain.h5.team import Team

_MB = 1e6


def pack(
    src: opt.Src,
    dst: opt.Dst,
    codec: opt.Codec = "blosc-lz4",
    storage_gb_per_s: opt.StorageGbPerS = 0.2,
    chunk_samples: opt.ChunkSamples = None,
    shard_mib: opt.ShardMib = 256.0,
    size: opt.Size = None,
    gray: opt.Gray = False,
    keep_encoded: opt.KeepEncoded = False,
    field: opt.FieldPaths = None,
    store: opt.Store = None,
    keep_bits: opt.KeepBits = None,
    map_name: opt.Map = None,
    clean: opt.Clean = None,
    num_classes: opt.NumClasses = None,
    max_pixels: opt.MaxPixels = 89_478_485,
    max_entries: opt.MaxEntries = 2_000_000,
    max_archive_gib: opt.MaxArchiveGib = 1024.0,
    threads: opt.Threads = 0,
    overwrite: opt.Overwrite = False,
) -> None:
    """Pack data files into chunked, compressed HDF5 shards.

    SRC is one of

    - a folder with one sub-folder of images per class

    - a table (.csv, .tsv), or a folder with one: its column `file` names
    images; `text`, `label` and other columns lie beside it

    - .npy (one, or a folder of them) or .npz arrays

    - HDF5 (.h5, .hdf5, .nc), a Zarr store or Parquet

    - tar archives of WebDataset samples, or of class folders
    (x.tar/train: one folder in it)

    - a packed set, to pack it otherwise

    A folder of several HDF5, Parquet or tar files is packed as one set.
    Of arrays and datasets, NAME and NAME_offsets (1-D) make rows of any
    length, such as token ids.

    Started by mpirun or `srun --mpi=pmix`, the processes share the work and
    write the same files as one.

    Example: hpctrain pack photos/ packed/ --size 64 --codec blosc-zstd

    Example: hpctrain pack run.h5 packed/ --field u=/fields/velocity --codec auto

    Example: mpirun -n 4 hpctrain pack scans/ packed/ --clean undecodable=drop
    """
    from hpctrain.h5.mapped import load_function
    from hpctrain.h5.options import parse_clean
    from hpctrain.h5.pack import PackOptions, SourceOptions, pack_path

    with _team() as team:
        options = PackOptions(
            codec=codec,
            chunk_samples=chunk_samples,
            shard_mib=shard_mib,
            threads=threads,
            store=cast("Literal['float16', 'float32'] | None", store),
            overwrite=overwrite,
            keep_bits=keep_bits,
            storage_gb_per_s=storage_gb_per_s,
            clean=parse_clean(clean or ()),
            num_classes=num_classes,
        )
        how = SourceOptions(
            size, gray, keep_encoded, tuple(field or ()), max_pixels, max_entries, max_archive_gib
        )
        function = None if map_name is None else (map_name, load_function(map_name, Path.cwd()))
        with _watch(team) as watch:
            report = pack_path(src, dst, options, how, watch, team, function)
    if team.rank == 0:
        _show(report)


def _show(report: PackReport) -> None:
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if report.cleaning is not None:
        print("\n".join(report.cleaning.lines()))
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


@contextlib.contextmanager
def _team() -> Iterator[Team]:
    """The processes of this launch."""
    from hpctrain.h5.team import Alone, launched_processes

    num_processes = launched_processes(os.environ)
    if num_processes == 1:
        yield Alone()
        return
    # By name: the import contract holds MPI off this package, and it is loaded here only where a launcher started it.
    packing = importlib.import_module("hpctrain.comm.packing")
    with packing.packing_team(num_processes) as team:
        yield team


@contextlib.contextmanager
def _watch(team: Team) -> Iterator[Watch]:
    """Shows how far the pack is, on process 0."""
    from hpctrain.h5.pack import Watch

    if team.rank:
        yield Watch()
        return
    with display() as show:

        def packing(done: int, total: int, raw_bytes: int) -> None:
            def words(elapsed_s: float) -> str:
                return f"{done} of {total} samples, {raw_bytes / _MB / max(elapsed_s, 1e-9):.1f} MB/s"

            show("packing", done, total, words)

        def trying(choice: Choice) -> None:
            done = len(choice.trials)
            show("trying codecs", done, choice.planned, lambda _: f"{choice.trials[-1].codec}")
            if done == choice.planned:
                print(choice_table(choice), file=sys.stderr, flush=True)

        def checking(done: int, total: int) -> None:
            show("checking", done, total, lambda elapsed_s: amount(done, total, "samples", elapsed_s))

        def opening(activity: str, done: int, total: int, found: str) -> None:
            show(activity, done, total, lambda _: found)

        yield Watch(packing, trying, checking, opening)
