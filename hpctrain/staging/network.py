"""The nodes of a job as one store: a chunk comes from the node that keeps it, or from the shared filesystem.

Each chunk has an owner (`staging.owners`). The owner reads it from the shared filesystem, once; the others ask the
owner, then the nodes with copies, and read the shared file only where none of them answers in time. Nothing that
another node says is believed: bytes are verified wherever they come from.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from hpctrain.h5.filters import Buffer
from hpctrain.h5.index import digest_of
from hpctrain.staging.counters import StagingCounters
from hpctrain.staging.owners import Deal
from hpctrain.staging.shared import SharedFiles
from hpctrain.staging.stored import StoredChunks
from hpctrain.staging.wire import Client, PeerFailure, Request

_CONNECT_TIMEOUT_S: Final = 3.0
_REQUEST_TIMEOUT_S: Final = 20.0
_AVOIDED_S: Final = 30.0
"""A node that did not answer is not asked again for so long."""


class Op(enum.IntEnum):
    """What an agent can be asked for."""

    HAVE = 1
    """By a rank of the node: see to it that a mirror has the slot; the bytes come only where none can.

    With `arg` 1 the rank has found that what the mirror has is damaged.
    """
    SEND = 2
    """By a rank of the node: send the slot."""
    SEND_OWN = 3
    """By another node: send the slot, read from the shared filesystem if need be."""
    SEND_KEPT = 4
    """By another node: send the slot if a mirror has it."""
    STATUS = 5
    """How far staging is, and what happened since the last time: JSON."""


class Status(enum.IntEnum):
    """How an agent answers."""

    BYTES = 0
    PRESENT = 1
    ABSENT = 2
    BAD_DATA = 3
    """A `DataError`, in words."""
    BAD_STORAGE = 4
    """A `StorageError`, in words."""


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """The agents of a job: who keeps what, and where each listens. `here` is this node's number."""

    deal: Deal
    here: int
    clients: tuple[Client | None, ...]


class Network:
    """Where chunks come from that this node does not have (`keeper.Elsewhere`)."""

    def __init__(
        self,
        stored: StoredChunks,
        shared: SharedFiles,
        tell: Callable[[str], None],
        counters: StagingCounters,
    ) -> None:
        self._stored, self._shared, self._tell, self._counters = stored, shared, tell, counters
        self._neighbours: Neighbours | None = None
        self._lock = threading.Lock()
        self._avoided_until_s: dict[int, float] = {}
        self._told: set[int] = set()

    def join(self, deal: Deal, here: int, addresses: Sequence[tuple[str, int] | None], secret: bytes) -> None:
        """Know the other nodes, from now on; an address is None where a node has no agent."""
        clients = tuple(
            None
            if address is None or node == here
            else Client(
                *address, secret, connect_timeout_s=_CONNECT_TIMEOUT_S, request_timeout_s=_REQUEST_TIMEOUT_S
            )
            for node, address in enumerate(addresses)
        )
        self._neighbours = Neighbours(deal, here, clients)

    def fetch(self, slot: int, *, was_here: bool) -> tuple[Buffer, int]:
        """See `keeper.Elsewhere`."""
        for node, op in self._askable(slot, was_here):
            found = self._ask(node, op, slot)
            if found is not None:
                return found
        found = self._shared.read(slot)
        self._counters.add(shared_bytes=len(found[0]))
        return found

    def close(self) -> None:
        """Close all connections."""
        for client in self._neighbours.clients if self._neighbours else ():
            if client is not None:
                client.close()

    def _askable(self, slot: int, was_here: bool) -> Iterator[tuple[int, Op]]:
        """The nodes that may have a slot, the likeliest first, and what to ask each for."""
        if self._neighbours is None:
            return
        owner, *copies = self._neighbours.deal.holders(slot)
        if owner != self._neighbours.here:
            yield owner, Op.SEND_OWN
        elif not was_here:
            return  # nobody has what its owner never had
        for node in copies:
            if node != self._neighbours.here:
                yield node, Op.SEND_KEPT

    def _ask(self, node: int, op: Op, slot: int) -> tuple[Buffer, int] | None:
        """A slot from another node, verified; None where it does not have it, does not answer, or lies."""
        client = self._neighbours.clients[node] if self._neighbours else None
        if client is None or time.monotonic() < self._avoided_until_s.get(node, 0.0):
            return None
        size = int(self._stored.sizes[slot])
        try:
            reply = client.call(Request(op, slot), max_bytes=max(size, 4096))
        except PeerFailure as error:
            self._avoid(node, f"does not answer: {error}")
            return None
        if reply.status != Status.BYTES:
            return None  # where it failed to read the shared file, this node will see the same error, or none
        digest = digest_of(reply.body)
        known = int(self._stored.digests[slot]) if self._stored.has_digests else reply.digest
        if len(reply.body) != size or digest != known:
            self._avoid(node, f"sent wrong bytes for {self._stored.describe(slot)}")
            return None
        self._counters.add(peer_bytes=size)
        return reply.body, digest

    def _avoid(self, node: int, words: str) -> None:
        with self._lock:
            self._avoided_until_s[node] = time.monotonic() + _AVOIDED_S
            first = node not in self._told
            self._told.add(node)
        if first:
            self._tell(
                f"staging: the agent of node {node} {words}; asking others, or reading the shared file, in its place"
            )
