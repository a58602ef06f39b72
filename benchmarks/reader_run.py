"""The sides of a run of `reader`: opened, set to their best, checked against the samples, and measured."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import Say, Values
from benchmarks.reader_client import Client, SideError
from benchmarks.reader_data import Reference
from hpctrain.errors import DataError


@dataclass
class Found:
    """What is known of the sides besides their rates, by name.

    Attributes:
        options: the setting that was fastest; `tried`: the GB/s of every one.
        samples: of an epoch, that are read.
        reasons: why it has no figures.
        resident_bytes: after each epoch of a run.
    """

    options: dict[str, str] = field(default_factory=dict)
    tried: dict[str, dict[str, float]] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    resident_bytes: dict[str, list[int]] = field(default_factory=dict)


def data_name(side: str) -> str:
    """The set that a side reads: the last word of its name."""
    return side.rpartition(", ")[2]


class Sides:
    """All sides that can be measured; those that fail before they are measured are dropped, with the reason."""

    def __init__(self, clients: list[Client], patience_s: float, say: Say) -> None:
        self._patience_s, self._say = patience_s, say
        self._clients: dict[str, Client] = {}
        self.found = Found()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for client, names in zip(clients, pool.map(self._open, clients), strict=True):
                self._clients |= dict.fromkeys(names, client)

    @property
    def names(self) -> list[str]:
        """Those that can be measured."""
        return list(self._clients)

    def prepare(self, seconds: float, references: dict[str, Reference]) -> None:
        """Choose the fastest setting of every side, and check what it reads; raises `DataError` where it is wrong."""
        for name in self.names:
            self._say(f"trying settings: {name}")
            try:
                self._choose(name, seconds)
                answer = self._ask(name, "check")
            except SideError as error:
                self._drop(name, str(error))
            else:
                self._compare(name, answer, references[data_name(name)])

    def rate(self, name: str, round_number: int, seconds: float, cold: bool) -> Values:
        """One measurement; nothing from a side that fails, which is not asked again."""
        if name not in self._clients:
            return {}
        try:
            return self._ask(name, "measure", epoch=round_number + 1, seconds=seconds, cold=cold)
        except SideError as error:
            self._drop(name, str(error))
            return {}

    def _open(self, client: Client) -> list[str]:
        """The sides of a family that could be opened; peers write their files then."""
        try:
            names: list[str] = client.ask({"do": "names"}, self._patience_s)["names"]
        except SideError as error:
            self.found.reasons[client.family] = str(error)
            return []
        for name in names:
            try:
                client.ask({"do": "open", "side": name}, self._patience_s)
            except SideError as error:
                self.found.reasons[name] = str(error)
        return [name for name in names if name not in self.found.reasons]

    def _choose(self, name: str, seconds: float) -> None:
        answer = self._ask(name, "choose", seconds=seconds)
        self.found.options[name], self.found.tried[name] = answer["option"], answer["tried"]
        self.found.samples[name] = answer["samples"]

    def _compare(self, name: str, answer: dict[str, Any], reference: Reference) -> None:
        count = self.found.samples[name]
        wanted = (count, reference.expected(count), [reference.dtype])
        read = (answer["count"], answer["digest"], answer["dtypes"])
        if read != wanted:
            raise DataError(
                f"{name}: (samples, digest, type) are {read}, but {wanted} are right: it reads other bytes, "
                "so its rate is not comparable"
            )

    def _drop(self, name: str, reason: str) -> None:
        self.found.reasons[name] = reason
        del self._clients[name]
        self._say(f"given up: {reason}")

    def _ask(self, name: str, what: str, **arguments: Any) -> dict[str, Any]:
        return self._clients[name].ask({"do": what, "side": name, **arguments}, self._patience_s)
