"""Which chunks are held, in which slots, and for how long. Bookkeeping only: no chunk is read here.

The future is known, so a chunk stays from its first use to its last. Where the memory budget holds fewer chunks than
that takes, the one whose next use is farthest away is dropped and read again then (Belady 1966: no other choice reads
less).

All methods are called with the assembler's lock held.
"""

from __future__ import annotations

import dataclasses

from hpctrain.data.batches import Batch


@dataclasses.dataclass
class HeldChunk:
    """A chunk in a slot.

    Attributes:
        slot: where it is.
        users: batches under way that need it.
        is_loaded: whether it can be used.
        waiting: the batches that wait for it.
        last_use: number of the last batch that will need it.
    """

    slot: int
    users: int = 0
    is_loaded: bool = False
    waiting: list[Batch] = dataclasses.field(default_factory=list)
    last_use: int = -1


class Window:
    """Slots for so many chunks."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.dropped_chunks = 0
        """Chunks that were dropped before their last use; each is read again."""
        self._free = list(
            range(slots - 1, -1, -1)
        )  # the lowest is taken first: the others' pages stay untouched
        self._held: dict[int, HeldChunk] = {}

    def __getitem__(self, chunk: int) -> HeldChunk:
        return self._held[chunk]

    def acquire(self, batch: Batch, last_uses: list[int]) -> list[int] | None:
        """Take the chunks of a batch into use; returns those that must be loaded, None where there is no room now.

        `last_uses`: for each of its chunks, the number of the last batch that will need it.
        """
        missing = [chunk for chunk in batch.chunks if chunk not in self._held]
        if not self._make_room(len(missing), batch):
            return None
        for chunk in missing:
            self._held[chunk] = HeldChunk(self._free.pop())
        for chunk, last_use in zip(batch.chunks, last_uses, strict=True):
            held = self._held[chunk]
            held.users += 1
            held.last_use = last_use
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

    def release(self, chunks: list[int], newest: int) -> None:
        """A batch needs its chunks no more; those that none after the newest batch will need are given up."""
        for chunk in chunks:
            held = self._held[chunk]
            held.users -= 1
            if held.users == 0 and held.last_use <= newest:
                self._give_up(chunk)

    def _make_room(self, wanted: int, batch: Batch) -> bool:
        lacking = wanted - len(self._free)
        if lacking <= 0:
            return True
        needed = set(batch.chunks)
        idle = [chunk for chunk, held in self._held.items() if held.users == 0 and chunk not in needed]
        if len(idle) < lacking:
            return False
        idle.sort(key=lambda chunk: batch.requests.next_use(chunk, batch.step))
        for chunk in idle[len(idle) - lacking :]:
            self.dropped_chunks += 1
            self._give_up(chunk)
        return True

    def _give_up(self, chunk: int) -> None:
        self._free.append(self._held.pop(chunk).slot)
