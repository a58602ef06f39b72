"""The side of a rank, or of another agent: asks, and waits no longer than it has to."""

from __future__ import annotations

import socket
import threading
from typing import Final

from hpctrain.h5.chunks import Allocate, fresh
from hpctrain.staging.wire.channel import Channel, Deadline, Frame, PeerFailure, Reply, Request, request_frame
from hpctrain.staging.wire.proof import introduce, require_secret

_IDLE_CHANNELS: Final = 8


class Client:
    """Asks one agent; safe to use from several threads, each of which has a connection while it asks.

    Args:
        host: address of the agent, in numbers: to look a name up may take as long as it likes.
        port: where it listens.
        secret: of the job.
        connect_timeout_s: how long it may take to be connected and recognised.
        request_timeout_s: how long an answer may take, connecting included.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        *,
        connect_timeout_s: float = 5.0,
        request_timeout_s: float = 30.0,
    ) -> None:
        self._where, self._secret = (host, port), require_secret(secret)
        self._connect_timeout_s, self._request_timeout_s = connect_timeout_s, request_timeout_s
        self._lock = threading.Lock()
        # Under its lock:
        self._idle: list[Channel] = []
        self._busy: set[Channel] = set()
        self._closed = False

    def call(
        self,
        request: Request,
        max_bytes: int,
        allocate: Allocate = fresh,
        *,
        timeout_s: float | None = None,
    ) -> Reply:
        """Ask, and give the answer, its body in what `allocate` gave.

        `timeout_s` takes the place of `request_timeout_s`. A request may reach the agent twice, where it hung up on an
        idle connection just then. What an answer of status `ERROR` says may be longer than `max_bytes`.

        Raises:
            PeerFailure: the agent does not answer in time, hangs up, is not one of this job, sends more than
                `max_bytes` or what is no answer; or this client was closed.
            ValueError: the request is larger than the protocol allows.
        """
        timeout_s = self._request_timeout_s if timeout_s is None else timeout_s
        deadline = Deadline(timeout_s)
        frame = request_frame(request)
        try:
            return self._call(frame, max_bytes, allocate, deadline)
        except PeerFailure as error:
            raise PeerFailure(f"{self._name}: {error}") from error
        except TimeoutError as error:
            raise PeerFailure(f"{self._name}: no answer within {timeout_s:.3g} s") from error
        except OSError as error:
            raise PeerFailure(f"{self._name}: {error.strerror or error}") from error

    def close(self) -> None:
        """Hang up; calls that wait for an answer fail, as do those to come."""
        with self._lock:
            self._closed = True
            for channel in self._busy:
                channel.hang_up()
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    @property
    def _name(self) -> str:
        return f"{self._where[0]} port {self._where[1]}"

    def _call(self, frame: Frame, max_bytes: int, allocate: Allocate, deadline: Deadline) -> Reply:
        if (idle := self._take_idle()) is not None:
            try:
                return self._ask(idle, list(frame), max_bytes, allocate, deadline)
            except ConnectionError:
                pass  # the agent hung up on an idle connection: that says nothing about the agent
        return self._ask(self._connect(deadline), frame, max_bytes, allocate, deadline)

    def _ask(
        self, channel: Channel, frame: Frame, max_bytes: int, allocate: Allocate, deadline: Deadline
    ) -> Reply:
        """On a channel of `_busy`; it goes back to the idle ones only where all went well."""
        is_good = False
        try:
            channel.send(frame, deadline)
            reply = channel.receive_reply(max_bytes, allocate, deadline)
            is_good = True
        finally:
            self._give_back(channel, is_good=is_good)
        return reply

    def _take_idle(self) -> Channel | None:
        with self._lock:
            if not self._idle or self._closed:
                return None
            channel = self._idle.pop()
            self._busy.add(channel)
            return channel

    def _give_back(self, channel: Channel, *, is_good: bool) -> None:
        with self._lock:
            self._busy.discard(channel)
            if is_good and not self._closed and len(self._idle) < _IDLE_CHANNELS:
                self._idle.append(channel)
                return
        channel.close()

    def _connect(self, deadline: Deadline) -> Channel:
        """A new channel, of `_busy`."""
        timeout_s = min(self._connect_timeout_s, deadline.left_s())
        connecting = Deadline(timeout_s)
        try:
            channel = _connected(self._where, connecting)
        except TimeoutError as error:
            raise PeerFailure(f"no connection within {timeout_s:.3g} s") from error
        try:
            self._begin(channel)
            introduce(channel, self._secret, connecting)
        except BaseException as error:
            self._give_back(channel, is_good=False)
            if isinstance(error, TimeoutError):
                words = f"takes connections, but does not say who it is within {timeout_s:.3g} s"
                raise PeerFailure(words) from error
            raise
        return channel

    def _begin(self, channel: Channel) -> None:
        with self._lock:
            if self._closed:
                raise PeerFailure("closed by this side")
            self._busy.add(channel)


def _connected(where: tuple[str, int], deadline: Deadline) -> Channel:
    found = socket.getaddrinfo(*where, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    family, kind, protocol, _, address = found[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.settimeout(deadline.left_s())
        connection.connect(address)
        return Channel(connection)
    except BaseException:
        connection.close()
        raise
