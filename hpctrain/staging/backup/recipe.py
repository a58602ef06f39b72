"""What a file of a set is made of: its recipe.

A file is its stored chunks, in the order in which they lie in it, and the rest: all bytes between them. The names and
sizes of the chunks are kept in *pages* of `PAGE_CHUNKS`, which are objects themselves: of a list of a million chunks
only the pages with changed ones are written again. The rest holds HDF5's tables of addresses, and all addresses behind
a chunk whose size changed move: it is compressed, in pieces of `REST_BYTES`. Together they are some 30 bytes a chunk
where one in a hundred changed.

The rest begins with a table: the number of gaps, and for each the number of chunks before it and its bytes, all int64,
little endian; then come the bytes of the gaps.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError
from hpctrain.staging.backup.store import Store

PAGE_CHUNKS: Final = 32
REST_BYTES: Final = 64 << 10
PIECE: Final = np.dtype([("digest", "V32"), ("size", "<u8")])
Gaps = npt.NDArray[np.int64]
"""Shape (gaps, 2): number of chunks before each gap, and its bytes."""


@dataclass(frozen=True)
class Recipe:
    """A file of a generation: its name and size, the names of its pages and of the pieces of its rest."""

    name: str
    num_bytes: int
    num_chunks: int
    rest_bytes: int
    pages: tuple[bytes, ...]
    rest: tuple[bytes, ...]


@dataclass(frozen=True)
class FileLayout:
    """Where everything of a file lies.

    `offsets`, `sizes`: of the chunks; int64, shape (chunks,). `digests`: names of their objects. `gaps`: where each
    other piece begins, and its bytes.
    """

    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    digests: tuple[bytes, ...]
    gaps: tuple[tuple[int, bytes], ...]


def gaps_between(offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], num_bytes: int) -> Gaps:
    """The gaps of a file; raises `DataError` for chunks that overlap or reach past its end."""
    begins = np.concatenate([offsets, [num_bytes]]).astype(np.int64)
    ends = np.concatenate([[0], offsets + sizes]).astype(np.int64)
    lengths = begins - ends
    if np.any(lengths < 0):
        at = int(np.flatnonzero(lengths < 0)[0])
        raise DataError(
            f"two chunks lie one over the other near byte {begins[at]}, or past the end of the file"
        )
    before = np.flatnonzero(lengths)
    return np.stack([before, lengths[before]], axis=1).astype(np.int64)


def gap_offsets(gaps: Gaps, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where gaps begin, from the sizes of all chunks of the file; int64, shape (gaps,)."""
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    before = np.concatenate([[0], np.cumsum(gaps[:, 1])])[:-1]
    found: npt.NDArray[np.int64] = ends[gaps[:, 0]] + before
    return found


def rest_pieces(gaps: Gaps, content: bytes) -> Iterator[bytes]:
    """The rest as objects; `content` has the bytes of all gaps."""
    stream = np.array([len(gaps)], "<i8").tobytes() + gaps.astype("<i8").tobytes() + content
    for at in range(0, len(stream), REST_BYTES):
        yield zlib.compress(stream[at : at + REST_BYTES])


def rest_size(gaps: Gaps) -> int:
    """Bytes of the rest before it is compressed."""
    return 8 + gaps.nbytes + int(gaps[:, 1].sum())


def read_page(store: Store, recipe: Recipe, number: int) -> npt.NDArray[Any]:
    """A page: `PIECE`, shape (chunks,). Raises `MissingObjectError`; `DataError` for what is no such page."""
    content = store.read(recipe.pages[number])
    wanted = min(PAGE_CHUNKS, recipe.num_chunks - number * PAGE_CHUNKS)
    if len(content) != wanted * PIECE.itemsize:
        raise _misfit(recipe, f"page {number} has {len(content)} bytes")
    return np.frombuffer(content, PIECE)


def read_layout(store: Store, recipe: Recipe) -> FileLayout:
    """Where everything of a file lies.

    Raises `MissingObjectError` where a part of the recipe is missing or damaged, `DataError` where it does not fit
    together (nobody but a liar writes such a recipe).
    """
    pages = [read_page(store, recipe, number) for number in range(len(recipe.pages))]
    pieces = np.concatenate([np.zeros(0, PIECE), *pages])
    names = pieces["digest"].tobytes()
    sizes = pieces["size"].astype(np.int64)
    gaps, content = _read_rest(store, recipe)
    if (
        np.any(sizes < 0)
        or np.any(gaps < 0)
        or np.any(np.diff(gaps[:, 0]) <= 0)
        or np.any(gaps[:, 0] > len(sizes))
        or sum(map(int, sizes)) + sum(map(int, gaps[:, 1])) != recipe.num_bytes
        or rest_size(gaps) != recipe.rest_bytes
    ):
        raise _misfit(recipe, "its pieces do not make up the file")
    begins = gap_offsets(gaps, sizes)
    lengths = np.zeros(len(sizes) + 1, np.int64)
    lengths[gaps[:, 0]] = gaps[:, 1]
    ends = np.cumsum(gaps[:, 1])
    return FileLayout(
        offsets=np.cumsum(lengths)[:-1] + np.cumsum(sizes) - sizes,
        sizes=sizes,
        digests=tuple(names[at : at + 32] for at in range(0, len(names), 32)),
        gaps=tuple(
            (int(begin), content[end - size : end])
            for begin, end, size in zip(begins, ends.tolist(), gaps[:, 1].tolist(), strict=True)
        ),
    )


def _read_rest(store: Store, recipe: Recipe) -> tuple[Gaps, bytes]:
    stream = b"".join(_inflated(store.read(name), recipe) for name in recipe.rest)
    count = int.from_bytes(stream[:8], "little")
    begin = 8 + 16 * count
    if len(stream) != recipe.rest_bytes or begin > len(stream):
        raise _misfit(recipe, f"its rest has {len(stream)} bytes")
    return np.frombuffer(stream[8:begin], "<i8").astype(np.int64).reshape(count, 2), stream[begin:]


def _inflated(content: bytes, recipe: Recipe) -> bytes:
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(content, REST_BYTES)
    except zlib.error as error:
        raise _misfit(recipe, f"a piece of its rest: {error}") from error
    if not inflater.eof:
        raise _misfit(recipe, f"a piece of its rest has more than {REST_BYTES} bytes")
    return found


def _misfit(recipe: Recipe, what: str) -> DataError:
    return DataError(f"the recipe of {recipe.name!r} is not one that a backup writes: {what}")
