"""Rows of differing length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.h5.ragged import Ragged

ROWS = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6), max_size=8)


def rows_of(ragged: Ragged) -> list[list[int]]:
    return [ragged.row(i).tolist() for i in range(len(ragged))]


@given(ROWS)
def test_rows_survive(rows: list[list[int]]) -> None:
    ragged = Ragged.from_rows(map(np.array, rows), np.int32)
    assert rows_of(ragged) == rows
    assert ragged.values.dtype == np.int32
    assert ragged.offsets.dtype == np.int64
    assert len(ragged.values) == ragged.offsets[-1]


@given(ROWS, st.data())
def test_take_gives_the_rows_in_the_order_asked_for(rows: list[list[int]], data: st.DataObject) -> None:
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)) if rows else []
    taken = Ragged.from_rows(map(np.array, rows), np.int32).take(np.array(picks, np.int64))
    assert rows_of(taken) == [rows[pick] for pick in picks]
    assert taken.offsets[0] == 0


@given(ROWS, st.integers(0, 8), st.integers(0, 8))
def test_take_of_a_slice_and_of_a_part(rows: list[list[int]], start: int, stop: int) -> None:
    ragged = Ragged.from_rows(map(np.array, rows), np.int32)
    part = ragged.take(slice(start, stop))
    assert rows_of(part) == rows[start:stop]
    assert rows_of(part.take(slice(1, None))) == rows[start:stop][1:]


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=5), max_size=5))
def test_text_survives(rows: list[str]) -> None:
    ragged = Ragged.from_text(rows)
    assert [ragged.text(i) for i in range(len(ragged))] == rows


def test_rows_outside_are_refused() -> None:
    ragged = Ragged.from_text(["a", "b"])
    for row in (-1, 2):
        with pytest.raises(IndexError, match=f"row {row} of 2"):
            ragged.row(row)
    with pytest.raises(IndexError):
        ragged.take(np.array([2]))
