"""Rows read in blocks that are kept for a while: sources are cut into chunks that are not those of the packed set."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hpctrain.h5.ragged import Ragged

T = TypeVar("T")
Rows = npt.NDArray[Any] | Ragged


class BlockCache(Generic[T]):
    """The last `kept` blocks that were loaded, by number; safe to share between threads.

    Threads that want the same block wait for the one that loads it, and get its error when it fails.
    """

    def __init__(self, load: Callable[[int], T], kept: int) -> None:
        self._load, self._kept = load, kept
        self._blocks: OrderedDict[int, Future[T]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, number: int) -> T:
        """Block `number`; raises what loading it raised."""
        with self._lock:
            future = self._blocks.get(number)
            wanted = future is None
            if future is None:
                future = self._blocks[number] = Future()
                if len(self._blocks) > self._kept:
                    self._blocks.popitem(last=False)
        if wanted:
            try:
                future.set_result(self._load(number))
            except BaseException as error:
                future.set_exception(error)
                raise
        return future.result()


def cut(rows: Rows, start: int, stop: int) -> Rows:
    """Rows [start, stop)."""
    return rows.take(slice(start, stop)) if isinstance(rows, Ragged) else rows[start:stop]


def joined(parts: Sequence[Rows]) -> Rows:
    """Rows one after the other; all of one kind, at least one."""
    if len(parts) == 1:
        return parts[0]
    dense = [part for part in parts if not isinstance(part, Ragged)]
    if dense:
        return np.concatenate(dense)
    ragged = [part for part in parts if isinstance(part, Ragged)]
    lengths = np.concatenate([np.diff(part.offsets) for part in ragged])
    values = np.concatenate([part.values[part.offsets[0] : part.offsets[-1]] for part in ragged])
    return Ragged(values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
