"""Zarr stores (versions 2 and 3, in a folder) as a source: arrays as fields of samples, by the rules for HDF5 datasets.

Axis 0 counts the samples; a 1-D array NAME beside NAME_offsets is a ragged field, and strings are UTF-8. The package
`zarr` reads them, in blocks of whole chunks that are kept for a while. Zarr has no word for a chunk that is lost: one
without a file is the fill value, so that the source warns when there are such.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.blocks import BlockCache, Rows, joined
from hpctrain.h5.fields import Field
from hpctrain.h5.hdf5_fields import Wanted, fields_among
from hpctrain.h5.optional import needed
from hpctrain.h5.options import SourceOptions
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import Columns, UnpackableError, checked_offsets, common_length, field_of

_BLOCK_BYTES: Final = 1 << 20
_KEPT_BYTES: Final = 256 << 20
_SAMPLED_ROWS: Final = 512
_MEND: Final = "write the store again"


def open_zarr(path: Path, how: SourceOptions) -> ZarrSource:
    """A Zarr store, or one array of it: the field `data`.

    Raises `UsageError` where the package is missing, `DataError`, naming store and array, for what cannot be read or
    packed.
    """
    arrays, told = _arrays_in(path)
    if "" in arrays:
        arrays = {"data": arrays[""]}
    listed = {name: _Listed(array.shape, array.nbytes) for name, array in arrays.items()}
    if not any(item.shape and item.shape[0] for item in listed.values()):
        raise DataError(f"{path}: the store has no array with rows to pack; choose another")
    wanted, left_out = fields_among(path, how.fields, listed)
    for item in wanted.values():
        if item.path not in arrays:
            raise DataError(
                f"{path}: has no array {item.path!r} (found: {', '.join(sorted(arrays))}); name another"
            )
    return ZarrSource(path, arrays, wanted, (*told, *left_out), lenient=not how.fields)


@dataclass(frozen=True)
class _Listed:
    shape: tuple[int, ...]
    raw_bytes: int


class ZarrSource:
    """Fields that `hdf5_fields.fields_among` found among the arrays of a store.

    With `lenient`, those whose type or shape cannot be packed are left out with a warning, if others are left.
    """

    def __init__(
        self,
        path: Path,
        arrays: Mapping[str, Any],
        wanted: Mapping[str, Wanted],
        told: tuple[str, ...] = (),
        lenient: bool = False,
    ) -> None:
        self.classes: tuple[str, ...] | None = None
        blocks: _Blocks = BlockCache(_load, lambda block: block.nbytes, _KEPT_BYTES)
        self._parts: dict[str, _Dense | _Flat | _Text] = {}
        refused: list[UnpackableError] = []
        for name, item in wanted.items():
            try:
                self._parts[name] = _open_part(path, name, arrays, item, blocks)
            except UnpackableError as error:
                refused.append(error)
        if refused and (not lenient or not self._parts):
            raise refused[0]
        self.warnings = (
            *told,
            *(f"left out: {error}" for error in refused),
            *_holes(path, {wanted[name].path: arrays[wanted[name].path] for name in self._parts}),
        )
        self.fields: dict[str, Field] = {name: part.field for name, part in self._parts.items()}
        self.num_samples = common_length(
            {f"{path}: {wanted[n].path}": p.num_rows for n, p in self._parts.items()}
        )

    def read(self, start: int, stop: int) -> Columns:
        """Samples [start, stop); raises `DataError` for a chunk that does not decode."""
        return {name: part.read(start, stop) for name, part in self._parts.items()}

    def num_values(self, name: str) -> int:
        """Values of a ragged field over all samples; of strings an estimate from the first."""
        return self._parts[name].num_values


class _Array:
    """One array of a store, in blocks of whole chunks."""

    def __init__(self, path: Path, name: str, array: Any, blocks: _Blocks) -> None:
        self.where = f"{path}: array {name!r}"
        self.array, self._blocks = array, blocks
        self.num_rows = int(array.shape[0]) if array.shape else 0
        row_bytes = max(1, math.prod(array.shape[1:]) * array.dtype.itemsize)
        chunk_rows = max(1, (array.shards or array.chunks or (1,))[0])
        self.block_rows = chunk_rows * max(1, _BLOCK_BYTES // (chunk_rows * row_bytes))
        _refuse_pickles(self.where, array)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows [start, stop)."""
        rows = self.block_rows
        parts: list[Rows] = [
            self._blocks.get((self, number))[max(0, start - number * rows) : stop - number * rows]
            for number in range(start // rows, -(-stop // rows))
        ]
        return np.asarray(joined(parts)) if parts else self.load(start, start)

    def load(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows [start, stop), decoded anew."""
        rows: npt.NDArray[Any] = _reading(
            f"{self.where}, rows {start} to {stop}", lambda: np.asarray(self.array[start:stop])
        )
        return rows


_Blocks = BlockCache[tuple[_Array, int], npt.NDArray[Any]]


def _load(key: tuple[_Array, int]) -> npt.NDArray[Any]:
    array, number = key
    return array.load(number * array.block_rows, min((number + 1) * array.block_rows, array.num_rows))


class _Dense:
    """An array per sample."""

    num_values = 0

    def __init__(self, name: str, array: _Array) -> None:
        self.field = field_of(name, array.array.dtype, tuple(array.array.shape), array.where)
        self.num_rows, self._array = array.num_rows, array

    def read(self, start: int, stop: int) -> Rows:
        return np.ascontiguousarray(self._array.read(start, stop), self.field.dtype)


class _Flat:
    """Values and offsets."""

    def __init__(self, name: str, values: _Array, offsets: _Array) -> None:
        self._offsets = checked_offsets(
            values.where, offsets.load(0, offsets.num_rows), tuple(values.array.shape)
        )
        self.field = field_of(name, values.array.dtype, None, values.where)
        self.num_rows, self.num_values = len(self._offsets) - 1, int(self._offsets[-1])
        self._values = values

    def read(self, start: int, stop: int) -> Rows:
        offsets = self._offsets[start : stop + 1]
        values = self._values.read(int(offsets[0]), int(offsets[-1]))
        return Ragged(values.astype(self.field.dtype, copy=False), offsets - offsets[0])


class _Text:
    """A string per sample."""

    def __init__(self, name: str, array: _Array) -> None:
        if len(array.array.shape) != 1:
            raise UnpackableError(
                f"{array.where} has strings of shape {array.array.shape}; they need one axis"
            )
        self.field = field_of(name, np.dtype(np.uint8), None, array.where)
        self.num_rows, self._array = array.num_rows, array
        sampled = self.read(0, min(self.num_rows, _SAMPLED_ROWS))
        self.num_values = len(sampled.values) * self.num_rows // max(len(sampled), 1)

    def read(self, start: int, stop: int) -> Ragged:
        rows = self._array.read(start, stop).tolist()
        return Ragged.from_rows(
            (np.frombuffer(row if isinstance(row, bytes) else str(row).encode(), np.uint8) for row in rows),
            np.uint8,
        )


def _open_part(
    path: Path, name: str, arrays: Mapping[str, Any], wanted: Wanted, blocks: _Blocks
) -> _Dense | _Flat | _Text:
    array = _Array(path, wanted.path, arrays[wanted.path], blocks)
    if wanted.offsets:
        return _Flat(name, array, _Array(path, wanted.offsets, arrays[wanted.offsets], blocks))
    if array.array.dtype.kind in "OSTU":
        return _Text(name, array)
    return _Dense(name, array)


def _arrays_in(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arrays of a store by path, those of groups in it too; "" is the store itself where it is one array.

    And what `zarr` warns of: what it does not take for a part of the store.
    """
    zarr = needed("zarr", path)

    def find() -> dict[str, Any]:
        node = zarr.open(store=str(path), mode="r")
        if isinstance(node, zarr.Array):
            return {"": node}
        return {name: item for name, item in node.members(max_depth=None) if isinstance(item, zarr.Array)}

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found: dict[str, Any] = _reading(str(path), find)
    return found, tuple(dict.fromkeys(f"{path}: {item.message}" for item in told))


def _refuse_pickles(where: str, array: Any) -> None:
    """Some codecs of version 2 run what is stored."""
    metadata = array.metadata
    codecs = [*(getattr(metadata, "filters", None) or ()), getattr(metadata, "compressor", None)]
    names = [str(getattr(codec, "codec_id", "")) for codec in codecs]
    if any("pickle" in name for name in names):
        raise DataError(
            f"{where}: is stored with pickle, which runs code when it is read; {_MEND} with another codec"
        )


def _holes(path: Path, arrays: Mapping[str, Any]) -> list[str]:
    holes = []
    for name, array in arrays.items():
        stored = _reading(f"{path}: array {name!r}", partial(getattr, array, "nchunks_initialized"))
        missing = array.nchunks - stored
        if missing:
            holes.append(
                f"{path}: array {name!r}: {missing} of {array.nchunks} chunks have no file and are read as the fill "
                f"value {array.fill_value}; see that none was lost"
            )
    return holes


def _reading(where: str, read: Callable[[], Any]) -> Any:
    """What `read` gives; raises `DataError` for what does not decode, `StorageError` when the filesystem fails."""
    try:
        return read()
    except Exception as error:  # every codec raises what its library does
        if isinstance(error, OSError) and error.errno and not isinstance(error, FileNotFoundError):
            raise StorageError(f"{where}: cannot be read: {error.strerror}; check the filesystem") from error
        raise DataError(f"{where}: cannot be read by zarr: {error}; {_MEND}") from error
