"""A packed set as a source: to pack it again with other chunks, another codec, or rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hpctrain.h5.blocks import BlockCache, cut, joined
from hpctrain.h5.packed import PackedSet, open_packed
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.reader import FileSource, read_sample_chunk
from hpctrain.h5.sources import Columns

_KEPT_BYTES: Final = 256 << 20


class PackedSource:
    """All fields of a packed set, ragged ones included; every chunk read is verified by its digest."""

    def __init__(self, root: Path) -> None:
        self._packed: PackedSet = open_packed(root)
        self.fields = dict(self._packed.fields)
        self.classes = self._packed.classes
        self.num_samples = self._packed.num_samples
        self.warnings: tuple[str, ...] = ()
        self._starts: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(self._packed.chunk_sizes)])
        self._source = FileSource()
        self._chunks = BlockCache(self._load, _size_of, _KEPT_BYTES)

    def read(self, start: int, stop: int) -> Columns:
        """Samples [start, stop); errors as for `read_sample_chunk`."""
        first, last = np.searchsorted(self._starts, [start, stop - 1], side="right") - 1
        parts = [
            (self._chunks.get(chunk), start - self._starts[chunk], stop - self._starts[chunk])
            for chunk in range(int(first), int(last) + 1)
        ]
        return {
            name: joined([cut(columns[name], max(0, int(begin)), int(end)) for columns, begin, end in parts])
            for name in self.fields
        }

    def num_values(self, name: str) -> int:
        """Values of a ragged field over all samples."""
        return sum(int(shard.offsets[name][-1]) for shard in self._packed.shards)

    def _load(self, chunk: int) -> Columns:
        return read_sample_chunk(self._packed, self._source, chunk)


def _size_of(columns: Columns) -> int:
    return sum(rows.values.nbytes if isinstance(rows, Ragged) else rows.nbytes for rows in columns.values())
