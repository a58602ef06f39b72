"""HDF5 files as a source: datasets of one file, or of several one after the other, as fields of samples.

Axis 0 counts the samples. A 1-D dataset NAME beside NAME_offsets (as packed sets keep them) is a ragged field, and so
are vlen data and strings: unsigned bytes, integers or UTF-8. What is read in parallel and why not the rest is the
matter of `hpctrain.h5.dataset`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import h5py
import numpy as np

from hpctrain.errors import DataError
from hpctrain.h5.blocks import CachedRows, RowBlocks, Rows, joined, row_blocks
from hpctrain.h5.chunks import FileSource
from hpctrain.h5.dataset import Dataset, open_dataset
from hpctrain.h5.fields import Field
from hpctrain.h5.hdf5_fields import Wanted
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import (
    RAGGED_TYPES,
    Columns,
    UnpackableError,
    checked_offsets,
    common_length,
    field_of,
)

_BLOCK_BYTES: Final = 1 << 20
_KEPT_BYTES: Final = 256 << 20
_VLEN_BLOCK_ROWS: Final = 64  # nobody knows how long they are
_SAMPLED_ROWS: Final = 512


class _Part(Protocol):
    """One field in one file."""

    @property
    def field(self) -> Field: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def num_values(self) -> int: ...

    def read(self, start: int, stop: int) -> Rows: ...


class Hdf5Source:
    """Fields that `hdf5_fields.choose_fields` found, in files of equal structure.

    With `lenient`, those whose type or shape cannot be packed are left out with a warning, if others are left. Raises
    `DataError`, naming file and dataset, for what cannot be read, cannot be packed, or differs between files or in
    length between fields.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        wanted: Mapping[str, Wanted],
        warnings: tuple[str, ...] = (),
        lenient: bool = False,
    ) -> None:
        self.classes: tuple[str, ...] | None = None
        source = FileSource()
        refused = _unpackable(paths[0], wanted, source) if lenient else {}
        if len(refused) < len(wanted):
            wanted = {name: item for name, item in wanted.items() if name not in refused}
            warnings += tuple(f"left out: {reason}" for reason in refused.values())
        self.warnings = warnings
        self._parts = {name: _open_parts(paths, name, item, source) for name, item in wanted.items()}
        for number, path in enumerate(paths):
            common_length({f"{path}: {wanted[n].path}": p[number].num_rows for n, p in self._parts.items()})
        self.fields = {name: _same_field(paths, parts) for name, parts in self._parts.items()}
        first = next(iter(self._parts.values()), [])
        self._starts = np.concatenate([[0], np.cumsum([part.num_rows for part in first])]).astype(np.int64)
        self.num_samples = int(self._starts[-1])

    def read(self, start: int, stop: int) -> Columns:
        """Samples [start, stop); errors as for `Dataset.read_rows`."""
        return {name: self._read(name, start, stop) for name in self.fields}

    def num_values(self, name: str) -> int:
        """Values of a ragged field over all samples; of vlen data an estimate from the first rows of each file."""
        return sum(part.num_values for part in self._parts[name])

    def _read(self, name: str, start: int, stop: int) -> Rows:
        rows = []
        for part, first, last in zip(self._parts[name], self._starts, self._starts[1:], strict=False):
            begin, end = max(start, int(first)), min(stop, int(last))
            if begin < end:
                rows.append(part.read(begin - int(first), end - int(first)))
        values = joined(rows)
        if isinstance(values, Ragged):
            return values
        return np.ascontiguousarray(values, self.fields[name].dtype)


def _unpackable(path: Path, wanted: Mapping[str, Wanted], source: FileSource) -> dict[str, str]:
    """Why some of the fields cannot be packed."""
    reasons = {}
    for name, item in wanted.items():
        try:
            _open_parts([path], name, item, source)
        except UnpackableError as error:
            reasons[name] = str(error)
    return reasons


def _open_parts(paths: Sequence[Path], name: str, wanted: Wanted, source: FileSource) -> list[_Part]:
    """A field in all files, with one cache for them: what is kept does not grow with their number."""
    blocks = row_blocks(_KEPT_BYTES)
    return [_open_part(path, name, wanted, source, blocks) for path in paths]


def _open_part(path: Path, name: str, wanted: Wanted, source: FileSource, blocks: RowBlocks) -> _Part:
    dataset = open_dataset(path, wanted.path)
    if wanted.offsets:
        return _Flat(name, dataset, open_dataset(path, wanted.offsets), source, blocks)
    if dataset.dtype.hasobject or dataset.dtype.kind == "S":
        return _Vlen(name, dataset, source, blocks)
    return _Dense(name, dataset, source, blocks)


