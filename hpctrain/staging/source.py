"""The source of chunks during training: the node's mirrors where a chunk is present, its agent before that.

Every chunk is verified against its digest wherever it comes from. Where the agent has gone, chunks that no mirror has
are read from the shared file: that is slower, with one warning, and right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.chunks import Allocate, ChunkSource, fresh, verify
from hpctrain.h5.filters import Buffer
from hpctrain.h5.index import ChunkIndex, digest_of
from hpctrain.staging.counters import StagingCounters
from hpctrain.staging.mirror import DamagedChunkError, Mirror
from hpctrain.staging.network import Op, Status
from hpctrain.staging.stored import Slots
from hpctrain.staging.wire import Client, PeerFailure, Reply, Request

Warn = Callable[[str], None]

_TRIES: Final = 3
"""How often a chunk may vanish between the agent's word and the read, evicted for others, before its bytes are sent."""


class StagedSource:
    """A `ChunkSource` that reads what is on the node; safe to use from several threads.

    Args:
        shared: the shared files.
        slots: of the set.
        mirrors: of this node, opened by this process.
        agent: of this node; None: there is none.
        warn: told of what is slower than it should be, once.
    """

    def __init__(
        self, shared: ChunkSource, slots: Slots, mirrors: Sequence[Mirror], agent: Client | None, warn: Warn
    ) -> None:
        self._shared, self._slots, self._mirrors, self._agent = shared, slots, tuple(mirrors), agent
        self._warn = warn
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self.counters = StagingCounters()

    def read(self, index: ChunkIndex, chunk: int, allocate: Allocate = fresh) -> Buffer:
        """The stored bytes of a chunk, verified. Raises `DataError` and `StorageError` as the shared source does."""
        slot = self._slots.slot(index, chunk)
        if slot is None or index.offsets[chunk] < 0:
            return self._shared.read(index, chunk, allocate)
        is_damaged = False
        for attempt in range(_TRIES):
            local, damaged_now = self._read_local(slot, allocate)
            if local is not None:
                self.counters.add(local_bytes=len(local))
                return local
            is_damaged |= damaged_now
            op = Op.HAVE if attempt < _TRIES - 1 else Op.SEND
            sent = self._ask(index, chunk, Request(op, slot, int(is_damaged)), allocate)
            if sent is not None:
                return sent
            if self._agent is None:
                break
        stored = self._shared.read(index, chunk, allocate)
        self.counters.add(shared_bytes=len(stored))
        return stored

    def _read_local(self, slot: int, allocate: Allocate) -> tuple[Buffer | None, bool]:
        """The bytes of a slot from a mirror, and whether one was found damaged."""
        is_damaged = False
        for mirror in self._mirrors:
            try:
                stored = mirror.read(slot, allocate)
            except DamagedChunkError:  # counted and told by the agent, which looks itself
                is_damaged = True
            except OSError as error:
                self._warn_once(f"reading {mirror.path} failed: {error}; reading on from elsewhere")
            else:
                if stored is not None:
                    return stored, False
        return None, is_damaged

    def _ask(self, index: ChunkIndex, chunk: int, request: Request, allocate: Allocate) -> Buffer | None:
        """Ask the agent for a slot; its bytes where no mirror could take it, None where one has it now."""
        agent = self._agent  # another thread may find out meanwhile that it has gone
        if agent is None:
            return None
        size = int(index.sizes[chunk])
        try:
            reply = agent.call(request, max(size, 1 << 16), allocate)
        except PeerFailure as error:
            self._agent = None
            self._warn_once(
                f"the staging agent of this node does not answer ({error}); what is not staged is read from the "
                "shared files until the next attempt"
            )
            return None
        if reply.status == Status.BAD_DATA:
            raise DataError(_words(reply))
        if reply.status == Status.BAD_STORAGE:
            raise StorageError(_words(reply))
        if reply.status > Status.BAD_STORAGE:
            self._warn_once(
                f"the staging agent of this node failed ({_words(reply)}); reading on from elsewhere"
            )
        if reply.status != Status.BYTES:
            return None
        return self._verified(index, chunk, reply)

    def _verified(self, index: ChunkIndex, chunk: int, reply: Reply) -> Buffer | None:
        try:
            verify(index, chunk, reply.body)
        except DataError:
            return None
        known = index.digests is not None or digest_of(reply.body) == reply.digest
        if not known or len(reply.body) != index.sizes[chunk]:
            return None
        self.counters.add(sent_bytes=len(reply.body))
        return reply.body

    def _warn_once(self, words: str) -> None:
        with self._lock:
            if words in self._said:
                return
            self._said.add(words)
        self._warn(words)


def _words(reply: Reply) -> str:
    return bytes(reply.body).decode("utf-8", "replace")
