"""Staging on one node: its mirrors, what it is to keep, and the threads that bring it here while training runs."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from hpctrain.errors import DataError, HpctrainError, StorageError
from hpctrain.staging.counters import StagingCounters
from hpctrain.staging.keeper import Keeper
from hpctrain.staging.mirror import Mirror
from hpctrain.staging.network import Network
from hpctrain.staging.owners import Deal, Uses
from hpctrain.staging.shared import SharedFiles
from hpctrain.staging.stored import StoredChunks
from hpctrain.staging.tiers import Tiers

_MOST_STAGERS: Final = 8
"""Threads that read ahead, where the shared filesystem answers slowly: waits add up to nothing."""
_LARGE_BYTES: Final = 256 << 10
"""From such chunks on two threads work side by side; with smaller ones they would wait for each other (the GIL)."""
_ROUND_BYTES: Final = 1 << 20
_SLOW_ROUND_S: Final = 0.01
"""A round that took longer waited for storage: another thread has work meanwhile."""
_GIB: Final = 1 << 30


@dataclasses.dataclass(frozen=True)
class Place:
    """A directory for a mirror, and how many bytes it may take; None: what the disk has."""

    directory: Path
    quota_bytes: int | None = None


class NodeStaging:
    """The staging of one set on one node. A context manager.

    Args:
        stored: the chunks of the set.
        places: where mirrors may be; one that cannot be used is told of and left out.
        on_changed: what to do with a mirror that was made of other files than there are now.
        drop_pages: give the kernel's pages of the shared files back at once.

    Raises:
        ConfigError: a place that others may write to.
        StorageError: a mirror of files that were changed since, with `on_changed` "stop".
    """

    def __init__(
        self,
        stored: StoredChunks,
        places: Sequence[Place],
        on_changed: Literal["stop", "restage"] = "restage",
        *,
        drop_pages: bool = False,
    ) -> None:
        self.stored, self._on_changed = stored, on_changed
        self.counters = StagingCounters()
        self._lock = threading.Lock()
        self._words: list[str] = []
        self._said: set[str] = set()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._order: Iterator[int] | None = None
        """What is still to be brought here; None before `stage`."""
        self._to_keep = np.zeros(stored.num_slots, bool)
        self._running = 0
        self._idle = threading.Event()
        self._idle.set()
        self._is_full = False
        self._shared = SharedFiles(stored, self.tell, drop_pages=drop_pages)
        self.network = Network(stored, self._shared, self.tell, self.counters)
        opened = {place.directory: self._open(place) for place in places}
        self.used_places = tuple(directory for directory, mirror in opened.items() if mirror is not None)
        self.mirrors = [mirror for mirror in opened.values() if mirror is not None]
        self.tiers = Tiers(stored, self.mirrors, self.tell, self.counters)
        self.keeper = Keeper(self.tiers, self.network, stored.sizes)
        if not stored.has_digests:
            self.tell("the files have no digests of their chunks: each is taken when the chunk is first read")

    @property
    def is_writable(self) -> bool:
        """Whether a mirror takes anything."""
        return any(mirror.is_owner for mirror in self.mirrors)

    def room_bytes(self) -> int:
        """What the mirrors hold and could hold."""
        return sum(mirror.present_bytes + mirror.room_bytes() for mirror in self.mirrors if mirror.is_owner)

    def stage(self, deal: Deal, here: int, uses: Uses) -> None:
        """Begin to bring here what this node is to keep; returns at once."""
        self.tiers.expect(uses)
        order = deal.staging_order(here)
        self._to_keep[order] = True
        self._order = iter(order.tolist())
        self._begin()

    def join(self, timeout_s: float) -> bool:
        """Wait until everything is here that is to be, or there is no room for more; False if the time ran out."""
        return self._idle.wait(timeout_s)

    def tell(self, words: str) -> None:
        """Remember a warning until somebody takes it."""
        with self._lock:
            self._words.append(words)

    def take_words(self) -> list[str]:
        """The warnings since the last call."""
        with self._lock:
            words, self._words = self._words, []
        return words

    def status(self) -> dict[str, Any]:
        """How far it is: bytes present of those to keep, counters, and whether the threads are done."""
        present = self.tiers.present() & self._to_keep
        return {
            "present_bytes": int(self.stored.sizes[present].sum()),
            "total_bytes": int(self.stored.sizes[self._to_keep].sum()),
            "present_chunks": int(present.sum()),
            "total_chunks": int(self._to_keep.sum()),
            "done": self._idle.is_set(),
            "full": self._is_full,
            **self.counters.as_dict(),
        }

    def look_around(self) -> None:
        """Once in a while: take mirrors over whose owner has gone, and tell of mirrors that were deleted."""
        for mirror in self.mirrors:
            try:
                if not mirror.is_owner and self._take(mirror):
                    self._begin()
                if mirror.is_owner and mirror.is_deleted():
                    self._say_once(f"{mirror.path} was deleted; its files stay in use until the run ends")
            except (HpctrainError, OSError) as error:  # what was staged is verified whenever it is used
                self._say_once(f"{mirror.path}: {error}")

    def close(self) -> None:
        """End the threads; what is staged stays."""
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self.network.close()
        self._shared.close()
        for mirror in self.mirrors:
            mirror.close()

    def __enter__(self) -> NodeStaging:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, place: Place) -> Mirror | None:
        try:
            mirror = Mirror(place.directory, self.stored, place.quota_bytes)
        except StorageError as error:  # a full or failing disk; one that others may write to is a ConfigError
            self.tell(f"no staging in {place.directory}: {error}")
            return None
        try:
            if not self._take(mirror):
                self.tell(
                    f"{mirror.path} belongs to another job on this node: it is read, and nothing is added to it"
                )
        except BaseException:
            mirror.close()
            raise
        if mirror.is_memory and place.quota_bytes is None:
            quota = f"{mirror.quota_bytes / _GIB:.3g} GiB at most"
            self.tell(
                f"{place.directory} is memory, not a disk: {quota} are taken; give it a quota_gib of its own"
            )
        return mirror

    def _take(self, mirror: Mirror) -> bool:
        try:
            if not mirror.take():
                return False
        except OSError as error:
            self._say_once(
                f"{mirror.path} cannot be taken over: {error.strerror or error}; nothing is added to it"
            )
            return False
        words = mirror.adopt(self._on_changed)
        if words:
            self.tell(words)
        return True

    def _begin(self) -> None:
        """Start to stage, if there is somewhere to write to."""
        with self._lock:
            if self._order is None or not self._idle.is_set() or not self.is_writable:
                return
            self._idle.clear()
            self._is_full = False
        is_large = self.stored.num_bytes >= _LARGE_BYTES * self.stored.num_slots
        for _ in range(1 + is_large):
            self._start()

    def _start(self) -> None:
        """One more thread, if there may be."""
        with self._lock:
            if self._running == _MOST_STAGERS:
                return
            self._running += 1
            thread = threading.Thread(target=self._run, name="stager", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # this node has no more threads for us
            self._say_once(f"staging: {error}")
            self._end()
        else:
            self._threads.append(thread)

    def _run(self) -> None:
        try:
            while not self._closed.is_set() and (slots := self._next()):
                begun_s = time.monotonic()
                if not self.keeper.stage(slots):
                    self._is_full = True
                    break
                if time.monotonic() - begun_s > _SLOW_ROUND_S:
                    self._start()
        except HpctrainError as error:  # who needs the chunk will meet the same error, or none
            kind = "the data are damaged" if isinstance(error, DataError) else "reading ahead failed"
            self._say_once(f"staging ended, {kind}: {error}")
        finally:
            self._end()

    def _end(self) -> None:
        """The last thread makes what was written durable: the next job on this node is to find it."""
        with self._lock:
            self._running -= 1
            if self._running:
                return
        for mirror in self.mirrors:
            try:
                if mirror.is_owner:
                    mirror.sync()
            except OSError as error:
                self._say_once(f"{mirror.path}: cannot be made durable: {error.strerror or error}")
        self._idle.set()

    def _next(self) -> list[int]:
        """The next slots: several where they are small, since each round of bookkeeping takes as long as 16 KiB."""
        slots, num_bytes = [], 0
        with self._lock:
            for slot in self._order or ():
                slots.append(slot)
                num_bytes += int(self.stored.sizes[slot])
                if num_bytes >= _ROUND_BYTES:
                    break
        return slots

    def _say_once(self, words: str) -> None:
        with self._lock:
            if words in self._said:
                return
            self._said.add(words)
        self.tell(words)
