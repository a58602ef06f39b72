"""Rounding of mantissas, against exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.pack import PackOptions, pack_arrays, pack_path
from hpctrain.h5.packed import open_packed
from hpctrain.h5.reader import FileSource, read_sample_chunk
from hpctrain.h5.rounding import mantissa_bits, round_mantissa

TYPES = (np.float16, np.float32, np.float64)
WORDS: dict[Any, Any] = {np.float16: np.uint16, np.float32: np.uint32, np.float64: np.uint64}


def exactly_rounded(value: Any, bits: int) -> Fraction:
    """Half to even on the grid of `bits` mantissa bits in the value's own binade."""
    info = np.finfo(type(value))
    exponent = max(math.frexp(float(value))[1] - 1, int(info.minexp))
    step = Fraction(2) ** (exponent - bits)
    return round(Fraction(float(value)) / step) * step


@pytest.mark.parametrize("kind", TYPES)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_finite_values_round_half_to_even(kind: Any, data: st.DataObject) -> None:
    width = np.dtype(kind).itemsize * 8
    value = np.array(data.draw(st.integers(0, 2**width - 1)), WORDS[kind]).view(kind)[()]
    bits = data.draw(st.integers(1, mantissa_bits(np.dtype(kind))))
    (rounded,) = round_mantissa(np.array([value]), bits)
    if not np.isfinite(value):
        assert rounded.tobytes() == value.tobytes()  # the payload of a NaN, too
    elif np.isinf(rounded):
        assert abs(exactly_rounded(value, bits)) > Fraction(float(np.finfo(kind).max))
    else:
        assert Fraction(float(rounded)) == exactly_rounded(value, bits)
        assert np.signbit(rounded) == np.signbit(value)


@pytest.mark.parametrize("kind", TYPES)
def test_halves_go_to_the_even_neighbour(kind: Any) -> None:
    values = np.array([1.25, 1.75, 1.26, -1.25, 0.0, -0.0], kind)
    assert round_mantissa(values, 1).tolist() == [1.0, 2.0, 1.5, -1.0, 0.0, -0.0]


def test_all_bits_change_nothing() -> None:
    values = np.random.default_rng(0).normal(size=50).astype("<f4")
    assert round_mantissa(values, 23) is values


def test_special_values_keep_their_bits() -> None:
    words = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7FC00000], "<u4")
    for bits in (1, 10, 22):
        assert round_mantissa(words.view("<f4"), bits).view("<u4").tolist() == words.tolist()


def test_packing_rounds_and_says_so(tmp_path: Path) -> None:
    wave = np.random.default_rng(0).normal(size=(300, 40)).astype(">f4")
    plain = pack_arrays({"wave": wave, "label": np.arange(300)}, tmp_path / "plain")
    report = pack_arrays(
        {"wave": wave, "label": np.arange(300)}, tmp_path / "set", PackOptions(keep_bits=7, chunk_samples=300)
    )
    packed = open_packed(tmp_path / "set")
    with FileSource() as source:
        columns = read_sample_chunk(packed, source, 0)
    assert np.array_equal(columns["wave"], round_mantissa(wave.astype("<f4"), 7))
    assert np.abs(columns["wave"] / wave - 1).max() <= 2**-8
    assert columns["label"].tolist() == list(range(300))
    assert {name: field.keep_bits for name, field in packed.fields.items()} == {"wave": 7, "label": None}
    assert report.keep_bits == {"wave": 7}
    assert plain.keep_bits == {}
    assert report.stored_bytes < 0.75 * plain.stored_bytes
    assert packed.fields["wave"].mean == pytest.approx(columns["wave"].astype(float).mean(), rel=1e-12)


def test_bits_once_dropped_do_not_come_back(tmp_path: Path) -> None:
    pack_arrays({"wave": np.random.default_rng(0).normal(size=100)}, tmp_path / "a", PackOptions(keep_bits=5))
    for bits, kept in ((12, 5), (3, 3)):
        report = pack_path(tmp_path / "a", tmp_path / f"{bits}", PackOptions(keep_bits=bits))
        assert report.keep_bits == {"wave": kept}
        assert open_packed(tmp_path / f"{bits}").fields["wave"].keep_bits == kept


def test_store_comes_before_rounding(tmp_path: Path) -> None:
    wave = np.random.default_rng(0).normal(size=100)
    pack_arrays({"wave": wave}, tmp_path / "set", PackOptions(keep_bits=3, store="float16"))
    packed = open_packed(tmp_path / "set")
    with FileSource() as source:
        stored = read_sample_chunk(packed, source, 0)["wave"]
    assert stored.tolist() == round_mantissa(wave.astype(np.float16), 3).tolist()


def test_what_rounds_to_infinity_is_refused(tmp_path: Path) -> None:
    wave = np.zeros((20, 2), np.float32)
    wave[13, 1] = np.finfo(np.float32).max
    with pytest.raises(
        DataError, match=r"'wave', sample 13: 3.4\d+e\+38 is beyond float32 .*; keep more bits"
    ):
        pack_arrays({"wave": wave}, tmp_path / "set", PackOptions(keep_bits=4, chunk_samples=5))


@pytest.mark.parametrize("bits", [0, -1, 53])
def test_bits_out_of_bounds(bits: int) -> None:
    with pytest.raises(UsageError, match=rf"keep-bits is {bits}, but must be at least 1 and at most"):
        PackOptions(keep_bits=bits)


def test_more_bits_than_the_type_has(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="keep-bits is 11, but field 'x' is float16, whose mantissa has 10 bits"
    ):
        pack_arrays({"x": np.zeros(3, np.float16)}, tmp_path / "set", PackOptions(keep_bits=11))


def test_without_floats_rounding_changes_nothing(tmp_path: Path) -> None:
    report = pack_arrays({"x": np.arange(3)}, tmp_path / "set", PackOptions(keep_bits=11))
    assert report.warnings == ("--keep-bits 11 changed nothing: no field holds floats",)
