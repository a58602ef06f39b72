"""Samples that are made one by one, so that one that cannot be made is told, and need not end the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError
from hpctrain.h5.blocks import Rows
from hpctrain.h5.fields import Field
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import Columns

OnBad = Callable[[int, DataError], None]
"""Called with the number of a sample that cannot be made, and why."""

Numbers = npt.NDArray[np.int64]
Values = Mapping[str, npt.NDArray[Any]]
"""One sample: an array by field."""


class OtherShapeError(DataError):
    """A sample is good, but of another shape than the rest: the options are wrong, not the sample."""


class SourceChangedError(DataError):
    """The source is another than the one that was opened: no sample of it is to blame, and none may be dropped."""


class EachSource(ABC):
    """Base of sources that have `read_each`."""

    @abstractmethod
    def read_each(self, start: int, stop: int, on_bad: OnBad) -> tuple[Columns, Numbers]:
        """The good samples of [start, stop), and their numbers, shape (good,); `on_bad` is told of each of the others.

        Called from several threads at once. Raises what `on_bad` raises, `StorageError` when reading fails, and
        `OtherShapeError` and `SourceChangedError`.
        """

    def read(self, start: int, stop: int) -> Columns:
        """Samples [start, stop) of every field; raises `DataError` for the first that cannot be made."""
        return self.read_each(start, stop, _refuse)[0]


def _refuse(sample: int, error: DataError) -> None:
    raise error


def make_samples(
    fields: Mapping[str, Field], make: Callable[[int], Values], start: int, stop: int, on_bad: OnBad
) -> tuple[Columns, Numbers]:
    """What `make` gives for each of the samples [start, stop), as `EachSource.read_each` returns it."""
    buffers = {name: _RowBuffer(field, stop - start) for name, field in fields.items()}
    good: list[int] = []
    for sample in range(start, stop):
        try:
            values = make(sample)
        except (OtherShapeError, SourceChangedError):
            raise
        except DataError as error:
            on_bad(sample, error)
            continue
        good.append(sample)
        for name, buffer in buffers.items():
            buffer.add(values[name])
    return {name: buffer.rows() for name, buffer in buffers.items()}, np.array(good, np.int64)


def picked(columns: Columns, rows: Numbers) -> Columns:
    """These rows, numbered from 0 and ascending, of each column."""
    return {
        name: column if len(column) == len(rows) else _pick(column, rows) for name, column in columns.items()
    }


def _pick(column: Rows, rows: Numbers) -> Rows:
    return column.take(rows) if isinstance(column, Ragged) else column[rows]


class _RowBuffer:
    """Rows of one field, added one by one; dense ones are not held twice."""

    def __init__(self, field: Field, num_rows: int) -> None:
        self._field = field
        self._rows: list[npt.NDArray[Any]] = []
        self._count = 0
        if field.kind == "dense":
            self._dense = np.empty((num_rows, *field.sample_shape), field.dtype)

    def add(self, row: npt.NDArray[Any]) -> None:
        if self._field.kind == "dense":
            self._dense[self._count] = row
        else:
            self._rows.append(row)
        self._count += 1

    def rows(self) -> Rows:
        if self._field.kind == "dense":
            return self._dense[: self._count]
        return Ragged.from_rows(self._rows, self._field.dtype)
