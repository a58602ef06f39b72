"""Which bytes of a mirror's file a chunk that goes gives back: pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt


class Holes:
    """The holes that chunks leave.

    A filesystem gives whole blocks back. The blocks at the ends of a chunk may hold parts of its neighbours: the hole
    takes them in when none of those is there, else small chunks would give back less than they take.

    Args:
        files, offsets, sizes: of the slots, as in `StoredChunks`; slots of size 0 lie nowhere.
        block_bytes: of the filesystem.
    """

    def __init__(
        self,
        files: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        block_bytes: int,
    ) -> None:
        self._files, self._offsets, self._sizes = files, offsets, sizes
        self._block_bytes = block_bytes
        order = np.lexsort((offsets, files))
        self._order = order[sizes[order] > 0]
        self._places = np.zeros(len(files), np.int64)
        self._places[self._order] = np.arange(len(self._order))

    def hole(self, slot: int, is_taken: Callable[[int], bool]) -> tuple[int, int]:
        """Begin and end of the hole of a slot in its file; `is_taken` says whether another slot's bytes are there."""
        step, begin = self._block_bytes, int(self._offsets[slot])
        end = begin + int(self._sizes[slot])
        place = int(self._places[slot])
        first, last = begin // step * step, -(-end // step) * step
        if not any(is_taken(other) for other in self._before(place, first)):
            begin = first
        if not any(is_taken(other) for other in self._after(place, last)):
            end = last
        return begin, end

    def _before(self, place: int, first_byte: int) -> Iterator[int]:
        """Slots of the same file that end after `first_byte`, from `place` down."""
        file = self._files[self._order[place]]
        for other in self._order[:place][::-1]:
            if self._files[other] != file or self._offsets[other] + self._sizes[other] <= first_byte:
                return
            yield int(other)

    def _after(self, place: int, end_byte: int) -> Iterator[int]:
        """Slots of the same file that begin before `end_byte`, from `place` up."""
        file = self._files[self._order[place]]
        for other in self._order[place + 1 :]:
            if self._files[other] != file or self._offsets[other] >= end_byte:
                return
            yield int(other)
