"""Rows of differing length, without objects per row: one flat array and the offsets of the rows in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Ragged:
    """`values` is 1-D; row i is `values[offsets[i]:offsets[i + 1]]`; `offsets` is int64 of shape (rows + 1,)."""

    values: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def from_rows(cls, rows: Iterable[npt.NDArray[Any]], dtype: npt.DTypeLike) -> Ragged:
        """Join rows (1-D arrays of `dtype`)."""
        parts = [np.asarray(row, dtype) for row in rows]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return cls(np.concatenate([np.empty(0, dtype), *parts]), offsets)

    @classmethod
    def from_text(cls, rows: Iterable[str]) -> Ragged:
        """Join strings as UTF-8 bytes (uint8)."""
        return cls.from_rows((np.frombuffer(row.encode(), np.uint8) for row in rows), np.uint8)

    def row(self, i: int) -> npt.NDArray[Any]:
        """Row `i`, 0 <= i < len, as a view."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def text(self, i: int) -> str:
        """Row `i` of UTF-8 bytes as a string."""
        return bytes(self.row(i)).decode()

    def take(self, rows: npt.NDArray[np.integer[Any]] | slice) -> Ragged:
        """The rows at these positions, in this order, repeats allowed; the result starts at offset 0."""
        picked = np.arange(len(self))[rows]
        starts = self.offsets[picked]
        offsets = np.zeros(len(picked) + 1, np.int64)
        np.cumsum(self.offsets[picked + 1] - starts, out=offsets[1:])
        positions = np.repeat(starts - offsets[:-1], np.diff(offsets)) + np.arange(offsets[-1])
        return Ragged(self.values[positions], offsets)
