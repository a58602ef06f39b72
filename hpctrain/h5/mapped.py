"""`--map module:function`: a source whose samples a function of the user makes from those of another.

    def features(sample):
        wave = sample["wave"]                      # a copy of one row (or number), in the type of the source
        if wave.std() == 0:
            return None                            # this sample is dropped
        text = bytes(sample["text"]).decode()      # rows of any length are 1-D arrays, text as UTF-8
        return {"power": np.abs(np.fft.rfft(wave)) ** 2, "text": text.lower(), "label": sample["label"]}

The function is called twice for each sample, in any order, from several threads and processes: its result must depend
on the sample alone. What the first sample gives decides names, types and shapes of the fields, and all must give the
same. Only a 1-D array of a type that ragged fields can have (uint8, uint16, int32, int64) may differ in length: where
it does in any two samples that are kept, the field is ragged, else it is dense of that length. Strings and bytes make
ragged fields in any case.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.each import EachSource, Numbers, OnBad
from hpctrain.h5.fields import Field
from hpctrain.h5.judging import read_each
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import RAGGED_TYPES, Columns, Source, field_of

Array = npt.NDArray[Any]
MapFunction = Callable[[dict[str, Any]], Any]


def load_function(name: str, folder: Path) -> MapFunction:
    """The function `module:function`, its module looked up in `folder` first.

    Raises `UsageError` saying what cannot be imported and why.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise UsageError(f"--map {name!r} is not module:function; write for example --map features:extract")
    if str(folder) not in sys.path[:1]:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(
            f"--map {name!r}: importing {module_name} failed: {type(error).__name__}: {error}; it was looked up in "
            f"{folder} and in the installed packages"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"--map {name!r}: {module.__name__} has no function of that name")
    return function  # type: ignore[no-any-return]  # callable of what, only calling it shows


