"""Parquet files as a source: one file, or several of one schema one after the other, read by row group.

What a column becomes says `parquet_columns`. Of the notes that HuggingFace's `datasets` leaves in a file, the names of
the classes of `label`, and which columns are pictures, are taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.blocks import BlockCache, Rows, cut, joined
from hpctrain.h5.each import EachSource, Numbers, OnBad, Values, make_samples, picked
from hpctrain.h5.fields import Field
from hpctrain.h5.images import PictureField
from hpctrain.h5.optional import needed
from hpctrain.h5.options import SourceOptions
from hpctrain.h5.parquet_file import ParquetFile
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import Columns, UnpackableError, is_field_name

_KEPT_BYTES: Final = 256 << 20
_GROUPS_AT_ONCE: Final = 3  # two are kept, one is loaded
_MEMORY_SHARE: Final = 0.5


def open_parquet(paths: Sequence[Path], how: SourceOptions, warnings: tuple[str, ...] = ()) -> ParquetSource:
    """Parquet files of one data set.

    Raises `UsageError` where the package is missing, or for options of pictures where there are none; `DataError`,
    naming file and column, for what is damaged, empty or cannot be packed, and for schemas that differ.
    """
    needed("pyarrow.parquet", paths[0])
    files = [ParquetFile(path) for path in paths]
    for file in files[1:]:
        if not file.schema.equals(files[0].schema):
            raise DataError(f"{file.path}: other columns or types than {paths[0]}; pack them apart")
    source = ParquetSource(files, how, warnings)
    if not source.has_pictures and (how.size is not None or how.gray or how.keep_encoded):
        raise UsageError(
            f"--size, --gray and --keep-encoded are for pictures, but {paths[0]} has none; leave them out"
        )
    return source


@dataclass(frozen=True)
class _Block:
    """One row group: its columns, and the rows that make no sample, with the column and the reason."""

    columns: dict[str, Rows]
    bad: dict[int, tuple[str, str]]


class ParquetSource(EachSource):
    """The columns that can be packed; the others are left out with a warning."""

    def __init__(
        self, files: Sequence[ParquetFile], how: SourceOptions, warnings: tuple[str, ...] = ()
    ) -> None:
        self._files = list(files)
        self._groups = [
            (number, group) for number, file in enumerate(files) for group in range(len(file.group_rows))
        ]
        rows = [count for file in files for count in file.group_rows]
        self._starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        self._file_starts = np.concatenate([[0], np.cumsum([sum(file.group_rows) for file in files])])
        self.num_samples = int(self._starts[-1])
        if not self.num_samples:
            raise DataError(f"{files[0].path}: holds no rows to pack; choose another file")
        self._check_memory()
        self._blocks: BlockCache[int, _Block] = BlockCache(self._load, _size_of, _KEPT_BYTES)
        notes = _notes(files[0].schema.metadata)
        self.classes = _classes(notes)
        self._kinds, left_out = self._choose(notes)
        self._pictures = {
            name: PictureField(name, _Pictures(self, name), how)
            for name, kind in self._kinds.items()
            if kind.kind == "picture"
        }
        self.has_pictures = bool(self._pictures)
        self.fields: Mapping[str, Field] = {
            name: self._pictures[name].field if name in self._pictures else kind.field
            for name, kind in self._kinds.items()
        }
        self.warnings = warnings + left_out

    def read_each(self, start: int, stop: int, on_bad: OnBad) -> tuple[Columns, Numbers]:
        """Samples [start, stop)."""
        columns, bad = self._rows(start, stop)
        fields = {name: picture.field for name, picture in self._pictures.items()}

        def make(sample: int) -> Values:
            if sample in bad:
                raise bad[sample]
            values: dict[str, Any] = {}
            for name, picture in self._pictures.items():
                values |= picture.decode(_row_bytes(columns[name], sample - start), self.where(sample, name))
            return values

        if fields or bad:
            pictures, good = make_samples(fields, make, start, stop, on_bad)
        else:
            pictures, good = {}, np.arange(start, stop)
        plain = {name: rows for name, rows in columns.items() if name not in fields}
        made = {**picked(plain, good - start), **pictures}
        return {name: made[name] for name in self.fields}, good

    def num_values(self, name: str) -> int:
        """Values of a ragged field over all samples, estimated from the first row group that has rows."""
        first = self._blocks.get(self._group_of(0)).columns[name]
        return len(first.values) * self.num_samples // len(first) if isinstance(first, Ragged) else 0

    def where(self, sample: int, name: str) -> str:
        """What messages call the value of a sample."""
        file = int(np.searchsorted(self._file_starts, sample, side="right")) - 1
        row = sample - int(self._file_starts[file])
        return f"{self._files[file].path}: row {row} (from 0), column {name!r}"

    def value(self, sample: int, name: str) -> bytes:
        """The bytes of a picture; raises `DataError` where there are none."""
        columns, bad = self._rows(sample, sample + 1)
        if sample in bad:
            raise bad[sample]
        return _row_bytes(columns[name], 0)

    def _group_of(self, sample: int) -> int:
        return int(np.searchsorted(self._starts, sample, side="right")) - 1

    def _rows(self, start: int, stop: int) -> tuple[dict[str, Rows], dict[int, DataError]]:
        """Samples [start, stop) as they are stored, and those that make none."""
        parts: list[dict[str, Rows]] = []
        bad: dict[int, DataError] = {}
        for group in range(self._group_of(start), self._group_of(stop - 1) + 1):
            block, first = self._blocks.get(group), int(self._starts[group])
            begin, end = max(0, start - first), min(stop - first, int(self._starts[group + 1]) - first)
            parts.append({name: cut(rows, begin, end) for name, rows in block.columns.items()})
            for row, (name, why) in block.bad.items():
                if begin <= row < end:
                    where = self.where(first + row, name)
                    bad[first + row] = DataError(f"{where}: {why}; fill it in, or remove the row")
        return {name: joined([part[name] for part in parts]) for name in self._kinds}, bad

    def _load(self, number: int) -> _Block:
        from hpctrain.h5.parquet_columns import rows_of

        file, group = self._groups[number]
        table = self._files[file].read(group, list(self._kinds))
        columns: dict[str, Rows] = {}
        bad: dict[int, tuple[str, str]] = {}
        for name, kind in self._kinds.items():
            columns[name], found = rows_of(kind, table.column(name))
            bad |= {row: (name, why) for row, why in found.items()}
        return _Block(columns, bad)

    def _choose(self, notes: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What the columns become, and warnings about those that are left out."""
        from hpctrain.h5.parquet_columns import kind_of

        file, group = self._groups[self._group_of(0)]
        table = self._files[file].read(group)
        path = self._files[file].path
        kinds, refused = {}, []
        for name in dict.fromkeys(table.column_names):
            try:
                if table.column_names.count(name) > 1:
                    raise UnpackableError(f"several columns are called {name!r}; rename them")
                if not is_field_name(name):
                    raise UnpackableError(f"column {name!r} has a name that fields cannot have")
                kinds[name] = kind_of(name, table.column(name), _is_image(notes, name))
            except UnpackableError as error:
                refused.append(str(error))
        if not kinds:
            raise DataError(f"{path}: no column can be packed: {refused[0] if refused else 'it has none'}")
        return kinds, tuple(f"{path}: left out: {reason}" for reason in refused)

    def _check_memory(self) -> None:
        largest, path = max(
            (self._files[file].group_bytes(group), self._files[file].path) for file, group in self._groups
        )
        bound = int(_MEMORY_SHARE * psutil.virtual_memory().available / _GROUPS_AT_ONCE)
        if largest > bound:
            raise DataError(
                f"{path}: a row group of {largest} bytes, but the bound is {bound} ({_GROUPS_AT_ONCE} of them in half "
                "of the free memory); write the file again with a smaller row_group_size"
            )


