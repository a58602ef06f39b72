"""Arrays and `.npy` files."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.opening import open_source
from hpctrain.h5.pack import SourceOptions, pack_path
from hpctrain.h5.packed import open_packed
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.reader import FileSource, read_sample_chunk
from hpctrain.h5.sources import ArraySource


def test_one_file_is_the_field_data(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12.0).reshape(4, 3))
    pack_path(tmp_path / "x.npy", tmp_path / "set")
    packed = open_packed(tmp_path / "set")
    with FileSource() as source:
        assert read_sample_chunk(packed, source, 0)["data"].tolist() == np.arange(12.0).reshape(4, 3).tolist()


def test_a_folder_is_a_field_per_file(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    np.save(raw / "image.npy", np.asfortranarray(np.arange(60, dtype=">i2").reshape(5, 4, 3)))
    np.save(raw / "label.npy", np.arange(5))
    np.save(raw / "good.npy", np.arange(5) > 2)
    (raw / "README").write_text("x")
    report = pack_path(raw, tmp_path / "set")
    assert report.warnings == ("1 other files are left out (first: README)",)
    packed = open_packed(tmp_path / "set")
    assert [(name, field.dtype.str) for name, field in packed.fields.items()] == [
        ("good", "|u1"),
        ("image", "<i2"),
        ("label", "<i8"),
    ]
    with FileSource() as source:
        fields = read_sample_chunk(packed, source, 0)
    assert fields["image"].tolist() == np.arange(60).reshape(5, 4, 3).tolist()
    assert fields["good"].tolist() == [0, 0, 0, 1, 1]


def test_files_are_mapped_not_loaded(tmp_path: Path) -> None:
    with (tmp_path / "x.npy").open("wb") as file:  # 2 TiB, of which nothing is on disk
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (2**31, 256)}
        )
        os.truncate(file.fileno(), file.tell() + 2**41)
    source = open_source(tmp_path / "x.npy")
    assert source.num_samples == 2**31
    assert source.read(2**30, 2**30 + 2)["data"].shape == (2, 256)


def test_lengths_that_differ_name_both(tmp_path: Path) -> None:
    np.save(tmp_path / "image.npy", np.zeros((5, 2)))
    np.save(tmp_path / "label.npy", np.zeros(4))
    with pytest.raises(DataError, match="'image' has 5 samples but 'label' has 4; all fields need the same"):
        open_source(tmp_path)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    np.save(tmp_path / "x.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    (tmp_path / "y.npy").write_bytes(pickle.dumps(Trap()))
    for name in ("x", "y"):
        with pytest.raises(DataError, match=rf"{name}.npy: cannot be read as an array of numbers"):
            open_source(tmp_path / f"{name}.npy")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00", b"plain text, no array"])
def test_files_that_are_no_arrays(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"x.npy: cannot be read as an array of numbers.*; save it again"):
        open_source(tmp_path / "x.npy")


def test_truncated_and_zipped_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(1000))
    os.truncate(tmp_path / "x.npy", 4000)
    with pytest.raises(DataError, match=r"x.npy: cannot be read"):
        open_source(tmp_path / "x.npy")
    np.savez(tmp_path / "z.npz", a=np.zeros(3))
    (tmp_path / "z.npz").rename(tmp_path / "z.npy")
    with pytest.raises(DataError, match=r"z.npy: holds several arrays"):
        open_source(tmp_path / "z.npy")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3, complex), "type complex128; only booleans, integers and floats of at most 64 bits"),
        (np.zeros(3, "U5"), "type <U5; only"),
        (np.zeros(3, "M8[s]"), "only booleans"),
        (np.zeros(3, [("a", "i4")]), "only booleans"),
        (np.zeros(3, np.longdouble), "only booleans"),
        (np.array(3.0), r"shape \(\); it needs a first dimension"),
        (np.zeros((3, 0)), r"shape \(3, 0\); it needs"),
        (
            Ragged.from_rows([np.zeros(2)], np.float64),
            "any length and type float64; they can be uint8, uint16, int32, int64",
        ),
    ],
)
def test_arrays_that_cannot_be_packed(array: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ArraySource({"x": array})


def test_options_for_pictures_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    for path in (tmp_path, tmp_path / "x.npy"):
        with pytest.raises(UsageError, match="--size, --gray and --keep-encoded are for pictures"):
            open_source(path, SourceOptions(size=4))


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(UsageError, match=r"x.txt cannot be packed; SRC is a folder with"):
        open_source(tmp_path / "x.txt")
    with pytest.raises(UsageError, match="there is no such file or folder"):
        open_source(tmp_path / "y")
