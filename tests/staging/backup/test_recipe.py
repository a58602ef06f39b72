"""Recipes: any arrangement of chunks gives the file back, and a recipe that lies gives none."""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError
from hpctrain.staging.backup import recipe as recipes
from hpctrain.staging.backup.recipe import (
    PAGE_CHUNKS,
    PIECE,
    Recipe,
    gap_offsets,
    gaps_between,
    read_layout,
    rest_pieces,
    rest_size,
)
from hpctrain.staging.backup.segments import name_of


class Objects(dict[bytes, bytes]):
    """A store in memory."""

    def put(self, content: bytes) -> bytes:
        self[name_of(content)] = content
        return name_of(content)

    def read(self, name: bytes) -> bytes:
        return self[name]


def cook(objects: Objects, whole: bytes, cuts: list[tuple[int, int]]) -> Recipe:
    """The recipe of a file with chunks at these offsets, of these sizes."""
    offsets, sizes = (np.array([cut[i] for cut in cuts], np.int64) for i in (0, 1))
    gaps = gaps_between(offsets, sizes, len(whole))
    begins = gap_offsets(gaps, sizes)
    rest = b"".join(whole[begin : begin + size] for begin, size in zip(begins, gaps[:, 1], strict=True))
    pieces = [(objects.put(whole[at : at + size]), size) for at, size in cuts]
    pages = [pieces[at : at + PAGE_CHUNKS] for at in range(0, len(pieces), PAGE_CHUNKS)]
    return Recipe(
        name="file",
        num_bytes=len(whole),
        num_chunks=len(cuts),
        rest_bytes=rest_size(gaps),
        pages=tuple(objects.put(np.array(page, PIECE).tobytes()) for page in pages),
        rest=tuple(objects.put(piece) for piece in rest_pieces(gaps, rest)),
    )


def eat(objects: Objects, recipe: Recipe) -> bytes:
    layout = read_layout(objects, recipe)  # type: ignore[arg-type]
    whole = bytearray(b"?" * recipe.num_bytes)
    for offset, content in layout.gaps:
        whole[offset : offset + len(content)] = content
    for offset, size, name in zip(layout.offsets, layout.sizes, layout.digests, strict=True):
        whole[offset : offset + size] = objects[name]
    return bytes(whole)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=100), tail=st.integers(0, 5))
def test_any_arrangement_gives_the_file_back(parts: list[tuple[int, int]], tail: int) -> None:
    at, cuts = 0, []
    for gap, size in parts:
        cuts.append((at + gap, size))
        at += gap + size
    whole = np.random.default_rng(at).bytes(at + tail)
    objects = Objects()
    assert eat(objects, cook(objects, whole, cuts)) == whole


def test_a_long_rest_is_cut_so_that_a_change_writes_little() -> None:
    objects = Objects()
    whole = np.random.default_rng(0).bytes(500_000)
    first = cook(objects, whole, [])
    before = set(objects)
    changed = bytearray(whole)
    changed[250_000] ^= 1
    assert eat(objects, cook(objects, bytes(changed), [])) == changed
    assert len(first.rest) == 8
    assert len(set(objects) - before) == 1


def test_chunks_that_overlap_are_refused() -> None:
    with pytest.raises(DataError, match="one over the other near byte 5"):
        gaps_between(np.array([0, 5]), np.array([6, 2]), 10)
    with pytest.raises(DataError, match="past the end"):
        gaps_between(np.array([0, 5]), np.array([5, 6]), 10)


def lies(objects: Objects, good: Recipe) -> list[Recipe]:
    change = dataclasses.replace
    stream = b"".join(zlib.decompress(objects[name]) for name in good.rest)

    def with_rest(content: bytes) -> Recipe:
        return change(good, rest=(objects.put(content),))

    def with_pieces(*pieces: tuple[bytes, int]) -> Recipe:
        return change(good, pages=(objects.put(np.array(list(pieces), PIECE).tobytes()),))

    name = name_of(b"x")
    return [
        change(good, num_bytes=good.num_bytes + 1),
        change(good, rest_bytes=good.rest_bytes + 1),
        change(good, num_chunks=3),
        with_rest(b"no zlib"),
        with_rest(zlib.compress(stream)[:-3]),
        with_rest(zlib.compress(b"\0" * 10**6)),  # a bomb
        with_rest(zlib.compress(b"\xff" * 8 + stream[8:])),  # so many gaps
        with_rest(zlib.compress(stream[:8] + b"\xff" * 8 + stream[16:])),  # a gap before chunk -1
        with_rest(zlib.compress(stream[:16] + b"\xff" * 8 + stream[24:])),  # of -1 bytes
        with_pieces((name, 2**64 - 1), (name, 5)),
        with_pieces((name, 2**63 - 1), (name, 2**63 - 1)),
        with_pieces((name, 1)),
    ]


def test_a_recipe_that_lies_is_refused() -> None:
    objects = Objects()
    good = cook(objects, b"0123456789abcdef", [(3, 4), (9, 4)])
    assert eat(objects, good) == b"0123456789abcdef"
    for number, lie in enumerate(lies(objects, good)):
        with pytest.raises(DataError, match="not one that a backup writes"):
            print(number, read_layout(objects, lie))  # type: ignore[arg-type]


def test_pages_have_a_bounded_size() -> None:
    assert recipes.PAGE_CHUNKS * PIECE.itemsize == 1280
