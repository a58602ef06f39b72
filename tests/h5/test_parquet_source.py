"""Parquet files."""

from __future__ import annotations

import json
import os
import sys
from collections import namedtuple
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
from hpctrain.h5.picture import decode_image
from hpctrain.h5.ragged import Ragged
from tests.h5.picture_files import picture, read_each

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: it is an extra, for Parquet files only")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed with Parquet")

ROWS = 23


def columns_of(count: int = ROWS) -> dict[str, Any]:
    """A column of each kind."""
    numbers = range(count)
    return {
        "label": pa.array([i % 3 for i in numbers], pa.int64()),
        "small": pa.array(list(numbers), pa.int8()),
        "half": pa.array([np.float16(i / 2) for i in numbers], pa.float16()),
        "good": pa.array([i % 2 == 0 for i in numbers]),
        "box": pa.array([[i, i + 1] for i in numbers], pa.list_(pa.float32(), 2)),
        "grid": pa.array([[[i] * 3] * 2 for i in numbers], pa.list_(pa.list_(pa.int32(), 3), 2)),
        "emb": pa.array([[float(i)] * 4 for i in numbers], pa.list_(pa.float64())),
        "tokens": pa.array([list(range(i % 4)) for i in numbers], pa.list_(pa.int16())),
        "caption": pa.array([f"é {i}" for i in numbers]),
        "large": pa.array([f"x{i}" for i in numbers], pa.large_string()),
        "view": pa.array([f"v{i}" * 5 for i in numbers], pa.string_view()),
        "kind": pa.array([f"k{i % 2}" for i in numbers]).dictionary_encode(),
        "blob": pa.array([bytes([i]) * (i % 3) for i in numbers], pa.binary()),
    }


def write(path: Path, columns: dict[str, Any], group_rows: int = 5, notes: Any = None) -> Path:
    table = pa.table(columns)
    if notes is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": notes}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group_rows, write_page_checksum=True)
    return path


def as_lists(column: Any) -> list[Any]:
    return (
        [column.row(i).tolist() for i in range(len(column))]
        if isinstance(column, Ragged)
        else column.tolist()
    )


def test_every_type_becomes_a_field(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "x.parquet", columns_of()))
    text = ("ragged", "|u1", ())
    assert {
        name: (field.kind, field.dtype.str, field.sample_shape) for name, field in source.fields.items()
    } == {
        "label": ("dense", "<i8", ()),
        "small": ("dense", "|i1", ()),
        "half": ("dense", "<f2", ()),
        "good": ("dense", "|u1", ()),
        "box": ("dense", "<f4", (2,)),
        "grid": ("dense", "<i4", (2, 3)),
        "emb": ("dense", "<f8", (4,)),
        "tokens": ("ragged", "<i4", ()),
        **dict.fromkeys(("caption", "large", "view", "kind", "blob"), text),
    }
    assert (source.num_samples, source.warnings, source.classes) == (ROWS, (), None)
    columns = source.read(3, 17)
    for name, array in columns_of().items():
        found, wanted = as_lists(columns[name]), array.to_pylist()[3:17]
        if source.fields[name].encoding is None and isinstance(wanted[0], (str, bytes)):
            found = [bytes(row) for row in found]
            wanted = [row.encode() if isinstance(row, str) else row for row in wanted]
        assert found == wanted, name


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranges=st.tuples(st.integers(0, 2 * ROWS - 1), st.integers(1, 2 * ROWS)),
    group_rows=st.integers(1, ROWS + 1),
)
def test_any_range_across_groups_and_files(tmp_path: Path, ranges: tuple[int, int], group_rows: int) -> None:
    table = columns_of()
    kept = {name: table[name] for name in ("label", "tokens", "caption", "grid")}
    write(tmp_path / "raw" / "a.parquet", kept, group_rows)
    write(tmp_path / "raw" / "b.parquet", kept, 7)
    start, stop = min(ranges[0], ranges[1] - 1), max(ranges[0] + 1, ranges[1])
    source = open_source(tmp_path / "raw")
    columns, good, bad = read_each(source, start, stop)
    assert (good, bad) == (list(range(start, stop)), {})
    for name in ("label", "tokens", "grid"):
        assert as_lists(columns[name]) == (kept[name].to_pylist() * 2)[start:stop]


