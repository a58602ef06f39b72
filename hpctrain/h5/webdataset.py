"""The parts of a WebDataset sample: what the bytes of a member become, by the end of its name.

A sample is the members whose names are equal up to the first dot after the last slash; what follows the dot says what
the part is (`.jpg` a picture, `.cls` a label, `.txt` text, `.json` numbers and strings by name, `.npy` an array). What
type a name in the JSON has, and what shape an array, is settled by some samples spread over all of them; a sample that
differs is bad. Nothing is unpickled.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.each import Values
from hpctrain.h5.fields import Field
from hpctrain.h5.images import IMAGE_SUFFIXES, PictureField, Pictures
from hpctrain.h5.npz import ARRAY_ERRORS
from hpctrain.h5.options import SourceOptions
from hpctrain.h5.sources import UnpackableError, field_of, is_field_name

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,18}")  # within int64
_MAX_SHOWN: Final = 80
_MAX_FLOAT: Final = 1 << 1023  # a whole number up to this is within float64
_SHARE: Final = 0.9  # of the samples looked at that must agree; the others are bad

Samples = Sequence[tuple[bytes, str]]
"""Content of members and what messages call them."""


class Part(Protocol):
    """What members of one ending become."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """What it gives, by name."""
        ...

    def decode(self, data: bytes, where: str) -> Values:
        """The values by field; raises `DataError`, naming `where`."""
        ...


class LabelPart:
    """A whole number in ASCII."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.fields = {name: Field(name, "dense", np.dtype("<i8"), ())}

    def decode(self, data: bytes, where: str) -> Values:
        """The number, shape ()."""
        text = data[:_MAX_SHOWN].decode("ascii", "replace").strip()
        if not _INTEGER.fullmatch(text):
            raise DataError(f"{where}: {text!r} is no whole number of a class; repair or remove the sample")
        return {self._name: np.array(int(text), np.int64)}


