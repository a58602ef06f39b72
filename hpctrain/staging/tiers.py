"""The mirrors of a node as one store: tiers, the fastest first, with room that is promised before it is taken.

Where room is short the chunks go down a tier whose next use is farthest away (Belady 1966), and from the last one they
go, but never one that a reader holds. Chunks of other nodes that are kept only because there was room go first, then
copies of what other nodes own.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hpctrain.h5.filters import Buffer
from hpctrain.h5.index import digest_of
from hpctrain.staging.counters import StagingCounters
from hpctrain.staging.mirror import DamagedChunkError, Mirror
from hpctrain.staging.owners import NEVER, Uses
from hpctrain.staging.stored import StoredChunks

_AT_ONCE: Final = 64
"""All chunks of a mirror are looked at to make room: so at least one in so many goes. Where none may, the mirror is not
looked at again for as many chunks."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class Tiers:
    """The mirrors of one set on one node; safe to use from several threads. A disk that fails is told of, once."""

    def __init__(
        self,
        stored: StoredChunks,
        mirrors: Sequence[Mirror],
        tell: Callable[[str], None],
        counters: StagingCounters,
    ) -> None:
        self._stored, self._mirrors = stored, list(mirrors)
        self._tell, self._counters = tell, counters
        self._lock = threading.Lock()
        # Under its lock:
        self._broken: set[Path] = set()
        self._told: set[Path] = set()
        # One admission at a time; the writes themselves go side by side, so room is promised before it is taken.
        self._admission = threading.Lock()
        self._promised = dict.fromkeys((mirror.path for mirror in mirrors), 0)
        nothing = np.full(stored.num_slots, NEVER, np.int64)
        self._uses = Uses(np.zeros(stored.num_slots, np.int32), nothing, nothing)
        self._now = 0
        self._refused: dict[Path, tuple[int, int]] = {}
        """From which next use on a mirror has nothing to give up, and for how many more chunks that is believed."""

    def expect(self, uses: Uses) -> None:
        """Know what will be used when, from now on."""
        with self._admission:
            self._uses, self._now = uses, 0
            self._refused.clear()

    def has(self, slot: int) -> bool:
        """Whether a mirror has the slot."""
        for mirror in self._mirrors:
            try:
                if mirror.has(slot):
                    return True
            except OSError as error:
                self._give_up(mirror, "reading", error)
        return False

    def present(self) -> npt.NDArray[np.bool_]:
        """Which slots the mirrors have; shape (slots,)."""
        found = np.zeros(self._stored.num_slots, bool)
        for mirror in self._mirrors:
            try:
                found |= mirror.present()
            except OSError as error:
                self._give_up(mirror, "reading", error)
        return found

    def read(self, slot: int) -> Buffer | None:
        """The verified bytes of a slot; None where no mirror has it. One that turns out to be damaged is forgotten."""
        for mirror in self._mirrors:
            try:
                buffer = mirror.read(slot)
            except DamagedChunkError as error:
                self._forget(mirror, slot, error)
                continue
            except OSError as error:
                self._give_up(mirror, "reading", error)
                continue
            if buffer is not None:
                return buffer
        return None

    def write(self, mirror: Mirror, slot: int, stored: Buffer, digest: int) -> None:
        """Keep a chunk in a mirror that has promised the room for it."""
        try:
            mirror.write(slot, stored, digest)
        except OSError as error:
            self._give_up(mirror, "writing", error)
        else:
            self._counters.add(written_chunks=1)

    def promise_together(self, num_bytes: int) -> Mirror | None:
        """The fastest mirror, if it has room for so many bytes, which are promised to the caller then."""
        with self._admission:
            fastest = next(iter(self._writable()), None)
            if fastest is None or self._room_bytes(fastest) < num_bytes:
                return None
            self._promised[fastest.path] += num_bytes
            return fastest

    def promise(self, slot: int, *, demanded: bool) -> Mirror | None:
        """The first mirror with room for a slot, promised to the caller; chunks that are needed later make way."""
        num_bytes = int(self._stored.sizes[slot])
        with self._admission:
            if demanded:
                self._now = max(self._now, int(self._uses.this_epoch[slot]) % NEVER)
            for mirror in self._writable():
                if self._room_bytes(mirror) >= num_bytes or self._make_room(mirror, slot, demanded=demanded):
                    self._promised[mirror.path] += num_bytes
                    return mirror
        return None

    def release(self, mirror: Mirror, num_bytes: int) -> None:
        """Take a promise back, kept or not."""
        with self._admission:
            self._promised[mirror.path] -= num_bytes

    def _writable(self) -> list[Mirror]:
        return [mirror for mirror in self._mirrors if mirror.is_owner and mirror.path not in self._broken]

    def _room_bytes(self, mirror: Mirror) -> int:
        try:
            return mirror.room_bytes() - self._promised[mirror.path]
        except OSError as error:
            self._give_up(mirror, "looking at the disk", error)
            return 0

    def _make_room(self, mirror: Mirror, slot: int, *, demanded: bool) -> bool:
        """Give up chunks that are used later than `slot`, the latest first; False where that is not enough.

        They go down: to a mirror after this one that has room, else back to where they came from.
        """
        # what is asked for now is handed out whether it is kept or not: what counts is the use after this one
        after = self._now + 1 if demanded else self._now
        next_use = int(self._uses.next_use(np.array([slot]), after)[0])
        refused, chunks = self._refused.get(mirror.path, (0, 0))
        if chunks and next_use >= refused:
            self._refused[mirror.path] = (refused, chunks - 1)
            return False
        try:
            return self._evict_for(int(self._stored.sizes[slot]), mirror, next_use)
        except OSError as error:
            self._give_up(mirror, "making room", error)
            return False

    def _evict_for(self, num_bytes: int, mirror: Mirror, next_use: int) -> bool:
        sizes = self._stored.sizes
        here = np.flatnonzero(mirror.present() & (sizes > 0))
        uses = self._uses.next_use(here, self._now)
        leaving = here[uses > next_use][np.argsort(-uses[uses > next_use], kind="stable")]
        lacking_bytes = num_bytes - self._room_bytes(mirror)
        enough = int(np.searchsorted(np.cumsum(sizes[leaving]), lacking_bytes)) + 1
        if enough > len(leaving):
            self._refused[mirror.path] = (next_use, len(here) // _AT_ONCE)
            return False
        for other in leaving[: max(enough, len(leaving) // _AT_ONCE)].tolist():
            self._give_away(mirror, other)
        return self._room_bytes(mirror) >= num_bytes

    def _give_away(self, mirror: Mirror, slot: int) -> None:
        """Take a chunk out of a mirror, down to the next one that has room; not where a reader holds it."""
        size, slower = int(self._stored.sizes[slot]), self._mirrors[self._mirrors.index(mirror) + 1 :]
        writable = self._writable()
        below = (item for item in slower if item in writable and self._room_bytes(item) >= size)
        try:
            lower = next(below, None)
            stored = None if lower is None else mirror.read(slot)
            if lower is not None and stored is not None:
                self.write(lower, slot, stored, digest_of(stored))
            self._counters.add(evicted_chunks=mirror.evict(slot))
        except DamagedChunkError as error:
            self._forget(mirror, slot, error)

    def _forget(self, mirror: Mirror, slot: int, error: DamagedChunkError) -> None:
        with self._lock:
            first = self._counters.damaged_chunks == 0
            self._counters.add(damaged_chunks=1)
        if first:
            self._tell(f"{error}; got again from elsewhere (further ones are counted, not shown)")
        if mirror.is_owner:
            try:
                mirror.forget(slot)
            except OSError as failure:
                self._give_up(mirror, "marking a chunk", failure)

    def _give_up(self, mirror: Mirror, doing: str, error: OSError) -> None:
        """A disk that is full keeps what it has; one that fails otherwise takes nothing any more. Says so once."""
        if error.errno in _FULL:
            mirror.shrink()
        with self._lock:
            first = mirror.path not in self._told
            self._told.add(mirror.path)
            if error.errno not in _FULL:
                self._broken.add(mirror.path)
        if first:
            self._tell(
                f"staging to {mirror.path}: {doing} failed: {error.strerror or error}; "
                "what is not there is read from other nodes or the shared filesystem"
            )
