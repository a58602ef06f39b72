"""A digest over the values of a set, the same whatever the codec, the chunks and the files they lie in.

The samples are cut into blocks. Each block has an xxh3_128 over its fields by name: the bytes of the values, little
endian, and of ragged rows their lengths before them. The digest of the set is the xxh3_128 over the description of the
fields and the digests of the blocks in order; so they can be computed in any order, in threads, while a set is packed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from hpctrain.h5.fields import Field
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import Columns, Source
from hpctrain.h5.team import in_order

Advance = Callable[[int, int], None]
"""Called with samples done, and samples in all."""


class ContentSource:
    """A source that remembers the digest of every whole block that is read from it."""

    def __init__(self, source: Source, block_samples: int) -> None:
        self._source = source
        self._block_samples = block_samples
        self._digests: dict[int, bytes] = {}
        self.fields: Mapping[str, Field] = source.fields
        self.num_samples = source.num_samples
        self.classes = source.classes

    @property
    def warnings(self) -> tuple[str, ...]:
        """Those of the source."""
        return self._source.warnings

    def num_values(self, name: str) -> int:
        """Values of a ragged field over all samples."""
        return self._source.num_values(name)

    def read(self, start: int, stop: int) -> Columns:
        """Samples [start, stop) as the source gives them; safe in several threads where the source is."""
        columns = self._source.read(start, stop)
        if start % self._block_samples == 0 and stop == self._stop(start):
            self._digests[start] = _digest_of(columns)
        return columns

    def digest(self, advance: Advance | None = None) -> str:
        """The digest of the set (hex). Blocks that were not read yet are read, in threads; raises what that raises."""
        starts = range(0, self.num_samples, self._block_samples)
        threads = len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(threads, thread_name_prefix="content") as pool:
            unread = [start for start in starts if start not in self._digests]
            for stop in in_order(pool, self._read_block, unread, 2 * threads, lambda: None):
                if advance is not None:
                    advance(stop, self.num_samples)
        hasher = xxhash.xxh3_128(_description(self.fields, self.num_samples, self._block_samples))
        for start in starts:
            hasher.update(self._digests[start])
        return hasher.hexdigest()

    def _read_block(self, start: int) -> int:
        """Gives where it ends."""
        self.read(start, self._stop(start))
        return self._stop(start)

    def _stop(self, start: int) -> int:
        return min(start + self._block_samples, self.num_samples)


def _description(fields: Mapping[str, Field], num_samples: int, block_samples: int) -> bytes:
    items = [
        (name, item.kind, item.dtype.newbyteorder("<").str, item.sample_shape, item.encoding)
        for name, item in sorted(fields.items())
    ]
    return f"{num_samples}\0{block_samples}\0{items}".encode()


def _digest_of(columns: Columns) -> bytes:
    hasher = xxhash.xxh3_128()
    for name in sorted(columns):
        rows = columns[name]
        values = rows.values[rows.offsets[0] : rows.offsets[-1]] if isinstance(rows, Ragged) else rows
        if isinstance(rows, Ragged):
            hasher.update(np.ascontiguousarray(np.diff(rows.offsets), "<i8").data)
        hasher.update(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).data)
    return hasher.digest()
