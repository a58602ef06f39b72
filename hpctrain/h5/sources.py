"""What can be packed: `Source`, and arrays as one; which kind of source a path is says `opening`.

A source knows its fields and how many samples it has, and reads any range of them; it is read from several
threads. Pictures are in `images`, tables of pictures and text in `tables`, archives of arrays in `npz`, HDF5 files in
`hdf5_source`, packed sets in `packed_source`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.fields import OFFSETS_SUFFIX, Field
from hpctrain.h5.ragged import Ragged

Columns = dict[str, npt.NDArray[Any] | Ragged]

_FIELD_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
RAGGED_TYPES: Final = tuple(map(np.dtype, (np.uint8, np.uint16, np.int32, np.int64)))
_RESERVED: Final = "id"  # batches carry the global sample ids under this name


class UnpackableError(DataError):
    """Samples of a type or shape that cannot be packed."""


class Source(Protocol):
    """Samples to pack, in a fixed order."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The fields, in the order in which they are stored."""
        ...

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes that `label` numbers; None where it numbers none."""
        ...

    @property
    def num_samples(self) -> int:
        """How many samples there are."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know, such as files that were left out."""
        ...

    def read(self, start: int, stop: int) -> Columns:
        """Samples [start, stop) of every field; called from several threads at once."""
        ...

    def num_values(self, name: str) -> int:
        """Values of a ragged field over all samples; may be an estimate, the layout depends on it."""
        ...


class ArraySource:
    """Arrays, in memory or memory-mapped: dense ones of equal first dimension, and `Ragged` ones.

    Raises `DataError` for lengths that differ and for types that cannot be packed, `UsageError` for names
    that cannot be fields.
    """

    def __init__(
        self,
        arrays: Mapping[str, npt.NDArray[Any] | Ragged],
        classes: Sequence[str] | None = None,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self._arrays = dict(arrays)
        self.classes = None if classes is None else tuple(classes)
        self.warnings = warnings
        self.fields = {
            name: field_of(name, array.values.dtype, None)
            if isinstance(array, Ragged)
            else field_of(name, array.dtype, array.shape)
            for name, array in arrays.items()
        }
        self.num_samples = common_length({name: len(array) for name, array in arrays.items()})

    def read(self, start: int, stop: int) -> Columns:
        """Samples [start, stop); dense ones as little-endian copies."""
        return {
            name: array.take(slice(start, stop))
            if isinstance(array, Ragged)
            else np.ascontiguousarray(array[start:stop], self.fields[name].dtype)
            for name, array in self._arrays.items()
        }

    def num_values(self, name: str) -> int:
        """Values of a ragged field over all samples."""
        array = self._arrays[name]
        return len(array.values) if isinstance(array, Ragged) else 0


def paired(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any] | Ragged]:
    """Arrays NAME and NAME_offsets, both 1-D, as one ragged field NAME; the others as they are.

    Raises `DataError` for offsets that do not fit the values.
    """
    result: dict[str, npt.NDArray[Any] | Ragged] = {}
    for name, array in arrays.items():
        offsets = arrays.get(name + OFFSETS_SUFFIX)
        if offsets is not None:
            result[name] = Ragged(array, checked_offsets(repr(name), offsets, array.shape))
        elif name.removesuffix(OFFSETS_SUFFIX) not in arrays or not name.endswith(OFFSETS_SUFFIX):
            result[name] = array
    return result


def checked_offsets(
    where: str, offsets: npt.NDArray[Any], values_shape: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """Offsets of rows in values of that shape, as int64; raises `DataError`, naming `where`, when they do not fit."""
    if offsets.ndim != 1 or len(offsets) == 0 or offsets.dtype.kind not in "ui" or len(values_shape) != 1:
        raise DataError(
            f"{where} has shape {values_shape}, and its offsets {offsets.shape} of {offsets.dtype}; "
            "a ragged field needs 1-D values and one offset more than it has rows"
        )
    checked = np.asarray(offsets, np.int64)
    if checked[0] != 0 or checked[-1] != values_shape[0] or np.any(np.diff(checked) < 0):
        raise DataError(
            f"{where}: its offsets go from {checked[0]} to {checked[-1]}; they must ascend from 0 to the "
            f"{values_shape[0]} values there are"
        )
    return checked


def is_field_name(name: str) -> bool:
    """Whether a field can have this name."""
    return bool(_FIELD_NAME.fullmatch(name)) and not name.endswith(OFFSETS_SUFFIX) and name != _RESERVED


def check_field_name(name: str) -> None:
    """Raise `UsageError` for a name that cannot be a field."""
    if not is_field_name(name):
        raise UsageError(
            f"{name!r} cannot name a field: a letter, then up to 63 letters, digits, '_', '.' or '-'; "
            f"not ending in {OFFSETS_SUFFIX!r}, and not {_RESERVED!r}, which numbers the samples; rename it"
        )


def field_of(name: str, found: np.dtype[Any], shape: tuple[int, ...] | None, where: str = "") -> Field:
    """The field that an array of samples makes; of rows of any length where `shape` is None.

    Raises `UnpackableError` for types and shapes that cannot be packed, `UsageError` for a name that cannot be a field;
    `where` says where the array is, if not in a field of that name.
    """
    check_field_name(name)
    what = where or f"field {name!r}"
    if shape is None:
        if found.newbyteorder("=") not in RAGGED_TYPES:
            names = ", ".join(item.name for item in RAGGED_TYPES)
            raise UnpackableError(f"{what} has rows of any length and type {found}; they can be {names}")
        return Field(name, "ragged", found.newbyteorder("<"), ())
    dtype = np.dtype(np.uint8) if found == np.bool_ else found.newbyteorder("<")
    if dtype.kind not in "uif" or dtype.itemsize > 8:
        raise UnpackableError(
            f"{what} has type {found}; only booleans, integers and floats of at most 64 bits can be packed"
        )
    if not shape or 0 in shape[1:]:
        raise UnpackableError(
            f"{what} has shape {shape}; it needs a first dimension of samples, and none of 0"
        )
    return Field(name, "dense", dtype, shape[1:])


def common_length(lengths: Mapping[str, int]) -> int:
    """The length that all have, by name; raises `DataError` naming two that differ."""
    first = next(iter(lengths), "")
    for name, length in lengths.items():
        if length != lengths[first]:
            raise DataError(
                f"{first!r} has {lengths[first]} samples but {name!r} has {length}; "
                "all fields need the same first dimension"
            )
    return lengths.get(first, 0)
