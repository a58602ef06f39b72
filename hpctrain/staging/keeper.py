"""Gets chunks for a node, and keeps them: from its mirrors, from another node, or from the shared filesystem.

A chunk that several ask for at once is fetched once. What is fetched is verified, kept in a mirror if there is room for
it (`staging.tiers`), and then handed out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hpctrain.h5.filters import Buffer
from hpctrain.h5.index import digest_of
from hpctrain.staging.mirror import Mirror
from hpctrain.staging.tiers import Tiers


class Elsewhere(Protocol):
    """Where a chunk comes from that is in no mirror of this node."""

    def fetch(self, slot: int, *, was_here: bool) -> tuple[Buffer, int]:
        """The verified bytes of a slot and their digest. Raises `DataError` or `StorageError`.

        `was_here`: this node had it before, so that others may have copies.
        """
        ...


class Keeper:
    """The chunks of one set on one node; safe to use from several threads.

    Args:
        tiers: what is here.
        elsewhere: where the rest comes from.
        sizes: bytes of each slot; int64, shape (slots,).
    """

    def __init__(self, tiers: Tiers, elsewhere: Elsewhere, sizes: npt.NDArray[np.int64]) -> None:
        self._tiers, self._elsewhere, self._sizes = tiers, elsewhere, sizes
        self._had = tiers.present()
        self._lock = threading.Lock()
        self._under_way: dict[int, Future[tuple[Buffer, int]]] = {}
        """By its lock: what is being fetched."""

    def get_kept(self, slot: int) -> tuple[Buffer, int] | None:
        """The verified bytes of a slot that a mirror has, and their digest.

        One that turns out to be damaged is forgotten.
        """
        kept = self._tiers.read(slot)
        return None if kept is None else (kept, digest_of(kept))

    def get(self, slot: int) -> tuple[Buffer, int]:
        """The verified bytes of a slot and their digest, from wherever they are nearest. Raises as `Elsewhere`."""
        return self.get_kept(slot) or self._fetch(slot, lambda: self._tiers.promise(slot, demanded=True))

    def stage(self, slots: Sequence[int]) -> bool:
        """Have slots kept here; False where there is no room for all of them now. Raises as `Elsewhere`."""
        wanted = [slot for slot in slots if not self._tiers.has(slot)]
        num_bytes = int(self._sizes[wanted].sum())
        together = self._tiers.promise_together(num_bytes)
        if together is None:
            return all(self._stage_alone(slot) for slot in wanted)
        try:
            for slot in wanted:
                self._fetch(slot, lambda: None, together)
        finally:
            self._tiers.release(together, num_bytes)
        return True

    def _stage_alone(self, slot: int) -> bool:
        """Have a slot kept here for which others may have to go."""
        mirror = self._tiers.promise(slot, demanded=False)
        if mirror is None:
            return False
        try:
            self._fetch(slot, lambda: None, mirror)
        finally:
            self._tiers.release(mirror, int(self._sizes[slot]))
        return True

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
            found = self.get_kept(slot) if self._tiers.has(slot) else None
            if found is None:
                found = self._elsewhere.fetch(slot, was_here=bool(self._had[slot]))
                self._had[slot] = True
                if promised is not None:
                    self._tiers.write(promised, slot, *found)
                elif (mirror := promise()) is not None:
                    self._tiers.write(mirror, slot, *found)
                    self._tiers.release(mirror, len(found[0]))
            mine.set_result(found)
            return found
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._under_way[slot]
