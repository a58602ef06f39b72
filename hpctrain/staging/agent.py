"""The agent of a node: the process that owns its mirrors. `python -m hpctrain.staging.agent`, started by a rank.

The rank tells it through its standard input what to stage and who its neighbours are (`staging.message`), and learns
from its standard output where it listens. All else goes over the network (`staging.wire`): ranks of the node ask for
chunks that no mirror has, other nodes for chunks that this one keeps. It ends when the rank does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from hpctrain.errors import ConfigError, DataError, HpctrainError, StorageError
from hpctrain.h5.chunks import allow_many_files
from hpctrain.resilience import faults
from hpctrain.resilience.signals import die_with_parent
from hpctrain.staging.interface import interface_address
from hpctrain.staging.message import Arrays, receive_message, send_message
from hpctrain.staging.network import Op, Status
from hpctrain.staging.node import NodeStaging, Place
from hpctrain.staging.owners import NEVER, Deal, Uses
from hpctrain.staging.stored import StoredChunks
from hpctrain.staging.wire import Reply, Request, Server

_LOOK_S: Final = 2.0
_LOOPBACK: Final = "127.0.0.1"


class Agent:
    """One node's staging and the server in front of it; `load` comes first."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def load(self, head: Mapping[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Open the mirrors of a set and begin to listen. Raises `ConfigError` and `StorageError`."""
        faults.configure(head["rank"], head["attempt"])
        self._secret = bytes.fromhex(head["secret"])
        places = [Place(Path(place["directory"]), place["quota_bytes"]) for place in head["places"]]
        address = interface_address(head["interface"])
        self.node = NodeStaging(
            StoredChunks.from_message(head["stored"], arrays),
            places,
            head["on_changed"],
            drop_pages=head["drop_pages"],
        )
        self._server = Server(self._secret, list(dict.fromkeys([_LOOPBACK, address])), self.answer)
        threading.Thread(target=self._look_around, name="look", daemon=True).start()
        reply = {
            "address": address,
            "port": self._server.port,
            "places": [str(path) for path in self.node.used_places],
            "is_writable": self.node.is_writable,
            "room_bytes": self.node.room_bytes(),
        }
        return reply, {"present": np.packbits(self.node.tiers.present())}

    def deal(self, head: Mapping[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Learn who keeps what, and begin to stage."""
        deal = Deal(arrays["owners"], arrays["first_steps"], head["num_nodes"], head["replicas"])
        here, addresses = (
            int(head["node"]),
            [tuple(address) if address else None for address in head["addresses"]],
        )
        self.node.network.join(deal, here, addresses, self._secret)
        self._copies = deal.copy_number(here)
        never = np.full_like(deal.first_steps, NEVER)
        self.node.stage(deal, here, Uses(self._copies, deal.first_steps, arrays.get("next_epoch", never)))
        return {}, {}

    def uses(self, head: Mapping[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Learn when chunks are used from now on."""
        self.node.tiers.expect(Uses(self._copies, arrays["this_epoch"], arrays["next_epoch"]))
        return {}, {}

    def answer(self, request: Request) -> Reply:
        """What a rank or another agent is told."""
        if request.op == Op.STATUS:
            return Reply(Status.PRESENT, body=json.dumps(self._status()).encode())
        if not 0 <= request.slot < self.node.stored.num_slots:
            return Reply(Status.BAD_DATA, body=f"there is no chunk {request.slot}".encode())
        try:
            return self._chunk(Op(request.op), request.slot, is_damaged=bool(request.arg))
        except DataError as error:
            return Reply(Status.BAD_DATA, body=str(error).encode())
        except StorageError as error:
            return Reply(Status.BAD_STORAGE, body=str(error).encode())

    def close(self) -> None:
        """End everything; what is staged stays."""
        self._closed.set()
        self._server.close()
        self.node.close()

    def _chunk(self, op: Op, slot: int, *, is_damaged: bool) -> Reply:
        keeper, tiers, counters = self.node.keeper, self.node.tiers, self.node.counters
        if op is Op.HAVE and not is_damaged and tiers.has(slot):
            return Reply(Status.PRESENT)
        found = keeper.get_kept(slot) if op is Op.SEND_KEPT else keeper.get(slot)
        if found is None:
            return Reply(Status.ABSENT)
        stored, digest = found
        if op is Op.HAVE and tiers.has(slot):
            return Reply(Status.PRESENT)
        if op in (Op.SEND_OWN, Op.SEND_KEPT):
            counters.add(served_bytes=len(stored))
        return Reply(Status.BYTES, digest, body=stored)

    def _status(self) -> dict[str, Any]:
        return {**self.node.status(), "words": self.node.take_words()}

    def _look_around(self) -> None:
        while not self._closed.wait(_LOOK_S):
            self.node.look_around()


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    """Do what the rank says until it has no more to say."""
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they mean the ranks: the agent is needed until its rank ends
    allow_many_files()
    agent = Agent()
    actions = {"load": agent.load, "deal": agent.deal, "uses": agent.uses}
    while (message := receive_message(requests)) is not None:
        head, arrays = message
        try:
            reply, results = actions[head["do"]](head, arrays)
        except HpctrainError as error:
            kind = "ConfigError" if isinstance(error, ConfigError) else "StorageError"
            reply, results = {"error": kind, "message": str(error)}, {}
        send_message(replies, reply, results)
    os._exit(0)  # the mirrors need no closing, and threads may be waiting for a disk


if __name__ == "__main__":
    die_with_parent()
    main(sys.stdin.buffer, sys.stdout.buffer)
