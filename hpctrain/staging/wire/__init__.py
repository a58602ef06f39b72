"""How agents are spoken to: one protocol between ranks, agents and their peers.

`Server` answers, `Client` asks; `proof` says how they recognise each other, `channel` what a frame is.
"""

from __future__ import annotations

from hpctrain.staging.wire.channel import ERROR, ERROR_BYTES, MAX_REQUEST_BYTES, PeerFailure, Reply, Request
from hpctrain.staging.wire.client import Client
from hpctrain.staging.wire.server import Server

__all__ = ["ERROR", "ERROR_BYTES", "MAX_REQUEST_BYTES", "Client", "PeerFailure", "Reply", "Request", "Server"]