class TextPart:
    """UTF-8."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.fields = {name: Field(name, "ragged", np.dtype(np.uint8), ())}

    def decode(self, data: bytes, where: str) -> Values:
        """The bytes, after a look at whether they are UTF-8."""
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: is no text in UTF-8: {error}; repair or remove the sample") from error
        return {self._name: np.frombuffer(data, np.uint8)}


class ArrayPart:
    """An array as NumPy saves it: of one shape in all samples, or 1-D integers of any length."""

    def __init__(self, name: str, samples: Samples) -> None:
        self._name = name
        arrays = _good(samples, _load_array)
        what = f"{samples[0][1]}: the array"
        (shape, dtype), _ = Counter((array.shape, array.dtype) for array in arrays).most_common(1)[0]
        alike = [array for array in arrays if array.shape == shape]
        if len(alike) >= _SHARE * len(arrays):
            self._field = field_of(name, dtype, (len(samples), *shape), what)
        elif all(array.ndim == 1 for array in arrays):
            self._field = field_of(name, dtype, None, what)
        else:
            shapes = sorted({array.shape for array in arrays})
            raise DataError(
                f"{what} and those of others have shapes {shapes[0]} and {shapes[1]}; they need one shape, or one axis "
                "of whole numbers"
            )
        self.fields = {name: self._field}

    def decode(self, data: bytes, where: str) -> Values:
        """The array."""
        array, field = _load_array(data, where), self._field
        fits = array.ndim == 1 if field.kind == "ragged" else array.shape == field.sample_shape
        found = np.dtype(np.uint8) if array.dtype == np.bool_ else array.dtype.newbyteorder("<")
        if not fits or found != field.dtype:
            shape = "any length" if field.kind == "ragged" else field.sample_shape
            raise DataError(
                f"{where}: {array.dtype} of {array.shape}, but others have {field.dtype} of {shape}; "
                "repair or remove the sample"
            )
        return {self._name: array}


class JsonPart:
    """An object: whole numbers become int64, others float64, booleans uint8, strings text, lists of numbers arrays.

    Names that cannot be fields, that more than a few of the samples looked at lack, or whose values differ in kind, are
    left out: `left_out`.
    """

    def __init__(self, samples: Samples) -> None:
        objects = _good(samples, _load_object)
        fields: dict[str, Field] = {}
        self.left_out: list[str] = []
        texts: set[str] = set()
        for name in dict.fromkeys(name for item in objects for name in item):
            values = _alike([item[name] for item in objects if name in item])
            enough = len(values) >= _SHARE * len(objects)
            field = _json_field(name, values) if enough and is_field_name(name) else None
            if field is None:
                self.left_out.append(name)
            else:
                fields[name] = field
                texts |= {name} if isinstance(values[0], str) else set()
        self.fields: Mapping[str, Field] = fields
        self._texts = texts

    def decode(self, data: bytes, where: str) -> Values:
        """The values by name."""
        found = _load_object(data, where)
        return {name: self._value(found.get(name), field, where) for name, field in self.fields.items()}

    def _value(self, value: Any, field: Field, where: str) -> npt.NDArray[Any]:
        if field.name in self._texts and isinstance(value, str):
            return np.frombuffer(value.encode("utf-8", "replace"), np.uint8)
        fits = None if field.name in self._texts else _number_field(field.name, [value])
        if fits is not None and np.can_cast(fits.dtype, field.dtype):
            array = np.array(value, field.dtype)
            if array.ndim == 1 if field.kind == "ragged" else array.shape == field.sample_shape:
                return array
        shown = json.dumps(value)[:_MAX_SHOWN]
        raise DataError(
            f"{where}: {field.name!r} is {shown}, but in others "
            f"{'text' if field.name in self._texts else f'{field.dtype} of {field.sample_shape}'}; "
            "repair or remove the sample"
        )


def is_part(ending: str) -> bool:
    """Whether members with this ending can be packed; it is in lower case, without the dot before it."""
    last = ending.rpartition(".")[2]
    return last in ("cls", "txt", "json", "npy") or f".{last}" in IMAGE_SUFFIXES


def open_part(ending: str, pictures: Pictures, samples: Samples, how: SourceOptions) -> Part:
    """What members with this ending become; `samples` are some of them, `pictures` all.

    Raises `DataError` where no field can be made of them.
    """
    first, _, last = ending.rpartition(".")
    if last == "cls":
        return LabelPart(first or "label")
    if last == "txt":
        return TextPart(first or "text")
    if last == "npy":
        return ArrayPart(first or "data", samples)
    if last == "json":
        return JsonPart(samples)
    return PictureField(first or "image", pictures, how)


def _good(samples: Samples, load: Callable[[bytes, str], Any]) -> list[Any]:
    """What loads; raises the first error where nothing does."""
    loaded, refused = [], None
    for data, where in samples:
        try:
            loaded.append(load(data, where))
        except DataError as error:
            refused = refused or error
    if not loaded:
        raise refused or UsageError("there are no samples")
    return loaded


def _alike(values: Sequence[Any]) -> list[Any]:
    """Those of the kind that most are: text, lists, or others."""
    kind = Counter(map(_kind, values)).most_common(1)[0][0]
    return [value for value in values if _kind(value) is kind]


def _kind(value: Any) -> type:
    return float if type(value) is int else type(value)


def _load_array(data: bytes, where: str) -> npt.NDArray[Any]:
    try:
        with np.errstate(over="raise"):  # a product of extents
            array: npt.NDArray[Any] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except ARRAY_ERRORS as error:
        raise DataError(
            f"{where}: cannot be read as an array of numbers: {error}; repair or remove the sample"
        ) from error
    return array


def _load_object(data: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: cannot be read as JSON: {error}; repair or remove the sample") from error
    if not isinstance(found, dict):
        raise DataError(
            f"{where}: is JSON of {type(found).__name__}, not an object with names; repair or remove it"
        )
    return found


def _json_field(name: str, values: Sequence[Any]) -> Field | None:
    """The field that these values make together; None where they make none."""
    if all(isinstance(value, str) for value in values):
        return Field(name, "ragged", np.dtype(np.uint8), ())
    return _number_field(name, values)


def _number_field(name: str, values: Sequence[Any]) -> Field | None:
    lists = [value for value in values if isinstance(value, list)]
    if lists and (len(lists) < len(values) or any(isinstance(item, list) for row in lists for item in row)):
        return None
    dtype = _number_type([item for row in lists for item in row] if lists else values)
    if dtype is None:
        return None
    lengths = {len(row) for row in lists}
    shape = None if len(lengths) > 1 or lengths == {0} else (len(values), *lengths)
    try:
        return field_of(name, dtype, shape)
    except UnpackableError:
        return None


def _number_type(values: Sequence[Any]) -> np.dtype[Any] | None:
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return np.dtype(np.uint8)
    if kinds <= {int}:
        return np.dtype(np.int64) if all(-(2**63) <= value < 2**63 for value in values) else None
    within = all(-_MAX_FLOAT <= value <= _MAX_FLOAT for value in values if type(value) is int)
    return np.dtype(np.float64) if kinds <= {int, float} and within else None
