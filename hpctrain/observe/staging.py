"""How far staging is on all nodes together, from the events of kind `staging` that one rank of each node writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from hpctrain.observe.events import parse_event


@dataclass(frozen=True)
class Staged:
    """One node, or the sum of several. `total_bytes` is what it is to hold; the last two are where bytes came from."""

    present_bytes: int = 0
    total_bytes: int = 0
    shared_bytes: int = 0
    peer_bytes: int = 0
    done: bool = True

    def __add__(self, other: Staged) -> Staged:
        """Both together: done when both are."""
        return Staged(
            self.present_bytes + other.present_bytes,
            self.total_bytes + other.total_bytes,
            self.shared_bytes + other.shared_bytes,
            self.peer_bytes + other.peer_bytes,
            self.done and other.done,
        )


class StagingView:
    """Takes the events of all nodes, in any order between nodes, and tells in words what they come to."""

    def __init__(self) -> None:
        self._nodes: dict[str, Staged] = {}
        self._heard_unix_s: dict[str, float] = {}
        self._rates: dict[str, float] = {}

    def take(self, event: dict[str, Any]) -> None:
        """Take in one event; it replaces the node's last one. Those that say nothing of bytes are passed over."""
        node, heard_unix_s, found = str(event.get("node")), event.get("t"), _staged(event)
        if found is None or not isinstance(heard_unix_s, int | float):
            return
        elapsed_s = heard_unix_s - self._heard_unix_s.get(node, heard_unix_s)
        if elapsed_s > 0:
            self._rates[node] = max(found.present_bytes - self._nodes[node].present_bytes, 0) / elapsed_s
        self._nodes[node], self._heard_unix_s[node] = found, heard_unix_s

    @property
    def sum(self) -> Staged:
        """All nodes together."""
        return sum(self._nodes.values(), Staged())

    def going_on(self) -> str:
        """`45 % of 12.3 GB on 3 nodes, 1.2 GB/s` while any node is at it; else nothing."""
        whole = self.sum
        if whole.done or not whole.total_bytes:
            return ""
        share = f"{100 * whole.present_bytes // whole.total_bytes} % of {decimal(whole.total_bytes)}"
        rates = [rate for node, rate in self._rates.items() if not self._nodes[node].done]
        return f"{share} on {self._places()}" + (f", {decimal(round(sum(rates)))}/s" if rates else "")

    def summary(self) -> str:
        """`12.3 GB on 3 nodes: 12.3 GB from the shared filesystem, ...` once all nodes are done; else nothing."""
        whole = self.sum
        if not (whole.done and whole.total_bytes):
            return ""
        held = decimal(whole.present_bytes)
        if whole.present_bytes < whole.total_bytes:
            held += f" of {decimal(whole.total_bytes)}"
        origins = {"the shared filesystem": whole.shared_bytes, "other nodes": whole.peer_bytes}
        parts = [f"{decimal(amount)} from {origin}" for origin, amount in origins.items() if amount]
        return f"{held} on {self._places()}: {', '.join(parts) or 'all of it was there already'}"

    def as_dict(self) -> dict[str, Any] | None:
        """The sum and the number of nodes, for programs; None where nothing is staged."""
        return {"nodes": len(self._nodes), **asdict(self.sum)} if self._nodes else None

    def _places(self) -> str:
        count = sum(node.total_bytes > 0 for node in self._nodes.values())
        return f"{count} node{'s' * (count != 1)}"


def read_staging(events: Path) -> StagingView:
    """What the event files in a directory say of staging; a file that cannot be read says nothing."""
    view = StagingView()
    for path in sorted(events.glob("rank-*.jsonl")):
        with contextlib.suppress(OSError):
            for event in _staging_events(path):
                view.take(event)
    return view


def _staged(event: dict[str, Any]) -> Staged | None:
    present, total, shared, peer = (
        event.get(f"{name}_bytes") for name in ("present", "total", "shared", "peer")
    )
    if (
        isinstance(present, int)
        and isinstance(total, int)
        and isinstance(shared, int)
        and isinstance(peer, int)
    ):
        return Staged(present, total, shared, peer, bool(event.get("done")))
    return None


def _staging_events(path: Path) -> Iterator[dict[str, Any]]:
    """Few of many lines: only those are parsed."""
    with path.open("rb") as lines:
        for line in lines:
            if b'"staging"' in line and (event := parse_event(line)) and event["kind"] == "staging":
                yield event
