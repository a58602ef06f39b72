"""Servers that answer, servers that misbehave, and connections by hand."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hpctrain.staging.wire import Client, Reply, Request, Server
from hpctrain.staging.wire import proof as wire_proof
from hpctrain.staging.wire.channel import Channel, Deadline

SECRET = b"the secret of a job, 32 bytes ..."
OTHER_SECRET = b"the secret of another job ......."
DEADLINE_S = 10.0


def echo(request: Request) -> Reply:
    """All that was asked, and the body backwards."""
    return Reply(request.op, request.slot, request.arg, request.body[::-1])


@contextlib.contextmanager
def serving(
    answer: Callable[[Request], Reply] = echo, *addresses: str, secret: bytes = SECRET
) -> Iterator[Server]:
    server = Server(secret, addresses or ["127.0.0.1"], answer)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def asking(port: int, secret: bytes = SECRET, host: str = "127.0.0.1", **options: float) -> Iterator[Client]:
    client = Client(host, port, secret, **options)
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def scripted(script: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of a server that does with each connection what the script says, and then closes it."""
    connections: list[socket.socket] = []

    def run(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            script(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connections.append(listener.accept()[0])
                threading.Thread(target=run, args=(connections[-1],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = threading.Thread(target=accept, daemon=True)
        acceptor.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        acceptor.join(DEADLINE_S)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def after_proof(script: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    """A server of this job, which then reads one request and does with the connection what the script says."""

    def run(connection: socket.socket) -> None:
        channel = Channel(connection)
        wire_proof.welcome(channel, SECRET, Deadline(DEADLINE_S))
        while True:
            channel.receive_request(DEADLINE_S, DEADLINE_S)
            connection.settimeout(DEADLINE_S)
            script(connection)
            connection.setblocking(False)

    return run


@contextlib.contextmanager
def stranger(port: int) -> Iterator[socket.socket]:
    """A connection on which nothing was said."""
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
        yield connection


@contextlib.contextmanager
def member(port: int) -> Iterator[socket.socket]:
    """A connection of one that has proved itself and can say what it likes."""
    with stranger(port) as connection:
        wire_proof.introduce(Channel(connection), SECRET, Deadline(DEADLINE_S))
        connection.settimeout(DEADLINE_S)
        yield connection


def exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """So many bytes (MSG_WAITALL does not wait on a socket with a timeout); fewer where the other side hangs up."""
    received = b""
    while len(received) < num_bytes and (piece := connection.recv(num_bytes - len(received))):
        received += piece
    return received


def say_all(connection: socket.socket, noise: bytes) -> None:
    """Say it and no more, to one that may hang up before the end."""
    with contextlib.suppress(OSError):
        connection.sendall(noise)
        connection.shutdown(socket.SHUT_WR)


def is_hung_up(connection: socket.socket) -> bool:
    """Whether the other side hangs up, whatever it sends before."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Fail if it takes longer, with two seconds on top for a busy machine: what it would be otherwise is far longer."""
    begin_s = time.monotonic()
    yield
    took_s = time.monotonic() - begin_s
    if took_s > limit_s + 2:
        pytest.fail(f"took {took_s:.2f} s, {limit_s:g} s were expected")


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            pytest.fail("what was waited for did not happen")
        time.sleep(0.005)
