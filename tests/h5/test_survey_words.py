from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest

from hpctrain.h5.survey_words import dtype_words, filter_words, filters_of, layout_of

_NESTED = np.dtype(
    [("r", "<f4"), ("inner", [("a", ">i2"), ("b", "S3")]), ("c", "u1"), ("d", "u1"), ("e", "u1")]
)


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("<f4", "float32"),
        (">f8", "float64 big-endian"),
        ("u1", "uint8"),
        (">i8", "int64 big-endian"),
        ("S7", "string of 7 bytes"),
        ("?", "bool"),
        ("V5", "opaque of 5 bytes"),
        ("<c8", "compound of 8 bytes {r: float32, i: float32}"),
        (np.dtype(("<f4", (3, 2))), "(3, 2) of float32"),
        (h5py.string_dtype(), "vlen string"),
        (h5py.vlen_dtype("<i4"), "vlen int32"),
        (h5py.ref_dtype, "object reference"),
        (h5py.regionref_dtype, "region reference"),
        (h5py.enum_dtype({"RED": 0, "GREEN": 1}, "<i2"), "enum int16 of 2 names"),
        (
            _NESTED,
            "compound of 12 bytes {r: float32, inner: compound of 5 bytes {a: int16 big-endian, b: string of 3 bytes}, "
            "c: uint8, 2 more}",
        ),
    ],
)
def test_types(dtype: object, words: str) -> None:
    assert dtype_words(h5py.h5t.py_create(np.dtype(dtype), logical=True)) == words


def test_types_that_numpy_does_not_know() -> None:
    odd = h5py.h5t.STD_I32LE.copy()
    odd.set_precision(12)
    assert dtype_words(odd) == "int32, 12 of its bits used"
    assert dtype_words(h5py.h5t.STD_B16LE) == "bitfield16"
    assert dtype_words(h5py.h5t.UNIX_D32LE) == "time of 4 bytes (H5T_TIME)"


def test_filters_of_a_dataset(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        plain = file.create_dataset("p", data=np.zeros(8, "f4"), chunks=(4,), compression=5, shuffle=True)
        blosc = file.create_dataset("b", data=np.zeros(8, "f4"), **hdf5plugin.Blosc("zstd", 7, 2))
        scalar = file.create_dataset("s", data=1.0)
        assert [number for number, _ in filters_of(plain.id.get_create_plist())] == [2, 1]
        ((number, words),) = filters_of(blosc.id.get_create_plist())
        assert number == 32001
        assert "Zstd, level 7, bit shuffle" in words
        assert filters_of(scalar.id.get_create_plist()) == []
        assert layout_of(scalar.id.get_create_plist()) == "contiguous"


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6, 32000, 32001, 32004, 32008, 32015, 32026, 40000])
@pytest.mark.parametrize("count", range(9))
def test_settings_that_are_missing_or_wild_are_survived(number: int, count: int) -> None:
    assert filter_words(number, (4_000_000_000,) * count)
