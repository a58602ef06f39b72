"""Pictures and tar archives for the tests of sources."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hpctrain.errors import DataError
from hpctrain.h5.sources import Columns


def picture(seed: int = 0, shape: tuple[int, ...] = (6, 5, 3), kind: str = "PNG") -> bytes:
    """The bytes of a picture file."""
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).save(stream, kind)
    return stream.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes] | list[tuple[str, bytes]], mode: str = "w") -> Path:
    """An archive of these files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items() if isinstance(members, Mapping) else members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def read_each(
    source: Any, start: int = 0, stop: int | None = None
) -> tuple[Columns, list[int], dict[int, str]]:
    """Good columns, their numbers, and what was said of the bad ones."""
    bad: dict[int, DataError] = {}
    columns, good = source.read_each(start, source.num_samples if stop is None else stop, bad.__setitem__)
    return columns, good.tolist(), {sample: str(error) for sample, error in bad.items()}