class _Pictures:
    """The pictures of one column."""

    def __init__(self, source: ParquetSource, name: str) -> None:
        self._source, self._name = source, name

    def __len__(self) -> int:
        return self._source.num_samples

    def name(self, number: int) -> str:
        return self._source.where(number, self._name)

    def load(self, number: int) -> bytes:
        return self._source.value(number, self._name)

    def num_bytes(self) -> int:
        return self._source.num_values(self._name)


def _row_bytes(rows: Rows, row: int) -> bytes:
    return rows.row(row).tobytes() if isinstance(rows, Ragged) else rows[row].tobytes()


def _size_of(block: _Block) -> int:
    rows = block.columns.values()
    return sum(item.values.nbytes if isinstance(item, Ragged) else item.nbytes for item in rows)


def _notes(metadata: Mapping[bytes, bytes] | None) -> Mapping[str, Any]:
    """What `datasets` says of the columns; nothing where it says nothing, or what cannot be read."""
    try:
        found = json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_image(notes: Mapping[str, Any], name: str) -> bool:
    note = notes.get(name)
    return isinstance(note, dict) and note.get("_type") == "Image"


def _classes(notes: Mapping[str, Any]) -> tuple[str, ...] | None:
    note = notes.get("label")
    names = note.get("names") if isinstance(note, dict) else None
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        return tuple(names)
    return None
