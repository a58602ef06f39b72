"""Columns of Parquet files as fields: what an Arrow type becomes, and the values without Python objects per row.

Numbers and booleans are dense, lists of a fixed size too; lists of whole numbers, and strings (UTF-8), are ragged. A
list of floats is dense: all have the length of the first. Pictures are bytes here, decoded later. Nothing may be null:
rows that are, or hold one, are told apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hpctrain.h5.blocks import Rows
from hpctrain.h5.fields import Field
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import UnpackableError, field_of

_PICTURES: Final = frozenset({"image", "img"})
_NULL: Final = "is null, or holds a null"
_WIDENED: Final[Mapping[Any, Any]] = {pa.int8(): pa.int32(), pa.int16(): pa.int32(), pa.uint32(): pa.int64()}

Bad = dict[int, str]
"""Rows that make no sample, and why."""


@dataclass(frozen=True)
class ColumnKind:
    """What a column becomes. `field` of a picture: its bytes. `length`: of each list, where it is the first's."""

    kind: Literal["number", "fixed", "floats", "ragged", "bytes", "picture"]
    field: Field
    arrow: Any
    length: int = 0


def kind_of(name: str, column: pa.ChunkedArray, is_picture: bool) -> ColumnKind:
    """How a column is packed, by its type, and by the first rows where that does not say all.

    `is_picture`: the file says that it holds pictures. Raises `UnpackableError` for a type that cannot be packed.
    """
    arrow, where = _plain(column.type), f"column {name!r}"
    picture = _is_picture(name, arrow, is_picture)
    if picture or _is_bytes(arrow):
        byte = Field(name, "ragged", np.dtype(np.uint8), ())
        return ColumnKind("picture" if picture else "bytes", byte, arrow)
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
        return _list_kind(name, column, arrow, where)
    shape: tuple[int, ...] = (1,)
    element = arrow
    while pa.types.is_fixed_size_list(element):
        shape, element = (*shape, element.list_size), element.value_type
    field = field_of(name, _numpy_type(element, where), shape, where)
    return ColumnKind("number" if len(shape) == 1 else "fixed", field, arrow)


def rows_of(kind: ColumnKind, column: pa.ChunkedArray) -> tuple[Rows, Bad]:
    """The rows of a column, and those of them that are bad and have arbitrary values."""
    if column.type != kind.arrow:
        column = column.cast(kind.arrow)  # a dictionary of values
    if kind.kind == "number":
        array = column.combine_chunks()
        return _numbers(array).astype(kind.field.dtype, copy=False), _marked(_nulls(array), _NULL)
    if kind.kind == "fixed":
        return _fixed(kind, column.combine_chunks())
    if kind.kind in ("bytes", "picture"):
        return _bytes(column)
    return _lists(kind, column.cast(pa.large_list(kind.arrow.value_type)).combine_chunks())


def _plain(arrow: Any) -> Any:
    if pa.types.is_dictionary(arrow):
        return arrow.value_type
    return arrow.storage_type if isinstance(arrow, pa.BaseExtensionType) else arrow


def _is_bytes(arrow: Any) -> bool:
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return any(getattr(pa.types, f"is_{name}")(arrow) for name in names)


def _is_picture(name: str, arrow: Any, is_picture: bool) -> bool:
    if pa.types.is_struct(arrow):
        names = sorted(arrow.field(i).name for i in range(arrow.num_fields))
        return names == ["bytes", "path"] and _is_bytes(arrow.field("bytes").type)
    is_binary = pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow)
    return bool(is_binary and (is_picture or name in _PICTURES))


def _numpy_type(arrow: Any, where: str) -> np.dtype[Any]:
    if not (pa.types.is_boolean(arrow) or pa.types.is_integer(arrow) or pa.types.is_floating(arrow)):
        raise UnpackableError(
            f"{where} has type {arrow}; numbers, lists of them, strings and pictures can be packed"
        )
    dtype: np.dtype[Any] = np.dtype(arrow.to_pandas_dtype())
    return dtype


def _list_kind(name: str, column: pa.ChunkedArray, arrow: Any, where: str) -> ColumnKind:
    value = arrow.value_type
    if not pa.types.is_floating(value):
        wide = pa.list_(_WIDENED.get(value, value))
        return ColumnKind("ragged", field_of(name, _numpy_type(wide.value_type, where), None, where), wide)
    first = next((len(row) for row in column if row.is_valid), 0)
    field = field_of(name, _numpy_type(value, where), (1, first), where)
    return ColumnKind("floats", field, arrow, first)


def _nulls(array: Any) -> npt.NDArray[np.bool_] | None:
    return None if array.null_count == 0 else np.asarray(array.is_null())


def _marked(mask: Any, why: str) -> Bad:
    return {} if mask is None else dict.fromkeys(np.flatnonzero(mask).tolist(), why)


def _numbers(array: Any) -> npt.NDArray[Any]:
    """Values of a plain array; where it has nulls, arbitrary ones."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    values: npt.NDArray[Any] = (array.fill_null(0) if array.null_count else array).to_numpy(
        zero_copy_only=False
    )
    return values


def _fixed(kind: ColumnKind, array: Any) -> tuple[Rows, Bad]:
    num_rows, bad, width = len(array), _marked(_nulls(array), _NULL), 1
    for extent in kind.field.sample_shape:
        array = array.values.slice(array.offset * extent, len(array) * extent)
        width *= extent
        missing = _nulls(array)
        if missing is not None:
            bad |= _marked(missing.reshape(num_rows, width).any(axis=1), _NULL)
    rows = _numbers(array).astype(kind.field.dtype, copy=False)
    return rows.reshape(num_rows, *kind.field.sample_shape), bad


def _bytes(column: pa.ChunkedArray) -> tuple[Rows, Bad]:
    if pa.types.is_struct(column.type):
        missing = _nulls(column)
        inner = column.type.field("bytes").type
        rows, bad = _bytes(pa.chunked_array([part.field("bytes") for part in column.chunks], inner))
        return rows, bad | _marked(missing, _NULL)
    array = column.cast(pa.large_binary()).combine_chunks()
    offsets = np.frombuffer(array.buffers()[1] or bytes(8), np.int64)[array.offset :][: len(array) + 1]
    values = np.frombuffer(array.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    return Ragged(values, offsets - offsets[0]), _marked(_nulls(array), _NULL)


def _lists(kind: ColumnKind, array: Any) -> tuple[Rows, Bad]:
    offsets = np.asarray(array.offsets)
    child = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    bad = _marked(_nulls(array), _NULL)
    missing = _nulls(child)
    offsets = offsets - offsets[0]
    if missing is not None:
        holders = np.searchsorted(offsets, np.flatnonzero(missing), side="right") - 1
        bad |= dict.fromkeys(holders.tolist(), _NULL)
    values = _numbers(child).astype(kind.field.dtype, copy=False)
    if kind.kind == "ragged":
        return Ragged(values, offsets), bad
    differs = np.asarray(np.diff(offsets) != kind.length)
    bad = _marked(differs, f"does not have {kind.length} values as the first row has") | bad
    rows = np.zeros((len(array), kind.length), kind.field.dtype)
    rows[~differs] = values[offsets[:-1][~differs, None] + np.arange(kind.length)]
    return rows, bad
