"""Which chunks are held, in which slots, and for how long. Bookkeeping only: no chunk is read here.

A chunk stays as long as there is room, into the next epochs, too: a set that fits into the memory budget is read once.
The future of an epoch is known, so where room is needed the chunks whose next use is farthest away go first, and are
read again then (Belady 1966: no other choice reads less).

All methods are called with the assembler's lock held.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from hpctrain.data.batches import Batch

_AT_ONCE: Final = 64
"""Where room is made, at least so small a part of the idle chunks go: each time, all of them are looked at."""


@dataclasses.dataclass
class HeldChunk:
    """A chunk in a slot.

    Attributes:
        slot: where it is.
        users: batches under way that need it.
        is_loaded: whether it can be used.
        waiting: the batches that wait for it.
    """

    slot: int
    users: int = 0
    is_loaded: bool = False
    waiting: list[Batch] = dataclasses.field(default_factory=list)


class Window:
    """Slots for so many chunks."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.dropped_chunks = 0
        """Chunks that were dropped although the same epoch needs them again: read twice in it."""
        self._free = list(
            range(slots - 1, -1, -1)
        )  # the lowest is taken first: the others' pages stay untouched
        self._held: dict[int, HeldChunk] = {}

    def __getitem__(self, chunk: int) -> HeldChunk:
        return self._held[chunk]

    def acquire(self, batch: Batch) -> list[int] | None:
        """Take the chunks of a batch into use; returns those that must be loaded, None where there is no room now."""
        missing = [chunk for chunk in batch.chunks if chunk not in self._held]
        if not self._make_room(len(missing), batch):
            return None
        for chunk in missing:
            self._held[chunk] = HeldChunk(self._free.pop())
        for chunk in batch.chunks:
            held = self._held[chunk]
            held.users += 1
            if not held.is_loaded:
                held.waiting.append(batch)
                batch.chunks_missing += 1
        return missing

    def loaded(self, chunk: int) -> list[Batch]:
        """A chunk can be used from now on; returns the batches that waited for it."""
        held = self._held[chunk]
        held.is_loaded = True
        waiting, held.waiting = held.waiting, []
        return waiting

    def release(self, batch: Batch) -> None:
        """A batch needs its chunks no more; they stay until their room is needed."""
        for chunk in batch.chunks:
            self._held[chunk].users -= 1

    def _make_room(self, wanted: int, batch: Batch) -> bool:
        lacking = wanted - len(self._free)
        if lacking <= 0:
            return True
        needed = set(batch.chunks)
        idle = [chunk for chunk, held in self._held.items() if held.users == 0 and chunk not in needed]
        if len(idle) < lacking:
            return False
        next_uses = batch.requests.next_uses(np.array(idle, np.int64), batch.step)
        leaving = np.argsort(next_uses, kind="stable")[-max(lacking, len(idle) // _AT_ONCE) :]
        self.dropped_chunks += int((next_uses[leaving] < batch.requests.num_steps).sum())
        for number in leaving.tolist():
            self._free.append(self._held.pop(idle[number]).slot)
        return True
