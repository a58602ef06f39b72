"""Fletcher32: the sum is checked, in both byte orders that were ever written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError
from hpctrain.h5.filters import DEFLATE, FLETCHER32, Filter, FilterPipeline
from tests.h5.filter_files import bits, noise, one_chunk

PIPELINE = FilterPipeline((Filter(FLETCHER32),))


def sum_of(data: bytes) -> bytes:
    """The sum as the format has it, written down once more, slowly."""
    words = [int.from_bytes(data[i : i + 2].ljust(2, b"\0"), "big") for i in range(0, len(data), 2)]
    low = high = 0
    for word in words:
        low = (low + word) % 65535 or (65535 if low + word else 0)
        high = (high + low) % 65535 or (65535 if high + low else 0)
    return (high << 16 | low).to_bytes(4, "little")


@given(data=st.binary(min_size=1, max_size=400) | st.builds(bytes, st.integers(1, 50)))
@settings(max_examples=60, deadline=None)
def test_both_byte_orders_are_accepted_and_others_are_not(data: bytes) -> None:
    total = sum_of(data)
    swapped = bytes([total[1], total[0], total[3], total[2]])
    out = np.empty(len(data), np.uint8)
    for tail in (total, swapped):
        PIPELINE.decode(data + tail, 0, out)
        assert out.tobytes() == data
    wrong = bytes([total[0] ^ 1, *total[1:]])
    if wrong != swapped:
        with pytest.raises(DataError, match="the Fletcher32 sum is"):
            PIPELINE.decode(data + wrong, 0, out)


@pytest.mark.parametrize("length", [1, 2, 7, 1000, 5001, 100_001])
def test_libhdf5_sums_alike(length: int) -> None:
    for values in (noise(length), np.zeros(length, np.uint8), np.full(length, 255, np.uint8)):
        chunk = one_chunk(values, fletcher32=True)
        assert bits(chunk.decode()) == bits(values)
        assert PIPELINE.encode(values) == chunk.stored


@pytest.mark.parametrize("position", [0, 500, -5, -1])
def test_one_wrong_bit_is_found(position: int) -> None:
    """Under deflate's own sum as well: the data here are not compressed by it."""
    chunk = one_chunk(noise(1000), fletcher32=True)
    stored = bytearray(chunk.stored)
    stored[position] ^= 4
    with pytest.raises(DataError, match="the Fletcher32 sum is"):
        PIPELINE.decode(stored, 0, np.empty(1000, np.uint8))


@pytest.mark.parametrize("stored", [b"", b"123"])
def test_too_few_bytes(stored: bytes) -> None:
    for pipeline in (PIPELINE, FilterPipeline((Filter(DEFLATE, (1,)), Filter(FLETCHER32)))):
        with pytest.raises(DataError, match="too few for a Fletcher32 sum"):
            pipeline.decode(stored, 0, np.empty(10, np.uint8))
