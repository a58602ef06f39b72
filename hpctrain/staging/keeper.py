"""Gets chunks for a node, and keeps them: from its mirrors, from another node, or from the shared filesystem.

A chunk that several ask for at once is fetched once. What is fetched is verified, kept in a mirror if there is room for
it, and then handed out. Mirrors are tiers, the fastest first: where room is short the chunks go down a tier whose next
use is farthest away (Belady 1966), and from the last one they go, but never one that a reader holds. Chunks of other
nodes that are kept only because there was room go first.
"""

from __future__ import annotations

import dataclasses
import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from hpctrain.h5.filters import Buffer
from hpctrain.h5.index import digest_of
from hpctrain.staging.counters import StagingCounters
from hpctrain.staging.mirror import DamagedChunkError, Mirror
from hpctrain.staging.owners import NEVER
from hpctrain.staging.stored import StoredChunks

_AT_ONCE: Final = 64
"""Where room is made, at least so small a part of the chunks goes: each time, all of them are looked at."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class Elsewhere(Protocol):
    """Where a chunk comes from that is in no mirror of this node."""

    def fetch(self, slot: int, *, was_here: bool) -> tuple[Buffer, int]:
        """The verified bytes of a slot and their digest. Raises `DataError` or `StorageError`.

        `was_here`: a mirror of this node had it, so that others may have copies.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Uses:
    """When slots are used, as far as it is known: in one epoch and in the next.

    Attributes:
        kept: whether this node is to keep the slot; shape (slots,).
        this_epoch: step of the first use, `NEVER` for none; shape (slots,).
        next_epoch: the same for the epoch after it.
    """

    kept: npt.NDArray[np.bool_]
    this_epoch: npt.NDArray[np.int64]
    next_epoch: npt.NDArray[np.int64]

    def next_use(self, slots: npt.NDArray[np.int64], now: int) -> npt.NDArray[np.int64]:
        """Step of the next use from step `now` on; beyond all of them for slots that are not to be kept."""
        this, following = self.this_epoch[slots], self.next_epoch[slots]
        return np.where(self.kept[slots], np.where(this >= now, this, following), NEVER + 1)


