"""Normalising and converting types."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.preprocess import FieldSteps
from hpctrain.errors import ConfigError, DataError
from tests.data.preprocessing import pictures, preprocessor, result

STORED = FieldSteps(normalize="stored")


@settings(deadline=None)
@given(
    st.integers(0, 40),
    st.sampled_from([(), (7,), (5, 4), (5, 4, 3), (3, 5, 4), (32, 32, 3), (67, 61, 3)]),
    st.sampled_from(["u1", "i2", ">u2", "f2", "<f4", ">f4"]),
    st.booleans(),
)
def test_normalised_exactly_as_written_down(
    count: int, shape: tuple[int, ...], dtype: str, per_channel: bool
) -> None:
    """(x - mean) / std in float32, one operation after the other, for one number and for one per channel."""
    rows = pictures(count, shape, dtype)
    mean, std = [20.0], [3.0]
    if per_channel and 3 in shape:
        mean, std = [20.0, 99.5, 0.1], [3.0, 0.7, 11.0]
    wide = [1] * len(shape)
    if len(mean) == 3:
        wide[len(shape) - 1 if shape[-1] == 3 else 0] = 3
    wanted = (rows.astype(np.float32) - np.float32(mean).reshape(wide)) / np.float32(std).reshape(wide)
    found = result(rows, FieldSteps(mean=tuple(mean), std=tuple(std)))
    assert found.dtype == np.float32
    assert np.array_equal(found, wanted.astype(np.float32))


@pytest.mark.parametrize("dtype", ["i4", "i8", "f8"])
def test_wide_types_are_normalised_in_float64(dtype: str) -> None:
    """In float32 these values would be all alike."""
    rows = (1_000_000_000 + np.arange(9)).astype(dtype)
    found = result(rows, FieldSteps(mean=(1e9,), std=(2.0,)))
    assert found.dtype == np.float32
    assert found.tolist() == [i / 2 for i in range(9)]


def test_stored_statistics_of_a_picture() -> None:
    rows = pictures(10)
    found = result(rows, STORED, mean=(1.0, 2.0, 3.0), std=(2.0, 4.0, 8.0))
    wanted = (rows.astype(np.float32) - np.float32([1, 2, 3])) / np.float32([2, 4, 8])
    assert np.array_equal(found, wanted)
    assert np.array_equal(
        result(rows, FieldSteps(normalize="stored", dtype="float16"), mean=1.0, std=2.0),
        ((rows.astype(np.float32) - 1) / 2).astype(np.float16),
    )


def test_no_deviation_is_taken_as_one_and_said() -> None:
    made = preprocessor(pictures(2), STORED, mean=(1.0, 2.0, 3.0), std=(2.0, 0.0, 8.0))
    assert made.warnings == (
        "data.preprocess.image: the standard deviation of channel 1 is 0; it is taken as 1",
    )
    rows = np.full((2, 4), 7, np.uint8)
    assert np.array_equal(result(rows, STORED, mean=7.0, std=0.0), np.zeros((2, 4), np.float32))


def test_nan_and_infinity_stay() -> None:
    rows = np.array([[np.nan, np.inf, -np.inf, 1]], np.float32)
    assert str(result(rows, FieldSteps(mean=(0.0,), std=(1.0,))).tolist()) == "[[nan, inf, -inf, 1.0]]"
    assert str(result(rows, FieldSteps(dtype="float16")).tolist()) == "[[nan, inf, -inf, 1.0]]"


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("u1", "float32"), ("i8", "int32"), ("f8", "int64"), (">f4", "float16"), ("?", "uint8"), ("u1", "bool")],
)
def test_conversion_keeps_the_numbers(stored: str, dtype: str) -> None:
    rows = (pictures(20, (5,)) % 2).astype(stored)
    found = result(rows, FieldSteps(dtype=dtype))
    assert found.dtype == np.dtype(dtype)
    assert np.array_equal(found, rows)


@pytest.mark.parametrize(
    ("value", "stored", "dtype"),
    [
        (300, "i8", "uint8"),
        (-1, "i4", "uint8"),
        (2**40, "i8", "int32"),
        (0.5, "f4", "int64"),
        (np.nan, "f4", "int64"),
        (2.0**63, "f8", "int64"),
        (2, "u1", "bool"),
        (1e6, "f4", "float16"),
        (1e60, "f8", "float32"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(value: float, stored: str, dtype: str) -> None:
    rows = np.zeros((50, 3), stored)
    rows[41, 2] = value
    with pytest.raises(DataError, match=f"the/set: field 'image', sample 1041: .* does not fit into {dtype}"):
        result(rows, FieldSteps(dtype=dtype), np.arange(1000, 1050))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (FieldSteps(dtype="flaot32"), r"dtype = 'flaot32' is unknown; did you mean 'float32'"),
        (FieldSteps(dtype="complex64"), "dtype = 'complex64' is unknown; there are: bool, float16,"),
        (FieldSteps(normalize="store"), "did you mean 'stored'"),
        (FieldSteps(normalize="stored"), "no statistics of this field .*; give mean and std instead"),
        (FieldSteps(normalize="stored", mean=(0.0,), std=(1.0,)), "leave one out"),
        (FieldSteps(mean=(0.0,)), "mean and std belong together"),
        (FieldSteps(mean=(0.0,), std=(1.0, 2.0)), "1 numbers in mean, 2 in std"),
        (FieldSteps(mean=(0.0,), std=(-1.0,)), "below 0"),
        (FieldSteps(mean=(float("nan"),), std=(1.0,)), "not finite"),
        (FieldSteps(mean=(0.0, 1.0), std=(1.0, 1.0)), r"2 numbers in mean and std, .* shape \(6, 6, 3\)"),
        (FieldSteps(mean=(1e39,), std=(1.0,)), r"1e\+39 is beyond float32, .* or dtype = \"float64\""),
        (FieldSteps(mean=(0.0,), std=(1e39,)), r"1e\+39 is beyond float32"),
        (FieldSteps(mean=(0.0,), std=(1.0,), dtype="int64"), "cannot hold normalised values; use float32"),
    ],
)
def test_wrong_settings(steps: FieldSteps, message: str) -> None:
    with pytest.raises(ConfigError, match=f"data.preprocess.image.*{message}"):
        preprocessor(pictures(2), steps)
