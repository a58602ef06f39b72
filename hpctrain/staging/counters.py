"""What staging did so far, in bytes and chunks."""

from __future__ import annotations

import dataclasses
import threading


@dataclasses.dataclass
class StagingCounters:
    """Of one process, or of one node's agent; safe to add to from several threads.

    Attributes:
        shared_bytes: read from the shared filesystem.
        local_bytes: read from mirrors of this node.
        peer_bytes: got from other nodes.
        served_bytes: given to other nodes.
        sent_bytes: got from the agent, because no mirror took them.
        written_chunks: written to mirrors.
        evicted_chunks: given up for others.
        damaged_chunks: found damaged in a mirror.
    """

    shared_bytes: int = 0
    local_bytes: int = 0
    peer_bytes: int = 0
    served_bytes: int = 0
    sent_bytes: int = 0
    written_chunks: int = 0
    evicted_chunks: int = 0
    damaged_chunks: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add(self, **amounts: int) -> None:
        """Add to the counters of these names."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def as_dict(self) -> dict[str, int]:
        """All of them, by name."""
        return dataclasses.asdict(self)
