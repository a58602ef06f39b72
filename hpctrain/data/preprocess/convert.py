"""From the values as they are to those the Task gets: (x - mean) / std, in the type asked for.

Computed in float32, or in float64 where float32 would lose digits (float64, int32 or int64 are stored, or float64 is
asked for), exactly as NumPy and torch do it one operation at a time. Converting first and then working in place is
faster than mixed types in one operation (6.3 against 4.3 GB/s of float32 on a core), and than a table of the 256 values
of a byte (2 GB/s).
"""

from __future__ import annotations

import math
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.preprocess.steps import FieldSteps, where
from hpctrain.errors import ConfigError, DataError
from hpctrain.h5.fields import Field

_ROW: Final = 4096
"""Values that the numbers per channel are repeated to, at most: long enough for the processor's wide loops."""

_Pattern: TypeAlias = tuple[tuple[int, ...], NDArray[Any], NDArray[Any]]
"""The shape in which to see a batch, and the mean and standard deviation that are broadcast over it."""


class Conversion:
    """Converts and normalises rows of one field; `warnings` says what was assumed."""

    def __init__(
        self, field: Field, steps: FieldSteps, shape: tuple[int, ...], dtype: np.dtype[Any], source: str
    ) -> None:
        self._name, self._source = field.name, source
        self.dtype = steps.target(dtype)
        self.warnings: list[str] = []
        self._compute = np.result_type(dtype, np.float32, self.dtype)
        self._checked = self.dtype.kind in "biu" and not np.can_cast(dtype, self.dtype, "safe")
        self._pattern: _Pattern | None = None
        if steps.normalizes:
            mean, std = _statistics(field, steps)
            self._pattern = _pattern(field.name, self._held(mean), self._usable(std), shape)

    def _held(self, numbers: NDArray[np.float64]) -> NDArray[Any]:
        """Statistics in the type that is computed in; raises `ConfigError` where that does not hold them."""
        with np.errstate(over="ignore"):
            held = numbers.astype(self._compute)
        if np.isinf(held).any():
            raise ConfigError(
                f"{where(self._name)}: a mean or standard deviation of {np.abs(numbers).max():g} is beyond "
                f'{self._compute}, in which this field is normalised; give a smaller one, or dtype = "float64"'
            )
        return held

    def _usable(self, std: NDArray[np.float64]) -> NDArray[Any]:
        """Standard deviations to divide by: 0 becomes 1, with a warning."""
        divisor = self._held(std)
        zero = np.flatnonzero(divisor == 0)
        if len(zero):
            which = "" if len(std) == 1 else f" of channel {', '.join(map(str, zero.tolist()))}"
            self.warnings.append(f"{where(self._name)}: the standard deviation{which} is 0; it is taken as 1")
            divisor[zero] = 1
        return divisor

    def __call__(self, rows: NDArray[Any], samples: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Write `rows` (B, *shape), converted, to `out`.

        Raises `DataError` naming the first sample with a value that the type does not hold: too large for a float
        type, or not the same number as an integer. NaN and infinity stay what they are in float types.
        """
        try:
            with np.errstate(over="raise", invalid="ignore"):
                self._write(rows, out)
        except FloatingPointError:
            with np.errstate(over="ignore", invalid="ignore"):
                self._write(rows, out)
            self._refuse(np.isinf(out) & np.isfinite(rows), rows, samples)
        if self._checked:
            wrong = out != rows
            if wrong.any():
                self._refuse(wrong, rows, samples)

    def _write(self, rows: NDArray[Any], out: NDArray[Any]) -> None:
        if self._pattern is None:
            np.copyto(out, rows, casting="unsafe")
            return
        work = out if out.dtype == self._compute else np.empty(rows.shape, self._compute)
        np.copyto(work, rows, casting="unsafe")
        shape, mean, std = self._pattern
        view = work.reshape(shape)
        view -= mean
        view /= std
        if work is not out:
            np.copyto(out, work, casting="unsafe")

    def _refuse(self, wrong: NDArray[np.bool_], rows: NDArray[Any], samples: NDArray[np.int64]) -> None:
        at = tuple(int(index) for index in np.argwhere(wrong)[0])
        raise DataError(
            f"{self._source}: field {self._name!r}, sample {samples[at[0]]}: the value {rows[at]} does not fit into "
            f"{self.dtype}; choose a wider {where(self._name)}.dtype"
        )


def _statistics(field: Field, steps: FieldSteps) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation, each of shape (1,) or (C,)."""
    mean, std = (field.mean, field.std) if steps.normalize else (steps.mean, steps.std)
    if mean is None or std is None:
        why = (
            "it is ragged"
            if field.kind == "ragged"
            else "it has values that are not finite, or none were computed"
        )
        raise ConfigError(
            f'{where(field.name)}.normalize = "stored", but the set has no statistics of this field ({why}); '
            "give mean and std instead"
        )
    return np.atleast_1d(np.asarray(mean, np.float64)), np.atleast_1d(np.asarray(std, np.float64))


def _pattern(name: str, mean: NDArray[Any], std: NDArray[Any], shape: tuple[int, ...]) -> _Pattern:
    """The statistics laid out for fast operations: as few, as long runs of values as possible."""
    size = max(1, math.prod(shape))
    if len(mean) == 1:
        return (-1, size), mean, std
    if shape and shape[-1] == len(mean):
        repeats = _divisor(size // len(mean), _ROW // len(mean))
        return (-1, repeats * len(mean)), np.tile(mean, repeats), np.tile(std, repeats)
    if shape and shape[0] == len(mean):
        return (-1, len(mean), size // len(mean)), mean[:, np.newaxis], std[:, np.newaxis]
    raise ConfigError(
        f"{where(name)}: {len(mean)} numbers in mean and std, but the samples have the shape {shape}; "
        "give one, or as many as the last (or first) axis is long"
    )


def _divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` up to `limit`, or 1."""
    return next((size for size in range(min(number, limit), 1, -1) if number % size == 0), 1)
