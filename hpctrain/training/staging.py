"""Staging of a run, seen from one rank: the agent of its node, and the source of chunks that it stands behind."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpctrain.checkpoint.snapshot import Cursor
from hpctrain.comm.world import World
from hpctrain.config import RunConfig
from hpctrain.data.plan import Plan
from hpctrain.errors import HangError, StorageError
from hpctrain.h5.chunks import ChunkSource
from hpctrain.h5.packed import PackedSet
from hpctrain.staging.counters import StagingCounters
from hpctrain.staging.directories import places_here
from hpctrain.staging.message import Arrays
from hpctrain.staging.mirror import Mirror
from hpctrain.staging.network import Op, Status
from hpctrain.staging.process import AgentProcess, Message
from hpctrain.staging.source import StagedSource
from hpctrain.staging.stored import Slots, StoredChunks, file_keys_of, stored_chunks
from hpctrain.staging.wire import Client, PeerFailure, Request
from hpctrain.training.dealing import Node, Uses, gather_nodes
from hpctrain.training.sets import on_root

Emit = Callable[..., None]

_STATUS_S: Final = 2.0
_FIRST_STATUS_S: Final = 0.125  # a small set is staged at once
_STATUS_BYTES: Final = 1 << 20
_STATUS_TIMEOUT_S: Final = 20.0
"""Training itself waits for it at the end of a run: it is no more than counters."""
_AGENT_TIMEOUT_S: Final = 120.0
"""A rank waits so long for a chunk; the agent may be trying the shared filesystem again and again meanwhile."""
_SECRET_BYTES: Final = 32
_LOOPBACK: Final = "127.0.0.1"


class NodeAgent:
    """The agent of this rank's node, as the first rank of the node runs it for all of them; a context manager.

    Made early: the agent starts while the ranks open the data and build the model.
    """

    def __init__(self, config: RunConfig, world: World, attempt: int, emit: Emit) -> None:
        self._config, self._world, self._attempt, self._emit = config, world, attempt, emit
        self._stack = ExitStack()
        self._process: AgentProcess | None = None
        self._client: Client | None = None
        self._is_short = self._gave_up = False
        self._closed = threading.Event()
        self._latest: dict[str, Any] = {}
        if config.staging.dirs and world.local_rank == 0:
            self._places = places_here(config.staging.dirs)
            self._start()

    def open(self, packed: PackedSet, plan: Plan, cursor: Cursor, shared: ChunkSource) -> ChunkSource:
        """Agree with the other nodes on who keeps what, begin to stage, and give the source to read from. Collective.

        Raises `ConfigError` for a directory that others may write to, `StorageError` for one with copies of files that
        were changed, where `staging.on_changed_source` is "stop".
        """
        if not self._config.staging.dirs:
            return shared
        if self._world.is_root and any(shard.library for shard in packed.shards):
            self._warn("datasets that only libhdf5 can read are not staged: they are read where they lie")
        keys = on_root(self._world, lambda: file_keys_of(packed))
        stored, slots = stored_chunks(packed, keys), Slots(packed)
        secret = self._world.comm.bcast(secrets.token_bytes(_SECRET_BYTES), root=0)
        loaded = self._load(stored, secret)
        nodes, here = gather_nodes(self._world, _node(loaded))
        self._uses = Uses(self._world, plan, slots, nodes, here)
        self._deal(cursor, loaded, nodes, here, stored)
        return self._source(stored, slots, secret, nodes[here], shared)

    def expect(self, epoch: int) -> None:
        """Where room is short, tell the agents what is used when, before `epoch` begins. Collective."""
        if self._is_short:
            arrays: Arrays = {
                "this_epoch": self._uses.of_job(epoch),
                "next_epoch": self._uses.of_job(epoch + 1),
            }
            self._ask({"do": "uses"}, arrays)

    def total_counters(self, mine: StagingCounters) -> dict[str, int]:
        """What the ranks and agents of the whole job did so far, added up. Collective."""
        self._look()
        of_agent = {name: int(self._latest.get(name, 0)) for name in mine.as_dict()}
        both = self._world.comm.allgather((mine.as_dict(), of_agent))
        return {name: sum(one[name] for pair in both for one in pair) for name in of_agent}

    def close(self) -> None:
        """End the agent; what is staged stays."""
        self._closed.set()
        self._stack.close()
        if self._process is not None:
            self._process.close()

    def __enter__(self) -> NodeAgent:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # a rank that failed ends at once, and its agent with it
            self.close()

    def _start(self) -> None:
        try:
            self._process = AgentProcess()
        except OSError as error:  # no process or memory left on this host
            self._give_up(error)

    def _ask(self, head: Mapping[str, Any], arrays: Arrays | None = None) -> Message | None:
        """Tell the agent something, where this rank has one; one that fails is given up."""
        if self._process is None:
            return None
        try:
            return self._process.ask(head, arrays)
        except (HangError, ConnectionError) as error:
            self._give_up(error)
            return None

    def _give_up(self, error: BaseException) -> None:
        self._process, self._gave_up = None, True
        self._warn(
            f"no staging on {socket.gethostname()}: {error}; reading from other nodes and the shared files"
        )

    def _warn(self, words: str) -> None:
        self._emit("warning", message=words)

    def _load(self, stored: StoredChunks, secret: bytes) -> Message | None:
        """Have the agent open its mirrors."""
        if self._process is None:
            return None
        head, arrays = stored.to_message()
        places = [{"directory": str(one.directory), "quota_bytes": one.quota_bytes} for one in self._places]
        staging = self._config.staging
        request = {
            "do": "load",
            "rank": self._world.rank,
            "attempt": self._attempt,
            "secret": secret.hex(),
            "places": places,
            "interface": staging.interface,
            "on_changed": staging.on_changed_source,
            "drop_pages": self._config.data.page_cache != "keep",
            "stored": head,
        }
        return self._ask(request, arrays)

    def _deal(
        self, cursor: Cursor, loaded: Message | None, nodes: list[Node], here: int, stored: StoredChunks
    ) -> None:
        """Who keeps what; the agents begin."""
        present = np.zeros(stored.num_slots, bool)
        if loaded is not None:
            present = np.unpackbits(loaded[1]["present"], count=stored.num_slots).astype(bool)
        replicas = self._config.staging.replicas
        deal = self._uses.deal(present, cursor.epoch, cursor.step_in_epoch, replicas, len(nodes))
        self._is_short = any(
            int(stored.sizes[deal.copy_number(number) >= 0].sum()) > node.room_bytes
            for number, node in enumerate(nodes)
        )
        head = {
            "do": "deal",
            "node": here,
            "addresses": [node.address for node in nodes],
            "num_nodes": len(nodes),
            "replicas": deal.replicas,
        }
        arrays: Arrays = {"owners": deal.owners, "first_steps": deal.first_steps}
        if self._is_short:
            arrays["next_epoch"] = self._uses.of_job(cursor.epoch + 1)
        self._ask(head, arrays)

    def _source(
        self, stored: StoredChunks, slots: Slots, secret: bytes, node: Node, shared: ChunkSource
    ) -> ChunkSource:
        mirrors: list[Mirror] = []
        for place in node.places:
            try:
                mirrors.append(Mirror(Path(place), stored))
            except StorageError as error:
                self._warn(f"{place} cannot be read by rank {self._world.rank}: {error}")
        for mirror in mirrors:
            self._stack.callback(mirror.close)
        client = None
        if node.address is not None and not self._gave_up:
            client = Client(_LOOPBACK, node.address[1], secret, request_timeout_s=_AGENT_TIMEOUT_S)
            self._stack.callback(client.close)
            if self._process is not None:
                self._client = client
                threading.Thread(target=self._watch, name="staging", daemon=True).start()
        return StagedSource(shared, slots, mirrors, client, self._warn)

    def _watch(self) -> None:
        """Tell how far staging is, while it goes on, and what the agent has to say."""
        was_done, pause_s = False, _FIRST_STATUS_S
        while not self._closed.wait(pause_s) and (status := self._look()) is not None:
            if not was_done and (status["done"] or pause_s == _STATUS_S):
                self._emit("staging", node=socket.gethostname(), **status)
            was_done, pause_s = status["done"], min(2 * pause_s, _STATUS_S)
        if not was_done and not self._closed.is_set():  # it ended, and nothing more will come
            self._emit("staging", node=socket.gethostname(), **{**self._latest, "done": True})

    def _look(self) -> dict[str, Any] | None:
        """The agent's status; what it has to say is passed on."""
        if self._client is None:
            return None
        try:
            reply = self._client.call(Request(Op.STATUS), _STATUS_BYTES, timeout_s=_STATUS_TIMEOUT_S)
        except PeerFailure:
            return None
        if reply.status != Status.PRESENT:
            return None
        status: dict[str, Any] = json.loads(bytes(reply.body))
        for words in status.pop("words"):
            self._warn(words)
        self._latest = status  # whole: another thread may be looking, too
        return status


def _node(loaded: Message | None) -> Node | None:
    if loaded is None:
        return None
    head = loaded[0]
    return Node(
        (), (head["address"], head["port"]), tuple(head["places"]), head["is_writable"], head["room_bytes"]
    )
