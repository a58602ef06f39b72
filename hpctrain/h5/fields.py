"""What a sample is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

OFFSETS_SUFFIX: Final = "_offsets"


@dataclass(frozen=True)
class Field:
    """One field of the samples.

    `dense`: an array of `sample_shape` per sample; `ragged`: 1-D of any length. `mean` and `std` are one
    number, or one per channel for images; None for ragged fields and for fields with values that are not
    finite. `keep_bits`: mantissa bits that floats were rounded to, None where they were not. `encoding`: "image" where
    each row is the bytes of a picture file (JPEG or PNG); None for plain values.
    """

    name: str
    kind: Literal["dense", "ragged"]
    dtype: np.dtype[Any]
    sample_shape: tuple[int, ...]
    codec: str = "none"
    mean: tuple[float, ...] | float | None = None
    std: tuple[float, ...] | float | None = None
    keep_bits: int | None = None
    encoding: str | None = None

    @property
    def sample_bytes(self) -> int:
        """Raw bytes of one sample; 0 for ragged fields, whose samples differ."""
        if self.kind == "ragged":
            return 0
        return math.prod(self.sample_shape) * self.dtype.itemsize


def offsets_field(field: Field) -> Field:
    """The dense field that holds the offsets of a ragged one."""
    return Field(field.name + OFFSETS_SUFFIX, "dense", np.dtype("<i8"), (), field.codec)
