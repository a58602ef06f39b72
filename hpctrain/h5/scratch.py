"""Memory of a thread for what it needs only for a moment: it grows to the largest size asked for, and stays."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt


class Scratch(threading.local):
    """Each thread has buffers of its own, one per purpose; what one gave is valid until it is asked for again."""

    def __init__(self) -> None:
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}

    def bytes(self, purpose: str, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A buffer of so many bytes; shape (num_bytes,)."""
        buffer = self._buffers.get(purpose)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._buffers[purpose] = np.empty(num_bytes, np.uint8)
        return buffer[:num_bytes]

    def array(self, purpose: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An array of arbitrary content."""
        return self.bytes(purpose, math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
