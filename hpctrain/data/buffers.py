"""Batch memory that is used again: a fresh array of some MiB costs a page fault every 4 KiB, each time.

A buffer is free again when nobody refers to it any more: no view, no tensor made of a view. So a batch stays valid as
long as somebody holds any part of it, and there is nothing to give back by hand. CPython's reference counts tell:
NumPy views refer to the array that owns the memory, however they were made, and tensors made of views do so, too.
"""

from __future__ import annotations

import math
import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

_SPARE = 8
"""A new buffer is an eighth larger than asked for, so that rows of slightly differing length fit as well."""


class BufferPool:
    """Arrays of one kind, such as the batches of one field; safe to use from several threads."""

    def __init__(self) -> None:
        self._buffers: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()
        self._references_when_free = self._measure()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array of arbitrary content; its memory is used again once nothing refers to it."""
        kind = np.dtype(dtype)
        num_bytes = math.prod(shape) * kind.itemsize
        with self._lock:
            buffer = self._take(num_bytes)
        return buffer[:num_bytes].view(kind).reshape(shape)

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, free ones included."""
        with self._lock:
            return sum(len(buffer) for buffer in self._buffers)

    def _take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        free = [number for number in range(len(self._buffers)) if self._is_free(number)]
        for number in free:
            if len(self._buffers[number]) >= num_bytes:
                return self._buffers[number]
        for number in reversed(free):  # too small from now on: kept, they would only add up
            del self._buffers[number]
        buffer = np.empty(num_bytes + num_bytes // _SPARE, np.uint8)
        self._buffers.append(buffer)
        return buffer

    def _is_free(self, number: int) -> bool:
        return sys.getrefcount(self._buffers[number]) == self._references_when_free

    def _measure(self) -> int:
        """What `_is_free` counts for a buffer that only the pool refers to; it differs between Python versions."""
        self._buffers.append(np.empty(1, np.uint8))
        count = sys.getrefcount(self._buffers[0])
        self._buffers.clear()
        return count
