"""Several nodes on one machine: an agent each, in this process, with a directory of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.plan import Plan
from hpctrain.h5.chunks import ChunkSource, FileSource
from hpctrain.h5.packed import PackedSet
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.reader import read_sample_chunk
from hpctrain.staging.agent import Agent
from hpctrain.staging.mirror import Mirror
from hpctrain.staging.owners import NEVER, Deal, bids
from hpctrain.staging.source import StagedSource
from hpctrain.staging.stored import Slots, StoredChunks, file_keys_of, stored_chunks
from hpctrain.staging.wire import Client

SECRET = b"0" * 32
DEADLINE_S = 30.0


class Nodes:
    """The agents of a job, dealt the chunks of a set; a context manager."""

    def __init__(
        self,
        packed: PackedSet,
        folders: list[Path | None],
        *,
        replicas: int = 1,
        quota_bytes: int | None = None,
        on_changed: str = "restage",
        stored: StoredChunks | None = None,
        slow_folder: Path | None = None,
    ) -> None:
        self.packed, self.folders, self.replicas = packed, folders, replicas
        self.quota_bytes, self.on_changed, self.slow_folder = quota_bytes, on_changed, slow_folder
        self.stored = stored or stored_chunks(packed, file_keys_of(packed))
        self.slots = Slots(packed)
        self.agents: list[Agent] = []
        self.replies: list[dict[str, Any]] = []
        self.present: list[np.ndarray] = []
        self.stack = ExitStack()
        for folder in folders:
            self._load(folder)

    def _load(self, folder: Path | None) -> None:
        head, arrays = self.stored.to_message()
        places = [] if folder is None else [{"directory": str(folder), "quota_bytes": self.quota_bytes}]
        if self.slow_folder is not None:
            places.append({"directory": str(self.slow_folder), "quota_bytes": None})
        agent = Agent()
        reply, results = agent.load(
            {
                "rank": 0,
                "attempt": 1,
                "secret": SECRET.hex(),
                "places": places,
                "interface": "lo",
                "on_changed": self.on_changed,
                "drop_pages": False,
                "stored": head,
            },
            arrays,
        )
        self.stack.callback(agent.close)
        self.agents.append(agent)
        self.replies.append(reply)
        self.present.append(np.unpackbits(results["present"], count=self.stored.num_slots).astype(bool))

    def deal(self, order: str = "global", epochs: int = 1, seed: int = 3) -> Deal:
        """Deal by a plan with two lanes on each node, and begin to stage."""
        plan = self.plan(order, seed)
        first = [self.first_steps(plan, node, 0) for node in range(len(self.agents))]
        offers = [
            bids(steps, self.present[node], node) | (0 if self.folders[node] else 1 << 62)
            for node, steps in enumerate(first)
        ]
        deal = Deal.of(np.min(offers, axis=0), np.min(first, axis=0), len(self.agents), self.replicas)
        following = [self.first_steps(plan, node, 1) for node in range(len(self.agents))]
        addresses = [("127.0.0.1", reply["port"]) for reply in self.replies]
        for node, agent in enumerate(self.agents):
            head = {
                "node": node,
                "addresses": addresses,
                "num_nodes": len(self.agents),
                "replicas": deal.replicas,
            }
            arrays = {
                "owners": deal.owners,
                "first_steps": deal.first_steps,
                "next_epoch": np.min(following, axis=0),
            }
            agent.deal(head, arrays)
        return deal

    def plan(self, order: str = "global", seed: int = 3) -> Plan:
        return Plan(self.packed.chunk_sizes, 2 * len(self.agents), 4, seed, 3, order=order)

    def first_steps(self, plan: Plan, node: int, epoch: int) -> np.ndarray:
        steps = plan.first_steps(epoch, [2 * node, 2 * node + 1])
        in_run = np.where(steps < plan.steps_per_epoch, epoch * plan.steps_per_epoch + steps, NEVER)
        return np.minimum(self.slots.least_of_sample_chunks(in_run), NEVER)

    def join(self) -> None:
        for agent in self.agents:
            assert agent.node.join(DEADLINE_S), "staging hangs"

    def source(self, node: int, shared: ChunkSource | None = None, timeout_s: float = 10.0) -> StagedSource:
        """What a rank on a node reads from; its warnings are in `warnings`."""
        files = shared or self.stack.enter_context(FileSource())
        mirrors = [Mirror(Path(place), self.stored) for place in self.replies[node]["places"]]
        for mirror in mirrors:
            self.stack.callback(mirror.close)
        client = Client("127.0.0.1", self.replies[node]["port"], SECRET, request_timeout_s=timeout_s)
        self.stack.callback(client.close)
        self.warnings: list[str] = []
        return StagedSource(files, self.slots, mirrors, client, self.warnings.append)

    def words(self, node: int) -> list[str]:
        return self.agents[node].node.take_words()

    def counter(self, name: str) -> list[int]:
        return [getattr(agent.node.counters, name) for agent in self.agents]

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()


def everything(packed: PackedSet, source: ChunkSource) -> list[dict[str, Any]]:
    """All samples, chunk by chunk."""
    return [read_sample_chunk(packed, source, chunk) for chunk in range(len(packed.chunk_sizes))]


def read_shared(packed: PackedSet) -> list[dict[str, Any]]:
    with FileSource() as files:
        return everything(packed, files)


def same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    def values(item: Any) -> np.ndarray:
        return item.values if isinstance(item, Ragged) else item

    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(np.array_equal(values(x[name]), values(y[name])) for name in x)
        for x, y in zip(a, b, strict=True)
    )


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain: {what}"
        time.sleep(0.02)