def test_what_is_packed_is_what_was_written(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", columns_of())
    pack_path(tmp_path / "x.parquet", tmp_path / "set", PackOptions(chunk_samples=4))
    assert open_packed(tmp_path / "set").num_samples == ROWS


class TestPictures:
    """Pictures as `datasets` stores them."""

    COLUMNS = {  # noqa: RUF012 - read only
        "image": pa.array([{"bytes": picture(i), "path": f"{i}.png"} for i in range(8)]),
        "label": pa.array(list(range(8))),
    }
    NOTES = {"label": {"_type": "ClassLabel", "names": [f"c{i}" for i in range(8)]}}  # noqa: RUF012 - read only

    def test_decoded(self, tmp_path: Path) -> None:
        source = open_source(write(tmp_path / "x.parquet", self.COLUMNS, 3, self.NOTES))
        assert source.classes == tuple(f"c{i}" for i in range(8))
        images = source.read(2, 7)["image"]
        assert isinstance(images, np.ndarray)
        for row, image in enumerate(images):
            assert np.array_equal(image, decode_image(picture(row + 2), "x"))

    def test_kept_or_scaled(self, tmp_path: Path) -> None:
        path = write(tmp_path / "x.parquet", self.COLUMNS, 3)
        kept = open_source(path, SourceOptions(keep_encoded=True))
        assert kept.fields["image"].encoding == "image"
        images = kept.read(0, 8)["image"]
        assert isinstance(images, Ragged)
        assert [images.row(i).tobytes() for i in range(8)] == [picture(i) for i in range(8)]
        assert open_source(path, SourceOptions(size=4)).fields["image"].sample_shape == (4, 4, 3)

    def test_bytes_alone(self, tmp_path: Path) -> None:
        data = pa.array([picture(i) for i in range(3)])
        notes = {"photo": {"_type": "Image"}}
        source = open_source(
            write(tmp_path / "x.parquet", {"image": data, "photo": data, "raw": data}, notes=notes)
        )
        assert {name: field.kind for name, field in source.fields.items()} == {
            "image": "dense",
            "photo": "dense",
            "raw": "ragged",
        }

    def test_bad_ones_are_told(self, tmp_path: Path) -> None:
        rows = self.COLUMNS["image"].to_pylist()
        rows[0]["bytes"], rows[3], rows[5]["bytes"] = b"junk", None, None
        source = open_source(write(tmp_path / "x.parquet", {**self.COLUMNS, "image": pa.array(rows)}, 3))
        columns, good, bad = read_each(source)
        assert good == [1, 2, 4, 6, 7]
        assert columns["label"].tolist() == good  # type: ignore[union-attr]
        assert "x.parquet: row 0 (from 0), column 'image': does not decode as an image" in bad[0]
        assert "x.parquet: row 3 (from 0), column 'image': is null" in bad[3]
        assert "row 5 (from 0), column 'image': is null" in bad[5]

    def test_options_without_pictures(self, tmp_path: Path) -> None:
        path = write(tmp_path / "x.parquet", {"a": pa.array([1])})
        with pytest.raises(UsageError, match=r"are for pictures, but .*x.parquet has none"):
            open_source(path, SourceOptions(size=4))


@pytest.mark.parametrize(
    ("name", "values", "kind", "bad"),
    [
        ("number", [1, None, 3], pa.int32(), [1]),
        ("text", ["a", None, None], pa.string(), [1, 2]),
        ("tokens", [[1], [2, None], None], pa.list_(pa.int64()), [1, 2]),
        ("box", [[1, 2], None, [3, None]], pa.list_(pa.float32(), 2), [1, 2]),
        ("emb", [[1.0, 2.0], [3.0], [4.0, None]], pa.list_(pa.float32()), [1, 2]),
        ("good", [True, None, False], pa.bool_(), [1]),
    ],
)
def test_nulls_and_lengths_that_differ_are_bad_samples(
    tmp_path: Path, name: str, values: list[Any], kind: Any, bad: list[int]
) -> None:
    path = write(tmp_path / "x.parquet", {name: pa.array(values, kind), "n": pa.array([0, 1, 2])}, 2)
    source = open_source(path)
    columns, good, told = read_each(source)
    assert sorted(told) == bad
    assert columns["n"].tolist() == good == [i for i in range(3) if i not in bad]  # type: ignore[union-attr]
    assert as_lists(columns[name])[0] == (list(b"a") if name == "text" else values[0])
    for row, message in told.items():
        assert f"x.parquet: row {row} (from 0), column {name!r}: " in message
    with pytest.raises(DataError, match=rf"row {bad[0]} \(from 0\), column '{name}'"):
        source.read(0, 3)


def test_columns_that_cannot_be_packed_are_left_out(tmp_path: Path) -> None:
    columns = {
        "a": pa.array([1]),
        "when": pa.array([0], pa.timestamp("ms")),
        "id": pa.array([1]),
        "deep": pa.array([{"x": 1}]),
        "lists": pa.array([[["a"]]]),
    }
    source = open_source(write(tmp_path / "x.parquet", columns))
    assert list(source.fields) == ["a"]
    assert len(source.warnings) == 4
    assert "column 'when' has type timestamp[ms]" in source.warnings[0]
    with pytest.raises(DataError, match=r"x.parquet: no column can be packed: column 'when'"):
        open_source(write(tmp_path / "x.parquet", {"when": columns["when"]}))


def test_columns_of_one_name(tmp_path: Path) -> None:
    one, two = pa.array([1]), pa.array([2])
    pq.write_table(pa.table([one, two, two], names=["a", "b", "b"]), tmp_path / "x.parquet")
    source = open_source(tmp_path / "x.parquet")
    assert list(source.fields) == ["a"]
    assert source.read(0, 1)["a"].tolist() == [1]  # type: ignore[union-attr]
    assert source.warnings == (
        f"{tmp_path}/x.parquet: left out: several columns are called 'b'; rename them",
    )


def test_structs_that_look_like_pictures(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": pa.array([{"bytes": 1, "path": "a"}])})
    with pytest.raises(DataError, match=r"column 'image' has type struct<bytes: int64, path: string>"):
        open_source(path)
    path = write(tmp_path / "x.parquet", {"image": pa.array([{"bytes": "no picture", "path": "a"}])})
    with pytest.raises(DataError, match=r"row 0 \(from 0\), column 'image': does not decode as an image"):
        open_source(path)


def test_files_that_differ(tmp_path: Path) -> None:
    write(tmp_path / "raw" / "a.parquet", {"a": pa.array([1])})
    write(tmp_path / "raw" / "b.parquet", {"a": pa.array([1.5])})
    with pytest.raises(DataError, match=r"b.parquet: other columns or types than .*a.parquet"):
        open_source(tmp_path / "raw")


def test_files_without_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x.parquet: holds no rows to pack"):
        open_source(write(tmp_path / "x.parquet", {"a": pa.array([], pa.int64())}))
    write(tmp_path / "raw" / "a.parquet", {"a": pa.array([], pa.int64())})
    write(tmp_path / "raw" / "b.parquet", {"a": pa.array([7], pa.int64())})
    assert open_source(tmp_path / "raw").read(0, 1)["a"].tolist() == [7]  # type: ignore[union-attr]


def test_row_groups_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", columns_of())
    # Memory that a small file does not fit into.
    monkeypatch.setattr("psutil.virtual_memory", lambda: namedtuple("Memory", "available")(1000))
    with pytest.raises(
        DataError, match=r"x.parquet: a row group of \d+ bytes, but the bound is 166 .*row_group_size"
    ):
        open_source(path)


def test_cut_off_and_damaged_files(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"a": pa.array(list(range(5000)))}, 5000)
    whole = path.read_bytes()
    for size in (0, 3, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"x.parquet: cannot be read as Parquet"):
            open_source(path)
    for at in range(50, 4000, 500):  # in pages, whose checksums tell
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(DataError, match=r"x.parquet: cannot be read as Parquet"):
            open_source(path).read(0, 5000)


def test_a_file_that_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"a": pa.array(list(range(10)))}, 2)
    source = open_source(path)
    os.utime(path, (1, 1))
    with pytest.raises(DataError, match=r"x.parquet: changed since this run looked at it"):
        source.read(8, 10)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", {"a": pa.array([1])})
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # as where it is not installed
    with pytest.raises(
        UsageError, match=r"x.parquet: is read with the package 'pyarrow', which is not installed"
    ):
        open_source(path)
