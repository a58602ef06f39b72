"""The options of `hpctrain pack`, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Src = Annotated[Path, typer.Argument(metavar="SRC", help="What to pack: see above.")]
Dst = Annotated[Path, typer.Argument(metavar="DST", help="Folder to make; it appears whole or not at all.")]
Codec = Annotated[
    str,
    typer.Option(
        help="none, gzip, blosc-lz4, blosc-lz4-bit, blosc-lz4hc, blosc-zstd, blosc-zlib, blosc-blosclz, lz4, zstd; "
        "or auto: try all on a sample, with several chunk sizes, and take the best."
    ),
]
StorageGbPerS = Annotated[
    float, typer.Option(help="For --codec auto: what the shared filesystem gives one core.")
]
ChunkSamples = Annotated[
    int | None,
    typer.Option(
        help="Samples per chunk. Default: the largest field fills 1 MiB, or a 64th of a small set (but 64 KiB).",
        show_default=False,
    ),
]
ShardMib = Annotated[float, typer.Option(help="About how many raw MiB a shard holds.")]
Size = Annotated[
    int | None, typer.Option(help="Scale pictures to N x N pixels.", metavar="N", show_default=False)
]
Gray = Annotated[bool, typer.Option("--gray", help="One channel: pictures are (H, W).")]
KeepEncoded = Annotated[
    bool,
    typer.Option(
        "--keep-encoded",
        help="Store JPEG and PNG files as they are, to be decoded while training; with --size N, all must have "
        "N x N pixels.",
    ),
]
FieldPaths = Annotated[
    list[str] | None,
    typer.Option(
        help="Of HDF5 files and Zarr stores: a dataset to pack, as NAME=/path/in/file or /path; again for more. "
        "Default: all whose first extent is that of most bytes.",
        metavar="NAME=PATH",
        show_default=False,
    ),
]
Store = Annotated[
    str | None,
    typer.Option(help="float16 or float32: type of float fields. Default: as they come.", show_default=False),
]
KeepBits = Annotated[
    int | None,
    typer.Option(
        help="Round float fields to N bits of mantissa, after --store: relative error at most 2^-(N + 1). "
        "Default: all bits.",
        metavar="N",
        show_default=False,
    ),
]
Map = Annotated[
    str | None,
    typer.Option(
        "--map",
        help="Pass each sample through a function of your own, found in the current folder first: it takes a dict of "
        "arrays and gives a dict of fields, or None to drop the sample. Called twice per sample.",
        metavar="MODULE:FUNCTION",
        show_default=False,
    ),
]
Clean = Annotated[
    list[str] | None,
    typer.Option(
        help="Look for bad samples of one kind, in a pass of its own before packing; again for more. KIND: "
        "undecodable, nonfinite, duplicates (all fields equal), empty_text, labels (negative, or beyond the classes). "
        "ACTION: drop, keep (only report), fatal. DST/cleaning.json lists what was dropped. Default: "
        "undecodable=fatal, no other is looked for.",
        metavar="KIND=ACTION",
        show_default=False,
    ),
]
NumClasses = Annotated[
    int | None,
    typer.Option(
        help="For --clean labels=...: labels must be 0 to N - 1. Default: the classes of the source, where it names "
        "them.",
        metavar="N",
        show_default=False,
    ),
]
MaxPixels = Annotated[int, typer.Option(help="Refuse pictures of more pixels.", metavar="N")]
MaxEntries = Annotated[int, typer.Option(help="Refuse archives of more entries.", metavar="N")]
MaxArchiveGib = Annotated[float, typer.Option(help="Refuse archives that unpack to more GiB.", metavar="GIB")]
Threads = Annotated[int, typer.Option(help="Encoding threads of each process; 0: all its cores.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a packed set at DST.")]