class MappedSource(EachSource):
    """The samples of `base`, through `function`, which messages call `name`.

    Raises `DataError`, naming the sample, where the function fails or gives something else than for the first sample;
    `UnpackableError` or `UsageError` for results that cannot be fields.
    """

    def __init__(self, base: Source, function: MapFunction, name: str) -> None:
        self.base, self._function, self._name = base, function, name
        self._first, values = self._first_result()
        self._texts = {key for key, value in values.items() if isinstance(value, (str, bytes))}
        self.fields = {key: self._field(key, value) for key, value in values.items()}
        self.classes = base.classes if "label" in self.fields else None
        self.num_samples = base.num_samples
        self.warnings = base.warnings

    def settled(self, extents: Mapping[str, int]) -> MappedSource:
        """The same with dense fields in the place of ragged ones whose rows all have one length: those in `extents`."""
        result = copy.copy(self)
        result.fields = {
            key: dataclasses.replace(item, kind="dense", sample_shape=(extents[key],))
            if item.kind == "ragged" and key in extents and key not in self._texts
            else item
            for key, item in self.fields.items()
        }
        return result

    def read(self, start: int, stop: int) -> Columns:
        """Samples [start, stop), of which the function may drop none."""
        columns, samples = self.read_each(start, stop, _refuse)
        if len(samples) < stop - start:
            lost = min(set(range(start, stop)) - set(samples.tolist()))
            raise DataError(
                f"sample {lost}: {self._name} gave None, but something else when it was called before; what it gives "
                "must depend on the sample alone"
            )
        return columns

    def read_each(self, start: int, stop: int, on_bad: OnBad) -> tuple[Columns, Numbers]:
        """Those of the samples [start, stop) that can be read and are not dropped, and their numbers."""
        read, numbers = read_each(self.base, start, stop, on_bad)
        rows: dict[str, list[Array]] = {key: [] for key in self.fields}
        kept = []
        for row, number in enumerate(numbers.tolist()):
            values = self._call(read, row, number)
            if values is not None:
                self._append(rows, values, number)
                kept.append(number)
        columns: Columns = {
            key: Ragged.from_rows(rows[key], item.dtype)
            if item.kind == "ragged"
            else np.array(rows[key], item.dtype).reshape(-1, *item.sample_shape)
            for key, item in self.fields.items()
        }
        return columns, np.array(kept, np.int64)

    def num_values(self, name: str) -> int:
        """Not known before all samples are read."""
        return 0

    def _first_result(self) -> tuple[int, dict[str, Any]]:
        """The number of the first sample that can be read and is not dropped, and what it gives."""
        unreadable: DataError | None = None
        for number in range(self.base.num_samples):
            try:
                columns = self.base.read(number, number + 1)
            except DataError as error:
                unreadable = unreadable or error
                continue
            values = self._call(columns, 0, number)
            if values is not None:
                return number, values
        raise unreadable or DataError(
            f"there is nothing to pack: {self._name} gave None for all {self.base.num_samples} samples"
        )

    def _call(self, columns: Columns, row: int, number: int) -> dict[str, Any] | None:
        try:
            values = self._function({name: _row(rows, row) for name, rows in columns.items()})
        except Exception as error:
            raise DataError(
                f"sample {number}: {self._name} failed in {_user_line(self._function, error)}: {type(error).__name__}: "
                f"{error}; mend the function, or let it return None to drop the sample"
            ) from error
        if values is not None and not isinstance(values, dict):
            raise DataError(
                f"sample {number}: {self._name} gave {type(values).__name__}, but must give a dict of fields, or None "
                "to drop the sample"
            )
        return values

    def _field(self, key: str, value: object) -> Field:
        found = _array(value)
        ragged = found.ndim == 1 and found.dtype.newbyteorder("=") in RAGGED_TYPES
        where = f"what {self._name} gives as {key!r}"
        return field_of(key, found.dtype, None if ragged else (1, *found.shape), where)

    def _append(self, rows: dict[str, list[Array]], values: Mapping[str, object], number: int) -> None:
        if values.keys() != self.fields.keys():
            raise self._differs(number, f"the fields {', '.join(values)}", ", ".join(self.fields))
        for key, item in self.fields.items():
            value = _array(values[key])
            fits = value.ndim == 1 if item.kind == "ragged" else value.shape == item.sample_shape
            if not fits or value.dtype.newbyteorder("<") != item.dtype:
                wanted = "any length" if item.kind == "ragged" else f"shape {item.sample_shape}"
                given = f"{key!r} as {value.dtype} of shape {value.shape}"
                raise self._differs(number, given, f"{item.dtype} of {wanted}")
            rows[key].append(value)

    def _differs(self, number: int, given: str, wanted: str) -> DataError:
        names = ", ".join(item.name for item in RAGGED_TYPES)
        return DataError(
            f"sample {number}: {self._name} gave {given}, but {wanted} for sample {self._first}; all samples must give "
            f"the same, only 1-D arrays of {names} may differ in length"
        )


def _refuse(sample: int, error: DataError) -> None:
    raise error


def _row(rows: Array | Ragged, row: int) -> Array:
    """A copy of one row, which the function may change."""
    copied: Array = rows.row(row).copy() if isinstance(rows, Ragged) else rows[row].copy()
    return copied


def _array(value: object) -> Array:
    """What the function gave, as an array: text and bytes as uint8, booleans, too."""
    if isinstance(value, (str, bytes)):
        return np.frombuffer(value.encode() if isinstance(value, str) else value, np.uint8)
    array = np.asarray(value)
    return array.astype(np.uint8) if array.dtype == np.bool_ else array


def _user_line(function: MapFunction, error: Exception) -> str:
    """File and line in which the function failed: the last of its own module, or the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = getattr(getattr(function, "__code__", None), "co_filename", None)
    frame = next((each for each in reversed(frames) if each.filename == own), frames[-1])
    return f"{frame.filename}, line {frame.lineno}, {frame.name}"
