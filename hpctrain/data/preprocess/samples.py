"""The first steps of a field: decode, call the user's function, pad. Their result is a dense block of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.preprocess.draws import Draws, generator
from hpctrain.data.preprocess.steps import FieldSteps, where
from hpctrain.errors import ConfigError, DataError
from hpctrain.h5.fields import Field
from hpctrain.h5.picture import decode_image
from hpctrain.h5.ragged import Ragged

Array: TypeAlias = NDArray[Any]
Rows: TypeAlias = Array | Ragged

FirstSample: TypeAlias = Callable[[str], Array]
"""Of a field's name: its row of sample 0 in the stored type, (*sample_shape), or 1-D for a ragged field."""

SampleFunction: TypeAlias = Callable[[Array, np.random.Generator | None], Any]
"""A user's function of (sample, rng). `sample`: a copy of one row, in the stored type, or the decoded picture. `rng`: a
generator of (seed, epoch, sample), or None in evaluation, where nothing may be random. It returns an array or a
number, of one shape and type for all samples; with `pad_to` a 1-D array of any length. Several threads call it at a
time, but Python runs one of them at a time: what is slow belongs into NumPy calls, or into the packed set."""

_NUMBERS = "biuf"


class FirstSteps:
    """Makes rows dense blocks (B, *shape) of `dtype`.

    Where shape or type are known from a sample only (a function; pictures without `size`), sample 0 is read for it.
    """

    def __init__(
        self,
        field: Field,
        steps: FieldSteps,
        function: SampleFunction | None,
        draws: Draws,
        first: FirstSample,
        source: str,
        training: bool,
    ) -> None:
        self._field, self._steps, self._function, self._draws = field, steps, function, draws
        self._source, self._training = source, training
        self.shape, self.dtype = field.sample_shape, field.dtype.newbyteorder("=")
        self._check()
        self._singly = steps.decode is not None or function is not None
        if function is not None or (steps.decode is not None and steps.size is None):
            sample = self._first(first(field.name))
            self.shape, self.dtype = sample.shape, sample.dtype
        elif steps.size is not None:
            self.shape = (*steps.size, 3)
        self._check_numbers()
        if steps.pad_to is not None:
            self._check_pad(steps.pad_to)
            self.shape = (steps.pad_to,)

    def _check(self) -> None:
        field, steps, at = self._field, self._steps, where(self._field.name)
        if steps.decode is not None and (field.kind, field.dtype) != ("ragged", np.dtype(np.uint8)):
            raise ConfigError(
                f"{at}.decode needs the bytes of a picture per sample (ragged uint8), but the field is {field.kind} "
                f"{field.dtype}; leave it out"
            )
        if steps.pad_to is not None and field.kind != "ragged":
            raise ConfigError(f"{at}.pad_to is for ragged fields, this one is dense; leave it out")
        if field.kind == "ragged" and not (steps.decode or steps.pad_to or steps.function):
            raise ConfigError(
                f"{at}: the field is ragged, and these steps need rows of one shape; add pad_to, decode or function"
            )

    def _check_numbers(self) -> None:
        if self.dtype.kind not in _NUMBERS:
            raise ConfigError(
                f"{where(self._field.name)}: values of type {self.dtype} cannot be preprocessed; give a function that "
                "returns numbers, or leave the table out"
            )

    def _check_pad(self, pad_to: int) -> None:
        at, value = where(self._field.name), self._steps.pad_value
        if len(self.shape) > 1 or (self._function is not None and not self.shape):
            raise ConfigError(
                f"{at}.function = {self._steps.function!r} returned the shape {self.shape}, but pad_to = {pad_to} "
                "needs 1-D arrays"
            )
        if self.dtype.kind == "f":
            return
        low, high = (0, 1) if self.dtype.kind == "b" else (np.iinfo(self.dtype).min, np.iinfo(self.dtype).max)
        if not low <= value <= high:
            raise ConfigError(
                f"{at}.pad_value = {value}, but must be {low} to {high}: the type is {self.dtype}"
            )

    def read(
        self, rows: Rows, part: slice, samples: NDArray[np.int64], epoch: int
    ) -> tuple[Array, NDArray[np.int64] | None]:
        """Rows `part` of the batch, which have the ids `samples`; and after padding, their lengths."""
        if self._singly:
            results = self._read_singly(rows, part, samples, epoch)
            if self._steps.pad_to is None:
                return np.stack(results), None
            return pad(Ragged.from_rows(results, self.dtype), self._steps.pad_to, self._steps.pad_value)
        if isinstance(rows, Ragged):
            block = Ragged(rows.values, rows.offsets[part.start : part.stop + 1])
            return pad(block, self._steps.pad_to or 0, self._steps.pad_value)
        return rows[part], None

    def _read_singly(self, rows: Rows, part: slice, samples: NDArray[np.int64], epoch: int) -> list[Array]:
        words = self._draws.words("function", epoch, samples).tolist()
        numbers = zip(range(part.start, part.stop), samples.tolist(), words, strict=True)
        results = []
        for row, sample, word in numbers:
            value = self._one(rows.row(row) if isinstance(rows, Ragged) else rows[row], sample, word)
            alike = value.ndim == 1 if self._steps.pad_to is not None else value.shape == self.shape
            if not alike or value.dtype != self.dtype:
                raise DataError(self._other_kind(value, sample))
            results.append(value)
        return results

    def _first(self, raw: Array) -> Array:
        word = self._draws.words("function", 0, np.zeros(1, np.int64))[0]
        return self._one(raw, 0, int(word))

    def _one(self, raw: Array, sample: int, word: int) -> Array:
        """One sample, decoded and through the function."""
        name = f"{self._source}: field {self._field.name!r}, sample {sample}"
        value = raw
        if self._steps.decode is not None:
            value = decode_image(raw.tobytes(), name, self._steps.size)
        if self._function is None:
            return value
        rng = generator(word) if self._training else None
        try:
            return np.asarray(self._function(np.array(value), rng))
        except Exception as error:
            raise DataError(
                f"{name}: the function {self._steps.function} failed: {type(error).__name__}: {error}; "
                + ("repair it" if self._training else "repair it (in evaluation its rng is None)")
            ) from error

    def _other_kind(self, value: Array, sample: int) -> str:
        at = f"{self._source}: field {self._field.name!r}, sample {sample}"
        if self._function is None:
            return (
                f"{at}: {value.shape[1]} x {value.shape[0]} pixels, but sample 0 has {self.shape[1]} x "
                f"{self.shape[0]}; scale all with {where(self._field.name)}.size = [height, width]"
            )
        wanted = "1-D" if self._steps.pad_to is not None else str(self.shape)
        return (
            f"{at}: the function {self._steps.function} returned {value.shape} {value.dtype}, but for sample 0 "
            f"{wanted} {self.dtype}; every sample needs the same"
        )


def pad(rows: Ragged, pad_to: int, pad_value: int) -> tuple[Array, NDArray[np.int64]]:
    """Rows as (B, pad_to), cut or filled up with `pad_value`; and their lengths after cutting, int64 (B,)."""
    lengths = np.minimum(np.diff(rows.offsets), pad_to)
    starts = np.cumsum(lengths) - lengths
    positions = np.repeat(rows.offsets[:-1] - starts, lengths) + np.arange(lengths.sum())
    padded = np.full((len(rows), pad_to), pad_value, rows.values.dtype)
    padded[np.arange(pad_to) < lengths[:, np.newaxis]] = rows.values[positions]
    return padded, lengths
