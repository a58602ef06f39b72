"""Scale-offset: the bits of libhdf5, for integers and decimal floats."""

from __future__ import annotations

import io
import struct
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError
from hpctrain.h5.filters import DEFLATE, SCALE_OFFSET, Filter, FilterPipeline, why_not
from tests.h5.filter_files import StoredChunk, bits, one_chunk, stored_chunks

INTEGERS = [f"{order}{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8) for order in "<>"]


@given(data=st.data(), dtype=st.sampled_from(INTEGERS), count=st.integers(1, 40), fill=st.booleans())
@settings(max_examples=80, deadline=None)
def test_integers(data: st.DataObject, dtype: str, count: int, fill: bool) -> None:
    """Ranges from one value to all that the type has; with a fill value among them."""
    info = np.iinfo(dtype)
    low = data.draw(st.integers(int(info.min), int(info.max)))
    high = data.draw(st.integers(low, int(info.max)) | st.integers(low, min(low + 300, int(info.max))))
    values = np.array(data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count)), dtype)
    options: dict[str, Any] = {"fillvalue": values[0]} if fill else {}
    chunk = one_chunk(values, scaleoffset=0, **options)
    assert bits(chunk.decode()) == bits(chunk.values)


@pytest.mark.parametrize("dtype", ["<i4", ">u2", "u1", "<i8"])
@pytest.mark.parametrize("num_bits", [1, 3, 7, 8, 9, 16])
def test_codes_of_a_width_that_is_given(dtype: str, num_bits: int) -> None:
    """What does not fit is lost when it is written; what is stored is read alike."""
    values = np.arange(1000).astype(dtype)
    chunk = one_chunk(values, scaleoffset=min(num_bits, 8 * values.itemsize))
    assert bits(chunk.decode()) == bits(chunk.values)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", ">f8"])
@pytest.mark.parametrize("factor", [0, 1, 3, 6, 10])
@pytest.mark.parametrize("fill", [None, 0.0, 12.5])
def test_floats_have_the_bits_of_libhdf5(dtype: str, factor: int, fill: float | None) -> None:
    for scale in (1e-3, 1.0, 1e4):
        values = (np.random.default_rng(factor).normal(size=2001) * scale).astype(dtype)
        values[::7] = 12.5
        options: dict[str, Any] = {} if fill is None else {"fillvalue": fill}
        chunk = one_chunk(values, scaleoffset=factor, **options)
        assert bits(chunk.decode()) == bits(chunk.values), scale


def without_a_fill_value(values: np.ndarray) -> StoredChunk:
    """h5py always defines one; it must be left undefined by hand."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk(values.shape)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plist.set_scaleoffset(h5py.h5z.SO_INT, 0)
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        kind = h5py.h5t.py_create(values.dtype)
        h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple(values.shape), plist)
        file["x"][...] = values
    with h5py.File(buffer, "r") as file:
        (chunk,) = stored_chunks(file["x"])
    return chunk


def test_one_value_takes_no_bits() -> None:
    for values in (np.full(100, -7, "<i4"), np.full(100, 7, ">u2"), np.arange(100, dtype="<i8")):
        chunk = without_a_fill_value(values)
        assert bits(chunk.decode()) == bits(chunk.values) == bits(values)


def test_before_deflate() -> None:
    """What is inflated is smaller than the chunk, or a little larger."""
    for high in (10, 2**31 - 1):
        values = np.random.default_rng(0).integers(-high, high, 1000).astype("<i4")
        chunk = one_chunk(values, scaleoffset=0, compression="gzip")
        assert [item.id for item in chunk.filters] == [SCALE_OFFSET, DEFLATE]
        assert bits(chunk.decode()) == bits(values)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((2, 0, 10), "3 of its 8 numbers"),
        ((0, 11, 10, 1, 4, 0, 0, 0), "by 10.11 is left to libhdf5"),
        ((0, (1 << 32) - 2, 10, 1, 8, 0, 0, 0), "by 10.-2 is left to libhdf5"),
        ((1, 0, 10, 1, 4, 0, 0, 0), "type 1 for values of 4 bytes"),
        ((2, 0, 10, 0, 3, 0, 0, 0), "values of 3 bytes"),
        ((2, 0, 10, 0, 8, 0, 0, 1, 5), "without its fill value"),
    ],
)
def test_client_data_that_are_left_to_libhdf5(numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        FilterPipeline((Filter(SCALE_OFFSET, numbers),))
    assert why_not((Filter(SCALE_OFFSET, numbers),))


@pytest.mark.parametrize(
    ("head", "count"),
    [
        (b"", 10),
        (struct.pack("<IB", 33, 8), 10),
        (struct.pack("<IB", 8, 9), 10),
        (struct.pack("<IB", 31, 8), 10),
        (b"", 11),
    ],
)
def test_damaged_chunks(head: bytes, count: int) -> None:
    stored = head.ljust(21, b"\0") + bytes(10)
    pipeline = FilterPipeline((Filter(SCALE_OFFSET, (2, 0, count, 0, 4, 1, 0, 0)),))
    with pytest.raises(DataError):
        pipeline.decode(
            stored[: len(head) + 3] if not head and count == 10 else stored, 0, np.empty(10, "<i4")
        )
