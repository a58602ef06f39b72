"""Tables as a source: a CSV or TSV file with a header, one line per picture.

The column `file` names the picture, relative to the table. `text` is kept as UTF-8 (ragged). `label` becomes
class numbers (int64) in sorted order of its strings, unless all are integers, which are kept. Of the other
columns, those of integers become int64, those of numbers float32, and the rest UTF-8. What only looks like a
number is a name and stays UTF-8, digit for digit: `007`, `1_0`, an integer beyond 18 digits.
"""

from __future__ import annotations

import csv
import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.archive_limits import MAX_MEMBER_BYTES
from hpctrain.h5.images import FilePictures, ImageSource
from hpctrain.h5.options import SourceOptions
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import check_field_name

TABLE_SUFFIXES: Final = frozenset({".csv", ".tsv"})
_INTEGER: Final = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})")  # within int64; "007" is a name, not a number
# Has a point or an exponent, or is no finite number: integers that `_INTEGER` refuses must not become float32, which
# would make different ones equal.
_FRACTION: Final = re.compile(
    r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*|(?=e))(e[+-]?[0-9]+)?|\.[0-9]+(e[+-]?[0-9]+)?|nan|inf(inity)?)",
    re.IGNORECASE,
)
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})
_SHOWN: Final = 3


def open_table(path: Path, how: SourceOptions) -> ImageSource:
    """A table of pictures as a source.

    Raises `DataError`, with the line, for a table that is empty, ragged or has no column `file`, for empty
    cells among numbers or labels, and for pictures that are not there; `StorageError` when it cannot be read.
    """
    columns = _read_table(path)
    if "file" not in columns:
        raise DataError(
            f"{path}: no column 'file' (found: {', '.join(columns)}); the first line must name the columns"
        )
    files = columns.pop("file")
    if "image" in columns:
        raise DataError(f"{path}: the column 'image' clashes with the field of the pictures; rename it")
    _refuse_empty(path, "file", files)
    images = [path.parent / name for name in files]
    _check_present(path, images, files)
    arrays: dict[str, npt.NDArray[Any] | Ragged] = {}
    classes: list[str] | None = None
    for name, cells in columns.items():
        check_field_name(name)
        if name == "label" and not all(map(_INTEGER.fullmatch, cells)):
            _refuse_empty(path, name, cells)
            classes = sorted(set(cells))
            numbers = {text: number for number, text in enumerate(classes)}
            arrays[name] = np.array([numbers[cell] for cell in cells], np.int64)
        else:
            arrays[name] = _column(path, name, cells)
    return ImageSource(FilePictures(images), how, arrays, classes)


def _read_table(path: Path) -> dict[str, list[str]]:
    """Cells by column."""
    csv.field_size_limit(
        MAX_MEMBER_BYTES
    )  # of the whole process; texts are longer than the 128 KiB it begins with
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
            header = next(reader, [])
            rows = []
            for row in reader:
                if len(row) != len(header) and row:
                    raise DataError(
                        f"{path}, line {reader.line_num}: {len(row)} cells, but the header has {len(header)}; "
                        "put cells that hold the separator into quotes"
                    )
                if row:
                    rows.append(row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a table in UTF-8: {error}; save it as UTF-8 CSV or TSV") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}; check the filesystem") from error
    if len(set(header)) != len(header):
        raise DataError(f"{path}: two columns have the same name ({', '.join(header)}); rename one")
    if not rows:
        raise DataError(f"{path}: the table has no lines after its header; add some")
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}


def _column(path: Path, name: str, cells: Sequence[str]) -> npt.NDArray[Any] | Ragged:
    filled = [cell.strip() for cell in cells if cell]
    if name == "text" or not filled:
        return Ragged.from_text(cells)
    if all(map(_INTEGER.fullmatch, filled)):
        _refuse_empty(path, name, cells)
        return np.array([int(cell) for cell in cells], np.int64)
    if not all(_INTEGER.fullmatch(cell) or _FRACTION.fullmatch(cell) for cell in filled):
        return Ragged.from_text(cells)
    _refuse_empty(path, name, cells)
    return _floats(path, name, cells)


def _floats(path: Path, name: str, cells: Sequence[str]) -> npt.NDArray[np.float32]:
    exact = np.array([float(cell) for cell in cells])
    with np.errstate(over="ignore"):
        numbers = exact.astype(np.float32)
    infinite = np.array(["inf" in cell.lower() for cell in cells])
    lost = np.flatnonzero(np.isinf(numbers) & ~infinite)
    if len(lost):
        raise DataError(
            f"{path}: column {name!r}, row {lost[0] + 1} after the header: {cells[lost[0]]} is beyond float32 "
            f"(largest {np.finfo(np.float32).max}); scale the column"
        )
    return numbers


def _refuse_empty(path: Path, name: str, cells: Sequence[str]) -> None:
    empty = [row for row, cell in enumerate(cells) if not cell]
    if empty:
        raise DataError(
            f"{path}: column {name!r} is empty in {len(empty)} of {len(cells)} rows "
            f"(first: row {empty[0] + 1} after the header); fill the cells or remove the rows"
        )


def _check_present(path: Path, images: Sequence[Path], names: Sequence[str]) -> None:
    """Refuse a table that names files that are not there; each folder is listed once."""
    listed = {folder: _files_in(folder) for folder in {image.parent for image in images}}
    missing = [
        name for name, image in zip(names, images, strict=True) if image.name not in listed[image.parent]
    ]
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of {len(images)} files are not there "
            f"(first: {', '.join(map(repr, missing[:_SHOWN]))}); "
            "paths are relative to the table; add the files or remove the lines"
        )


def _files_in(folder: Path) -> frozenset[str]:
    try:
        with os.scandir(folder) as entries:
            return frozenset(entry.name for entry in entries if not entry.is_dir())
    except ValueError:  # a NUL in the name: no folder can be called so
        return frozenset()
    except OSError as error:
        if error.errno in _ABSENT:
            return frozenset()
        raise StorageError(f"{folder}: cannot be listed: {error.strerror}; check the filesystem") from error
