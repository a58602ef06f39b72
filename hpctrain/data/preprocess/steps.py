"""What is done to one field, as a value, and the checks of it that need no data.

The steps of a field always run in this order: decode, function, pad, augment, normalise, convert. So a function may
make pictures of differing sizes alike, or cut a window out of a long text, and what follows sees the result.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hpctrain.errors import ConfigError

DTYPES: Final = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
"""What a field can be converted to: those types that torch computes with."""

_MAX_PAD: Final = 1 << 24
_MAX_SIDE: Final = 8192


@dataclass(frozen=True)
class FieldSteps:
    """The table `data.preprocess.FIELD` of the run description.

    Attributes:
        decode: `image`: the bytes of a picture in each row (a ragged uint8 field) become uint8 (H, W, 3).
        size: (height, width) in pixels that decoded pictures are scaled to; None: they all have one size.
        function: `module:function` of (sample, rng), called for each sample; see `SampleFunction`.
        pad_to: a ragged field becomes dense, of shape (pad_to,); longer rows are cut. The number of values
            of each row, after cutting, is the further field `FIELD_length` (int64).
        pad_value: what rows are filled up with.
        augment: named augmentations: `flip`, `crop:PIXELS`, `rotate90`, `noise:STD`.
        normalize: `stored`: (x - mean) / std with the statistics of the packed set.
        mean, std: the same with given numbers: one, or one per channel.
        dtype: what the values are converted to; None: float32 after normalising, else as they are.
    """

    decode: str | None = None
    size: tuple[int, int] | None = None
    function: str | None = None
    pad_to: int | None = None
    pad_value: int = 0
    augment: tuple[str, ...] = ()
    normalize: str | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    dtype: str | None = None

    @property
    def normalizes(self) -> bool:
        """Whether the values are normalised."""
        return self.normalize is not None or self.mean is not None

    def target(self, source: np.dtype[Any]) -> np.dtype[Any]:
        """The type of the result, for values of type `source` before normalising and converting."""
        if self.dtype is not None:
            return np.dtype(self.dtype)
        return np.dtype(np.float32) if self.normalizes else source.newbyteorder("=")


def where(name: str) -> str:
    """The table of a field in the run description, for messages."""
    return f"data.preprocess.{name}"


def known(what: str, value: str, names: Iterable[str]) -> None:
    """Raise `ConfigError` where `value` is none of `names`, with the nearest of them, or all."""
    names = sorted(names)
    if value in names:
        return
    near = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}"
    raise ConfigError(f"{what} = {value!r} is unknown; {hint}")


def check_steps(name: str, steps: FieldSteps) -> None:
    """Raise `ConfigError` where the steps of field `name` cannot work for any data."""
    at = where(name)
    if steps.decode is not None:
        known(f"{at}.decode", steps.decode, ["image"])
    if steps.dtype is not None:
        known(f"{at}.dtype", steps.dtype, DTYPES)
    if steps.normalize is not None:
        known(f"{at}.normalize", steps.normalize, ["stored"])
    _check_sizes(at, steps)
    _check_statistics(at, steps)


def _check_sizes(at: str, steps: FieldSteps) -> None:
    if steps.size is not None and steps.decode is None:
        raise ConfigError(
            f'{at}.size = {list(steps.size)} only scales decoded pictures; add decode = "image"'
        )
    if steps.size is not None and not 1 <= min(steps.size) <= max(steps.size) <= _MAX_SIDE:
        raise ConfigError(f"{at}.size = {list(steps.size)}, but must be 1 to {_MAX_SIDE} pixels each way")
    if steps.pad_to is not None and steps.decode is not None:
        raise ConfigError(f"{at}: decode and pad_to exclude each other; leave one out")
    if steps.pad_to is not None and not 1 <= steps.pad_to <= _MAX_PAD:
        raise ConfigError(f"{at}.pad_to = {steps.pad_to}, but must be 1 to {_MAX_PAD} values")
    if steps.pad_value != 0 and steps.pad_to is None:
        raise ConfigError(f"{at}.pad_value = {steps.pad_value} has no meaning without pad_to; add pad_to")


def _check_statistics(at: str, steps: FieldSteps) -> None:
    if (steps.mean is None) != (steps.std is None):
        raise ConfigError(f"{at}: mean and std belong together; give both, or neither")
    if steps.normalize is not None and steps.mean is not None:
        raise ConfigError(f"{at}: normalize takes the stored statistics, mean and std others; leave one out")
    if steps.mean is not None and steps.std is not None:
        if len(steps.mean) != len(steps.std) or not steps.mean:
            raise ConfigError(
                f"{at}: {len(steps.mean)} numbers in mean, {len(steps.std)} in std; give as many"
            )
        if not all(map(math.isfinite, (*steps.mean, *steps.std))) or min(steps.std) < 0:
            raise ConfigError(
                f"{at}.std = {list(steps.std)}, mean = {list(steps.mean)}: not finite, or below 0"
            )
    if steps.normalizes and steps.dtype is not None and not steps.dtype.startswith("float"):
        raise ConfigError(f"{at}.dtype = {steps.dtype!r} cannot hold normalised values; use float32")