def _same_field(paths: Sequence[Path], parts: Sequence[_Part]) -> Field:
    first = parts[0].field
    for path, part in zip(paths, parts, strict=True):
        if part.field != first:
            raise DataError(
                f"field {first.name!r} is {first.dtype} of {first.sample_shape} in {paths[0]}, but {part.field.dtype} "
                f"of {part.field.sample_shape} in {path}; pack the files apart"
            )
    return first


def _block_rows(dataset: Dataset) -> int:
    """Whole chunks of about 1 MiB."""
    row_bytes = max(1, math.prod(dataset.shape[1:]) * dataset.dtype.itemsize)
    chunk_rows = 1 if dataset.index is None else dataset.index.chunk_shape[0]
    return chunk_rows * max(1, _BLOCK_BYTES // (chunk_rows * row_bytes))


class _Dense:
    """An array per sample."""

    num_values = 0

    def __init__(self, name: str, dataset: Dataset, source: FileSource, blocks: RowBlocks) -> None:
        self.field = field_of(name, dataset.dtype, dataset.shape, f"{dataset.path}: dataset {dataset.name!r}")
        self.num_rows = dataset.num_rows
        self._rows = CachedRows(dataset, source, blocks, _block_rows(dataset))

    def read(self, start: int, stop: int) -> Rows:
        return self._rows.read(start, stop)


class _Flat:
    """Values and offsets."""

    def __init__(
        self, name: str, values: Dataset, offsets: Dataset, source: FileSource, blocks: RowBlocks
    ) -> None:
        where = f"{values.path}: dataset {values.name!r}"
        self._offsets = checked_offsets(where, offsets.read_rows(0, offsets.num_rows, source), values.shape)
        self.field = field_of(name, values.dtype, None, where)
        self.num_rows, self.num_values = len(self._offsets) - 1, int(self._offsets[-1])
        self._values = CachedRows(values, source, blocks, _block_rows(values))

    def read(self, start: int, stop: int) -> Rows:
        offsets = self._offsets[start : stop + 1]
        values = self._values.read(int(offsets[0]), int(offsets[-1]))
        return Ragged(values.astype(self.field.dtype, copy=False), offsets - offsets[0])


class _Vlen:
    """Arrays or strings of any length, which libhdf5 keeps in heaps, and strings of a fixed length."""

    def __init__(self, name: str, dataset: Dataset, source: FileSource, blocks: RowBlocks) -> None:
        where = f"{dataset.path}: dataset {dataset.name!r}"
        element = _element_type(dataset.dtype, where)
        if len(dataset.shape) != 1:
            raise UnpackableError(
                f"{where} has shape {dataset.shape}; rows of any length need one axis, of samples"
            )
        self.field = field_of(name, element, None, where)
        self.num_rows = dataset.num_rows
        self._text = dataset.dtype.kind == "S" or h5py.check_string_dtype(dataset.dtype) is not None
        self._rows = CachedRows(dataset, source, blocks, _VLEN_BLOCK_ROWS)
        sampled = min(self.num_rows, _SAMPLED_ROWS)
        lengths = len(self._ragged(0, sampled).values)
        self.num_values = lengths * self.num_rows // max(sampled, 1)

    def read(self, start: int, stop: int) -> Rows:
        return self._ragged(start, stop)

    def _ragged(self, start: int, stop: int) -> Ragged:
        rows = self._rows.read(start, stop)
        if self._text:
            rows = [np.frombuffer(_as_bytes(row), np.uint8) for row in rows]  # type: ignore[assignment]
        return Ragged.from_rows(rows, self.field.dtype)


def _as_bytes(row: bytes | str) -> bytes:
    return row.encode() if isinstance(row, str) else row


def _element_type(dtype: np.dtype[Any], where: str) -> np.dtype[Any]:
    """Type of the values of a vlen row, widened to one that can be packed."""
    if dtype.kind == "S" or h5py.check_string_dtype(dtype) is not None:
        return np.dtype(np.uint8)
    base = h5py.check_vlen_dtype(dtype)
    if base is None or np.dtype(base).kind not in "ui" or np.dtype(base) == np.uint64:
        raise UnpackableError(
            f"{where} holds {base or dtype}, which cannot be packed; name others with --field"
        )
    native: np.dtype[Any] = np.dtype(base).newbyteorder("=")
    if native in RAGGED_TYPES:
        return native
    return np.dtype(np.int64 if native == np.uint32 else np.int32)
