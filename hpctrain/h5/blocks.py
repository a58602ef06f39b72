"""Rows read in blocks that are kept for a while: sources are cut into chunks that are not those of the packed set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hpctrain.h5.chunks import FileSource
from hpctrain.h5.dataset import Dataset
from hpctrain.h5.ragged import Ragged

_OBJECT_BYTES: Final = 128  # about what an array or a string takes beside its values

K = TypeVar("K")
T = TypeVar("T")
Rows = npt.NDArray[Any] | Ragged


class BlockCache(Generic[K, T]):
    """The blocks loaded last, by key: those that fit into `kept_bytes`, but two at least.

    Safe to share between threads. Those that want the same block wait for the one that loads it, and get its error
    when it fails. `size_of` gives the bytes of a block.
    """

    def __init__(self, load: Callable[[K], T], size_of: Callable[[T], int], kept_bytes: int) -> None:
        self._load, self._size_of, self._kept_bytes = load, size_of, kept_bytes
        self._blocks: dict[K, Future[T]] = {}
        self._sizes: dict[K, int] = {}  # of those that are loaded, oldest first
        self._total_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> T:
        """The block of this key; raises what loading it raised."""
        with self._lock:
            future = self._blocks.get(key)
            wanted = future is None
            if future is None:
                future = self._blocks[key] = Future()
        if wanted:
            try:
                block = self._load(key)
                self._keep(key, self._size_of(block))
            except BaseException as error:
                future.set_exception(error)
                raise
            future.set_result(block)
        return future.result()

    def _keep(self, key: K, size_bytes: int) -> None:
        with self._lock:
            self._sizes[key] = size_bytes
            self._total_bytes += size_bytes
            while self._total_bytes > self._kept_bytes and len(self._sizes) > 2:
                oldest = next(iter(self._sizes))
                self._total_bytes -= self._sizes.pop(oldest)
                del self._blocks[oldest]


class CachedRows:
    """Rows of a dataset in blocks of whole chunks, so that no chunk is decoded for each row chunk it overlaps."""

    def __init__(self, dataset: Dataset, source: FileSource, blocks: RowBlocks, block_rows: int) -> None:
        self._dataset, self._source, self._blocks, self._block_rows = dataset, source, blocks, block_rows

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows [start, stop), in native byte order."""
        rows = self._block_rows
        parts = [
            self._blocks.get((self, number))[max(0, start - number * rows) : stop - number * rows]
            for number in range(start // rows, -(-stop // rows))
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else self._load_rows(0, 0)

    def load(self, number: int) -> npt.NDArray[Any]:
        """Block `number`."""
        start = number * self._block_rows
        return self._load_rows(start, min(start + self._block_rows, self._dataset.num_rows))

    def _load_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        return self._dataset.read_rows(start, stop, self._source)


RowBlocks = BlockCache[tuple[CachedRows, int], npt.NDArray[Any]]


def row_blocks(kept_bytes: int) -> RowBlocks:
    """What several `CachedRows` keep their blocks in."""
    return BlockCache(lambda key: key[0].load(key[1]), _size_of, kept_bytes)


def _size_of(block: npt.NDArray[Any]) -> int:
    """Bytes of a block; of vlen rows, of what they hold."""
    if not block.dtype.hasobject:
        return block.nbytes
    return sum(_OBJECT_BYTES + len(row) * getattr(row, "itemsize", 1) for row in block)


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
