"""Zarr stores of both versions."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.opening import open_source
from hpctrain.h5.options import PackOptions, SourceOptions
from hpctrain.h5.pack import pack_path
from hpctrain.h5.packed import open_packed
from hpctrain.h5.ragged import Ragged

zarr = pytest.importorskip("zarr", reason="zarr is not installed: it is an extra, for Zarr stores only")

IMAGES = np.random.default_rng(0).normal(size=(40, 5, 3)).astype(np.float32)


def store(path: Path, version: int = 3, **arrays: Any) -> Path:
    """A store of these arrays, with chunks of 7 rows."""
    group = zarr.open_group(path, mode="w", zarr_format=version)
    for name, values in arrays.items():
        made = group.create_array(
            name.replace("__", "/"), shape=values.shape, chunks=(7, *values.shape[1:]), dtype=values.dtype
        )
        made[:] = values
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_arrays_become_fields(tmp_path: Path, version: int) -> None:
    text = np.array([f"é {i}" for i in range(40)], np.dtypes.StringDType())
    tokens, lengths = np.arange(100, dtype=np.int32), np.linspace(0, 100, 41).astype(np.int64)
    arrays = {
        "x": IMAGES,
        "label": np.arange(40) % 3,
        "deep__text": text,
        "tokens": tokens,
        "tokens_offsets": lengths,
    }
    path = store(tmp_path / "s.zarr", version, **arrays)
    source = open_source(path)
    assert {
        name: (field.kind, field.dtype.str, field.sample_shape) for name, field in source.fields.items()
    } == {
        "label": ("dense", "<i8", ()),
        "text": ("ragged", "|u1", ()),
        "tokens": ("ragged", "<i4", ()),
        "x": ("dense", "<f4", (5, 3)),
    }
    assert (source.num_samples, source.warnings, source.num_values("tokens")) == (40, (), 100)
    columns = source.read(5, 23)
    assert np.array_equal(columns["x"], IMAGES[5:23])  # type: ignore[arg-type]
    rows = columns["tokens"]
    assert isinstance(rows, Ragged)
    for i in range(18):
        assert np.array_equal(rows.row(i), tokens[lengths[5 + i] : lengths[6 + i]])
    assert isinstance(columns["text"], Ragged)
    assert [columns["text"].text(i) for i in range(18)] == text[5:23].tolist()
    pack_path(path, tmp_path / "set", PackOptions(chunk_samples=6))
    assert open_packed(tmp_path / "set").num_samples == 40


def test_one_array_is_the_field_data(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a", data=IMAGES, chunks=(9, 5, 3))
    source = open_source(tmp_path / "a")
    assert list(source.fields) == ["data"]
    assert np.array_equal(source.read(8, 10)["data"], IMAGES[8:10])  # type: ignore[arg-type]


def test_shards_and_strange_layouts(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "s.zarr", mode="w")
    group.create_array("x", data=IMAGES, chunks=(2, 5, 1), shards=(8, 5, 3))
    group.create_array("y", data=IMAGES.astype(">f8"), chunks=(40, 2, 2))
    columns = open_source(tmp_path / "s.zarr").read(3, 31)
    for name in "xy":
        assert np.array_equal(columns[name], IMAGES[3:31])  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(0, 40), stop=st.integers(0, 40))
def test_any_range_is_that_of_the_array(tmp_path: Path, start: int, stop: int) -> None:
    if not (tmp_path / "s.zarr").exists():
        store(tmp_path / "s.zarr", x=IMAGES)
    start, stop = sorted((start, stop))
    assert np.array_equal(open_source(tmp_path / "s.zarr").read(start, stop)["x"], IMAGES[start:stop])  # type: ignore[arg-type]


def test_fields_are_chosen_as_for_hdf5(tmp_path: Path) -> None:
    path = store(tmp_path / "s.zarr", x=IMAGES, lat=np.arange(5.0), deep__y=np.arange(40))
    source = open_source(path)
    assert list(source.fields) == ["x", "y"]
    assert "1 datasets do not have 40 rows as the others and are left out (/lat (5,))" in source.warnings[0]
    assert list(open_source(path, SourceOptions(fields=("z=/deep/y",))).fields) == ["z"]
    with pytest.raises(DataError, match=r"s.zarr: has no array 'no' \(found: deep/y, lat, x\)"):
        open_source(path, SourceOptions(fields=("/no",)))
    with pytest.raises(UsageError, match="--size, --gray and --keep-encoded are for pictures"):
        open_source(path, SourceOptions(size=3))


def test_types_that_cannot_be_packed_are_left_out(tmp_path: Path) -> None:
    path = store(tmp_path / "s.zarr", 2, x=IMAGES, when=np.zeros(40, "M8[s]"))
    source = open_source(path)
    assert list(source.fields) == ["x"]
    assert "left out" in source.warnings[0]
    assert "'when' has type datetime64[s]" in source.warnings[0]
    with pytest.raises(DataError, match="'when' has type datetime64"):
        open_source(path, SourceOptions(fields=("when",)))


def test_chunks_without_a_file_are_told(tmp_path: Path) -> None:
    path = store(tmp_path / "s.zarr", x=IMAGES)
    (path / "x/c/2/0/0").unlink()
    source = open_source(path)
    assert source.warnings == (
        f"{path}: array 'x': 1 of 6 chunks have no file and are read as the fill value 0.0; see that none was lost",
    )


@pytest.mark.parametrize("version", [2, 3])
def test_damaged_chunks_are_named(tmp_path: Path, version: int) -> None:
    path = store(tmp_path / "s.zarr", version, x=IMAGES)
    (path / ("x/2.0.0" if version == 2 else "x/c/2/0/0")).write_bytes(b"junk")
    source = open_source(path)
    with pytest.raises(DataError, match=r"s.zarr: array 'x', rows 0 to 40: cannot be read by zarr: "):
        source.read(14, 15)


@pytest.mark.parametrize("content", ["{", '{"zarr_format": 9}', "[]"])
def test_damaged_stores(tmp_path: Path, content: str) -> None:
    path = store(tmp_path / "s.zarr", x=IMAGES)
    (path / "zarr.json").write_text(content)
    with pytest.raises(DataError, match=r"s.zarr: cannot be read by zarr"):
        open_source(path)


def test_what_is_no_part_of_the_store_is_told(tmp_path: Path) -> None:
    path = store(tmp_path / "s.zarr", x=IMAGES, y=IMAGES)
    (path / "y/zarr.json").unlink()
    source = open_source(path)
    assert list(source.fields) == ["x"]
    assert source.warnings == (f"{path}: Object at y is not recognized as a component of a Zarr hierarchy.",)


def test_stores_without_rows(tmp_path: Path) -> None:
    (tmp_path / "a.zarr").mkdir()
    with pytest.raises(DataError, match=r"a.zarr: cannot be read by zarr"):
        open_source(tmp_path / "a.zarr")
    with pytest.raises(DataError, match=r"s.zarr: the store has no array with rows to pack"):
        open_source(store(tmp_path / "s.zarr"))


@pytest.mark.parametrize("dtype", ["|O", "<i4"])
def test_nothing_is_unpickled(tmp_path: Path, dtype: str) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    path = store(tmp_path / "s.zarr", 2, x=np.arange(4))
    about = json.loads((path / "x/.zarray").read_text())
    about |= {"dtype": dtype, "filters": [{"id": "pickle", "protocol": 5}], "compressor": None}
    (path / "x/.zarray").write_text(json.dumps(about))
    (path / "x/0").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError, match=r"s.zarr: "):
        open_source(path).read(0, 1)
    assert not (tmp_path / "sprung").exists()


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path / "s.zarr", x=IMAGES)
    monkeypatch.setitem(sys.modules, "zarr", None)  # as where it is not installed
    with pytest.raises(
        UsageError, match=r"s.zarr: is read with the package 'zarr', which is not installed; .* zarr"
    ):
        open_source(path)
