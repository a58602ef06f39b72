"""Mending a file in place: pieces that are not what they should be are written anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpctrain.errors import StorageError
from hpctrain.resilience.faults import fault_point
from hpctrain.staging.backup.table import MissingObjectError
from hpctrain.staging.backup.work import Counter, in_threads, open_file, read_at, write_at


@dataclass(frozen=True)
class Piece:
    """A place in a file, and where the right bytes come from; `fetch` raises `MissingObjectError`."""

    offset: int
    num_bytes: int
    is_right: Callable[[bytes], bool]
    fetch: Callable[[], bytes]


def mend_file(path: Path, pieces: list[Piece], counter: Counter) -> tuple[list[str], list[str]]:
    """Put right what is wrong in a file; gives in words what was mended and what is lost.

    Raises `OSError`; `StorageError` where what was written is not what is read back.
    """
    with open_file(path, os.O_RDWR) as descriptor:
        found = in_threads(partial(_mend, descriptor, counter), pieces)
        wrong = [(piece, why) for piece, why in zip(pieces, found, strict=True) if why is not None]
        if any(why == "" for _, why in wrong):
            os.fsync(descriptor)
            # What is on the disk is to be read again, not what is in the page cache.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    with open_file(path) as descriptor:
        for piece, why in wrong:
            if why == "" and not piece.is_right(read_at(descriptor, piece.num_bytes, piece.offset)):
                raise StorageError(
                    f"{path}: byte {piece.offset}: written, but read back otherwise; check the disk"
                )
    words = [(f"{path.name}: {piece.num_bytes} bytes at byte {piece.offset}", why) for piece, why in wrong]
    return [place for place, why in words if not why], [f"{place}: {why}" for place, why in words if why]


def _mend(descriptor: int, counter: Counter, piece: Piece) -> str | None:
    """None for a piece that is right, "" for one that was mended, else why it could not be."""
    counter.add(piece.num_bytes)
    if piece.is_right(read_at(descriptor, piece.num_bytes, piece.offset)):
        return None
    try:
        content = piece.fetch()
    except MissingObjectError as error:
        return str(error)
    fault_point("restore.write")
    write_at(descriptor, content, piece.offset)
    return ""