class Keeper:
    """The chunks of one set on one node; safe to use from several threads."""

    def __init__(
        self,
        stored: StoredChunks,
        mirrors: Sequence[Mirror],
        elsewhere: Elsewhere,
        tell: Callable[[str], None],
        counters: StagingCounters,
    ) -> None:
        self._stored, self._mirrors, self._elsewhere = stored, list(mirrors), elsewhere
        self._tell, self.counters = tell, counters
        self._lock = threading.Lock()
        # Under its lock:
        self._under_way: dict[int, Future[tuple[Buffer, int]]] = {}
        self._lost: set[int] = set()
        self._broken: set[Path] = set()
        self._told: set[Path] = set()
        # One admission at a time; the writes themselves go side by side, so room is promised before it is taken.
        self._admission = threading.Lock()
        self._promised = dict.fromkeys((mirror.path for mirror in mirrors), 0)
        nothing = np.full(stored.num_slots, NEVER, np.int64)
        self._uses = Uses(np.ones(stored.num_slots, bool), nothing, nothing)
        self._now = 0

    def expect(self, uses: Uses) -> None:
        """Know what will be used when, from now on."""
        with self._admission:
            self._uses, self._now = uses, 0

    def has(self, slot: int) -> bool:
        """Whether a mirror has the slot."""
        return any(mirror.has(slot) for mirror in self._mirrors)

    def present(self) -> npt.NDArray[np.bool_]:
        """Which slots the mirrors have; shape (slots,)."""
        found = np.zeros(self._stored.num_slots, bool)
        for mirror in self._mirrors:
            found |= mirror.present()
        return found

    def get_kept(self, slot: int) -> tuple[Buffer, int] | None:
        """The verified bytes of a slot that a mirror has, and their digest.

        One that turns out to be damaged is forgotten.
        """
        kept = self._read(slot)
        return None if kept is None else (kept, digest_of(kept))

    def get(self, slot: int) -> tuple[Buffer, int]:
        """The verified bytes of a slot and their digest, from wherever they are nearest. Raises as `Elsewhere`."""
        return self.get_kept(slot) or self._fetch(slot, lambda: self._promise(slot, demanded=True))

    def stage(self, slots: Sequence[int]) -> bool:
        """Have slots kept here; False where there is no room for all of them now. Raises as `Elsewhere`."""
        wanted = [slot for slot in slots if not self.has(slot)]
        num_bytes = int(self._stored.sizes[wanted].sum())
        together = self._promise_together(num_bytes)
        if together is None:
            return all(self._stage_alone(slot) for slot in wanted)
        try:
            for slot in wanted:
                self._fetch(slot, lambda: None, together)
        finally:
            self._release(together, num_bytes)
        return True

    def _stage_alone(self, slot: int) -> bool:
        """Have a slot kept here for which others may have to go."""
        mirror = self._promise(slot, demanded=False)
        if mirror is None:
            return False
        try:
            self._fetch(slot, lambda: None, mirror)
        finally:
            self._release(mirror, int(self._stored.sizes[slot]))
        return True

    def _read(self, slot: int) -> Buffer | None:
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

    def _fetch(
        self, slot: int, promise: Callable[[], Mirror | None], promised: Mirror | None = None
    ) -> tuple[Buffer, int]:
        """The bytes of a slot from elsewhere, once for all who ask meanwhile.

        They are kept in `promised`, else in what `promise` gives once they are there.
        """
        with self._lock:
            waiting = self._under_way.get(slot)
            if waiting is None:
                mine = self._under_way[slot] = Future()
        if waiting is not None:
            return waiting.result()
        try:
            # another thread may just have ended what would now begin again
            found = self.get_kept(slot) if self.has(slot) else None
            if found is None:
                found = self._elsewhere.fetch(slot, was_here=slot in self._lost)
                if promised is not None:
                    self._write(promised, slot, *found)
                elif (mirror := promise()) is not None:
                    self._write(mirror, slot, *found)
                    self._release(mirror, len(found[0]))
            mine.set_result(found)
            return found
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._under_way[slot]

    def _write(self, mirror: Mirror, slot: int, stored: Buffer, digest: int) -> None:
        try:
            mirror.write(slot, stored, digest)
        except OSError as error:
            self._give_up(mirror, "writing", error)
        else:
            self.counters.add(written_chunks=1)

    def _promise_together(self, num_bytes: int) -> Mirror | None:
        """The fastest mirror, if it has room for so many bytes, which are promised to the caller then."""
        with self._admission:
            fastest = next(iter(self._writable()), None)
            if fastest is None or self._room_bytes(fastest) < num_bytes:
                return None
            self._promised[fastest.path] += num_bytes
            return fastest

    def _promise(self, slot: int, *, demanded: bool) -> Mirror | None:
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

    def _release(self, mirror: Mirror, num_bytes: int) -> None:
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
        sizes, num_bytes = self._stored.sizes, int(self._stored.sizes[slot])
        here = np.flatnonzero(mirror.present() & (sizes > 0))
        uses = self._uses.next_use(here, self._now)
        leaving = here[uses > next_use][np.argsort(-uses[uses > next_use], kind="stable")]
        lacking_bytes = num_bytes - self._room_bytes(mirror)
        enough = int(np.searchsorted(np.cumsum(sizes[leaving]), lacking_bytes)) + 1
        if enough > len(leaving):
            return False
        for other in leaving[: max(enough, len(leaving) // _AT_ONCE)].tolist():
            self._give_away(mirror, other)
        return self._room_bytes(mirror) >= num_bytes

    def _give_away(self, mirror: Mirror, slot: int) -> None:
        """Take a chunk out of a mirror, down to the next one that has room; not where a reader holds it."""
        size, writable = int(self._stored.sizes[slot]), self._writable()
        below = (item for item in writable[writable.index(mirror) + 1 :] if self._room_bytes(item) >= size)
        try:
            lower = next(below, None)
            stored = None if lower is None else mirror.read(slot)
            if lower is not None and stored is not None:
                self._write(lower, slot, stored, digest_of(stored))
            self.counters.add(evicted_chunks=mirror.evict(slot))
        except DamagedChunkError as error:
            self._forget(mirror, slot, error)
        except OSError as error:
            self._give_up(mirror, "making room", error)

    def _forget(self, mirror: Mirror, slot: int, error: DamagedChunkError) -> None:
        with self._lock:
            first = not self._lost
            self._lost.add(slot)
        self.counters.add(damaged_chunks=1)
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
