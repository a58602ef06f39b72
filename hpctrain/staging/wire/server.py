"""The side of an agent: listens, and answers each client in a thread of its own."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from hpctrain.errors import StorageError
from hpctrain.staging.wire.channel import (
    ERROR,
    ERROR_BYTES,
    Channel,
    Deadline,
    Frame,
    Reply,
    Request,
    reply_frame,
)
from hpctrain.staging.wire.guests import Guests
from hpctrain.staging.wire.proof import require_secret, welcome

_PROOF_S: Final = 5.0
_IDLE_S: Final = 600.0
_REQUEST_S: Final = 30.0
_REPLY_S: Final = 60.0
_BIND_TRIES: Final = 20
_CLOSE_S: Final = 0.5
_SCARCE_S: Final = 0.1


class Server:
    """Listens on one port of several addresses until it is closed.

    Args:
        secret: of the job.
        addresses: of this host, in numbers.
        answer: gives the reply to a request; called from many threads at once, and may take its time. What it raises
            becomes a reply of status `ERROR`.

    Raises `StorageError` where no port is free on all the addresses.
    """

    def __init__(self, secret: bytes, addresses: Sequence[str], answer: Callable[[Request], Reply]) -> None:
        self._secret, self._answer = require_secret(secret), answer
        self._guests = Guests()
        self._closed = threading.Event()
        self._listeners = _listen(addresses)
        self.port = int(self._listeners[0].getsockname()[1])
        self._acceptors = [
            threading.Thread(target=self._accept, args=(one,), name="accept", daemon=True)
            for one in self._listeners
        ]
        for thread in self._acceptors:
            thread.start()

    def close(self) -> None:
        """Hang up on everybody, and listen no more; answers that are being worked out are dropped."""
        self._closed.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):  # wakes the thread in `accept`, which closes it
                listener.shutdown(socket.SHUT_RDWR)
        self._guests.close()
        deadline_s = time.monotonic() + _CLOSE_S
        for thread in self._acceptors:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while not self._closed.is_set():
                try:
                    connection = listener.accept()[0]
                except OSError:  # closed, or no descriptor is left for now
                    self._closed.wait(_SCARCE_S)
                    continue
                try:
                    self._begin(connection)
                except (OSError, RuntimeError):  # gone already, or no thread is left for now
                    connection.close()

    def _begin(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        self._guests.admit(channel)
        try:
            threading.Thread(target=self._serve, args=(channel,), name="client", daemon=True).start()
        except RuntimeError:
            self._guests.leave(channel)
            raise

    def _serve(self, channel: Channel) -> None:
        try:
            # Whatever happens to a connection, its client has to begin anew; the others are served on.
            with contextlib.suppress(OSError, MemoryError):
                welcome(channel, self._secret, Deadline(_PROOF_S))
                while self._guests.rest(channel):
                    request = channel.receive_request(_IDLE_S, _REQUEST_S)
                    if not self._guests.work(channel):
                        break
                    channel.send(self._reply_to(request), Deadline(_REPLY_S))
        finally:
            self._guests.leave(channel)
            channel.close()

    def _reply_to(self, request: Request) -> Frame:
        try:
            return reply_frame(self._answer(request))
        except Exception as error:  # noqa: BLE001 - told to the client; the others must be served on
            words = f"{type(error).__name__}: {error}".encode("utf-8", "replace")
            return reply_frame(Reply(ERROR, body=words[:ERROR_BYTES]))


def _listen(addresses: Sequence[str]) -> list[socket.socket]:
    """Sockets that listen on the same port of each address."""
    for _ in range(_BIND_TRIES):
        sockets: list[socket.socket] = []
        try:
            for address in addresses:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                port = sockets[0].getsockname()[1] if sockets else 0
                sockets.append(socket.create_server((address, port), family=family, backlog=128))
            return sockets
        except OSError as error:
            for one in sockets:
                one.close()
            if error.errno != errno.EADDRINUSE:
                raise StorageError(
                    f"cannot listen on {', '.join(addresses)}: {error.strerror or error}"
                ) from error
    raise StorageError(f"no port is free on all of {', '.join(addresses)}")
