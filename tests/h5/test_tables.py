"""Tables of pictures and text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.h5.opening import open_source
from hpctrain.h5.pack import PackOptions, pack_path
from hpctrain.h5.packed import open_packed
from hpctrain.h5.reader import FileSource, Ragged, read_sample_chunk

HEADER = "file,text,label,count,ratio,code\n"
ROWS = (
    'img/0.png,"a red, round apple",fruit,3,0.5,007\n'
    "img/1.png,pomme dorée 🍏,fruit,-4,1e3,008\n"
    "img/2.png,,car,5,7,x\n"
)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    (tmp_path / "raw" / "img").mkdir(parents=True)
    for i in range(3):
        Image.fromarray(np.full((4, 4, 3), 50 * i, np.uint8)).save(tmp_path / "raw" / "img" / f"{i}.png")
    return tmp_path / "raw"


def write(raw: Path, text: str, name: str = "table.csv") -> Path:
    (raw / name).write_text(text, encoding="utf-8")
    return raw / name


@pytest.mark.parametrize("form", ["csv", "tsv", "folder", "bom", "crlf"])
def test_columns_become_fields(raw: Path, tmp_path: Path, form: str) -> None:
    text = HEADER + ROWS
    if form == "tsv":
        text = text.replace('"a red, round apple"', "a red; round apple").replace(",", "\t").replace(";", ",")
    if form == "bom":
        text = "\ufeff" + text
    if form == "crlf":
        text = text.replace("\n", "\r\n")
    table = write(raw, text, "table.tsv" if form == "tsv" else "table.csv")
    pack_path(raw if form == "folder" else table, tmp_path / "set", PackOptions(chunk_samples=2))
    packed = open_packed(tmp_path / "set")
    with FileSource() as source:
        first, second = (read_sample_chunk(packed, source, chunk) for chunk in (0, 1))
    assert packed.classes == ("car", "fruit")
    assert list(packed.fields) == ["image", "text", "label", "count", "ratio", "code"]
    texts, codes = first["text"], second["code"]
    assert isinstance(texts, Ragged)
    assert isinstance(codes, Ragged)
    assert [texts.text(i) for i in range(2)] == ["a red, round apple", "pomme dorée 🍏"]
    assert second["text"].row(0).size == 0
    assert codes.text(0) == "x"
    assert first["label"].tolist() == [1, 1]
    assert second["label"].tolist() == [0]
    assert first["count"].tolist() == [3, -4]
    assert first["count"].dtype == np.int64
    assert first["ratio"].tolist() == [0.5, 1000.0]
    assert first["ratio"].dtype == np.float32
    assert first["image"][1, 0, 0].tolist() == [50, 50, 50]


def test_integer_labels_are_kept(raw: Path) -> None:
    source = open_source(write(raw, "file,label\nimg/0.png,7\nimg/1.png,0\nimg/2.png,7\n"))
    assert source.classes is None
    assert source.read(0, 3)["label"].tolist() == [7, 0, 7]


def column(raw: Path, cells: list[str], name: str = "x") -> np.ndarray | list[str]:
    lines = [f'img/0.png,"{cell}"\n' for cell in cells]
    values = open_source(write(raw, f"file,{name}\n" + "".join(lines))).read(0, len(cells))[name]
    return [values.text(i) for i in range(len(cells))] if isinstance(values, Ragged) else values


@pytest.mark.parametrize(
    "cells",
    [
        ["007", "008", "009"],
        ["12345678901234567890", "12345678901234567891", "12345678901234567892"],
        ["1_0", "2_0"],
        ["0.5", "007"],
        ["0.5", str(10**20)],
        ["01.5", "2"],
        ["1.5e1_0", "2"],
        ["0x1f", "1"],
        ["٣", "٤"],
        ["."],
        ["e5"],
        [" ", "1"],
        ["+", "-"],
    ],
)
def test_names_that_look_like_numbers_stay_text(raw: Path, cells: list[str]) -> None:
    assert column(raw, cells) == cells


def test_a_text_column_of_digits_stays_text(raw: Path) -> None:
    assert column(raw, ["1", "2"], "text") == ["1", "2"]


@pytest.mark.parametrize(
    ("cells", "dtype"),
    [
        (["0", "-7", "+12", str(10**18 - 1)], np.int64),
        ([" 16777217", "3 "], np.int64),
        (["0.5", "3", "-.25", "7.", "1e3", "2.5E-2", "+1.e1", " 4.5"], np.float32),
        (["inf", "-Infinity", "1"], np.float32),
    ],
)
def test_numbers_become_numbers(raw: Path, cells: list[str], dtype: type) -> None:
    values = column(raw, cells)
    assert isinstance(values, np.ndarray)
    assert values.dtype == dtype
    assert values.tolist() == [dtype(float(cell)) if dtype == np.float32 else int(cell) for cell in cells]


def test_nan_is_a_number(raw: Path) -> None:
    values = column(raw, ["nan", "NaN", "1.5"])
    assert isinstance(values, np.ndarray)
    assert np.isnan(values).tolist() == [True, True, False]


def test_numbers_beyond_float32_are_refused(raw: Path) -> None:
    with pytest.raises(DataError, match=r"'x', row 2 after the header: 1e39 is beyond float32 .*; scale"):
        column(raw, ["0.5", "1e39"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no lines after its header"),
        ("file,text\n", "no lines after its header"),
        ("name,text\nimg/0.png,x\n", r"no column 'file' \(found: name, text\)"),
        ("file,text\nimg/0.png,x,y\n", "line 2: 3 cells, but the header has 2"),
        ("file,text,text\nimg/0.png,x,y\n", "two columns have the same name"),
        ("file,count\nimg/0.png,1\nimg/1.png,\n", r"'count' is empty in 1 of 2 rows \(first: row 2"),
        ("file,ratio\nimg/0.png,\nimg/1.png,.5\n", r"'ratio' is empty in 1 of 2 rows \(first: row 1"),
        ("file,label\nimg/0.png,cat\nimg/1.png,\n", "'label' is empty in 1 of 2 rows"),
        ("file,image\nimg/0.png,1\n", "'image' clashes"),
        ('file,text\nimg/0.png,"x\n', "not a table in UTF-8"),
        (
            "file,label\nimg/0.png,a\nimg/9.png,b\nnowhere/1.png,c\n",
            r"2 of 3 files are not there \(first: 'img/9.png', 'nowhere/1.png'\); paths are relative to the table",
        ),
        ("file,count\nimg/0.png,1\n,2\n", r"'file' is empty in 1 of 2 rows \(first: row 2"),
        ("file\n.\nimg/0.png\n", r"1 of 2 files are not there \(first: '.'\)"),
        ("file\nimg/0.png\nimg\nimg/..\n", r"2 of 3 files are not there \(first: 'img', 'img/..'\)"),
        ("file\na\0b/0.png\n", r"1 of 1 files are not there"),
        (f"file\n{'x' * 300}/0.png\n", r"1 of 1 files are not there"),
    ],
)
def test_bad_tables(raw: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_source(write(raw, text))


def test_a_long_text(raw: Path) -> None:
    source = open_source(write(raw, f"file,text\nimg/0.png,{'x' * 200_000}\n"))
    assert source.num_values("text") == 200_000


def test_a_table_in_another_encoding(raw: Path) -> None:
    (raw / "table.csv").write_bytes("file,text\nimg/0.png,café\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"not a table in UTF-8.*save it as UTF-8"):
        open_source(raw)


def test_a_table_that_cannot_be_read(raw: Path) -> None:
    (raw / "table.csv").mkdir()
    with pytest.raises(StorageError, match="cannot be read: Is a directory"):
        open_source(raw)


@pytest.mark.parametrize("name", ["id", "_x", "text_offsets", "two words", "é", "x/y", ""])
def test_column_names_that_cannot_be_fields(raw: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"cannot name a field: .*; rename it"):
        open_source(write(raw, f"file,{name}\nimg/0.png,1\n"))


def test_several_tables_in_a_folder(raw: Path) -> None:
    write(raw, HEADER + ROWS, "a.csv")
    write(raw, HEADER + ROWS, "b.tsv")
    with pytest.raises(UsageError, match=r"holds several tables \(a.csv, b.tsv\); name one as SRC"):
        open_source(raw)
    assert open_source(raw / "a.csv").num_samples == 3
