"""How both sides of a connection prove that they know the job's secret, before anything else is said.

The server begins with a greeting and a nonce. The client answers with a nonce of its own and with HMAC-SHA256, keyed by
the secret, over its role, both nonces, and the address and port of the server; only then does the server prove itself
in the same way in its own role. So nobody learns anything without the secret; no proof can be used twice or sent back
to whom it came from; and nobody who listens on a port that an agent left can pass proofs on to and from another agent.

What follows is neither encrypted nor signed: whoever controls the network between two nodes of a job is trusted.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final

from hpctrain.staging.wire.channel import Channel, Deadline, PeerFailure

MIN_SECRET_BYTES: Final = 16

_GREETING: Final = b"hpctrain stage 1"
_NONCE_BYTES: Final = 16
_PROOF_BYTES: Final = 32


def require_secret(secret: bytes) -> bytes:
    """The secret. Raises `ValueError` for one that could be guessed by its length."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes, {MIN_SECRET_BYTES} are the least")
    return secret


def welcome(channel: Channel, secret: bytes, deadline: Deadline) -> None:
    """Server: let the client prove itself, then prove itself to it. Raises `PeerFailure`, `OSError`."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    channel.send([memoryview(_GREETING + nonce)], deadline)
    answer = channel.receive(_NONCE_BYTES + _PROOF_BYTES, deadline)
    nonces, name = nonce + answer[:_NONCE_BYTES], channel.server_name(is_server=True)
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(secret, b"client", nonces, name)):
        raise PeerFailure("a client does not know the job's secret")
    channel.send([memoryview(_proof(secret, b"server", nonces, name))], deadline)


def introduce(channel: Channel, secret: bytes, deadline: Deadline) -> None:
    """Client: prove itself, then let the server do so. Raises `PeerFailure`, `OSError`."""
    greeting = channel.receive(len(_GREETING) + _NONCE_BYTES, deadline)
    if greeting[: len(_GREETING)] != _GREETING:
        raise PeerFailure("what listens there is no agent of this version")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    nonces, name = greeting[len(_GREETING) :] + nonce, channel.server_name(is_server=False)
    channel.send([memoryview(nonce + _proof(secret, b"client", nonces, name))], deadline)
    try:
        proof = channel.receive(_PROOF_BYTES, deadline)
    except ConnectionError as error:
        raise PeerFailure("what listens there did not accept the job's secret, or has no room") from error
    if not hmac.compare_digest(proof, _proof(secret, b"server", nonces, name)):
        raise PeerFailure("what listens there does not know the job's secret")


def _proof(secret: bytes, role: bytes, nonces: bytes, name: bytes) -> bytes:
    return hmac.digest(secret, _GREETING + role + nonces + name, "sha256")
