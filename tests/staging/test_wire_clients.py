"""A server whose clients are strangers, lie or stall: it goes on, and the others notice nothing."""

from __future__ import annotations

import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.h5.chunks import fresh
from hpctrain.staging.wire import Reply, Request, Server
from hpctrain.staging.wire import guests as wire_guests
from hpctrain.staging.wire import proof as wire_proof
from hpctrain.staging.wire import server as wire_server
from hpctrain.staging.wire.channel import Channel, Deadline, reply_frame, request_frame
from tests.staging.wire_support import (
    DEADLINE_S,
    SECRET,
    asking,
    echo,
    exactly,
    is_hung_up,
    member,
    say_all,
    serving,
    stranger,
    wait_until,
    within,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def serves(server: Server) -> bool:
    with asking(server.port) as client:
        return client.call(Request(1, 42), 0, timeout_s=DEADLINE_S).digest == 42


@settings(max_examples=30, deadline=None)
@given(noise=st.binary(min_size=1, max_size=300))
def test_noise_of_a_stranger(server: Server, noise: bytes) -> None:
    with stranger(server.port) as connection:
        say_all(connection, noise)
        heard = b""
        try:
            while content := connection.recv(1 << 16):
                heard += content
        except ConnectionError:
            pass
        assert len(heard) <= 32  # the greeting and a nonce
    assert serves(server)


@settings(max_examples=30, deadline=None)
@given(noise=st.binary(min_size=1, max_size=300))
def test_noise_of_one_that_knows_the_secret(server: Server, noise: bytes) -> None:
    with member(server.port) as connection:
        say_all(connection, noise)
        assert is_hung_up(connection)
    assert serves(server)


@pytest.mark.parametrize("size", [(64 << 20) + 1, 1 << 40, (1 << 64) - 1])
def test_a_request_that_claims_to_be_huge(server: Server, size: int) -> None:
    fields = struct.pack("<4sBQQQ", b"HPS1", 1, 0, 0, size)
    with member(server.port) as connection, within(0.1):
        connection.sendall(fields + struct.pack("<I", zlib.crc32(fields)))
        assert is_hung_up(connection)


def test_a_proof_cannot_be_used_twice(server: Server) -> None:
    frame = b"".join(request_frame(Request(1)))

    def introduce(connection: socket.socket, said: bytes | None) -> bytes:
        nonce = exactly(connection, 32)[16:]
        name = f"127.0.0.1 {server.port}".encode()
        if said is None:
            said = bytes(16) + wire_proof._proof(SECRET, b"client", nonce + bytes(16), name)
        connection.sendall(said + frame)
        return said

    with stranger(server.port) as first:
        said = introduce(first, None)
        assert len(exactly(first, 32)) == 32
        assert first.recv(1) == b"H"  # that is an answer
    with stranger(server.port) as second, within(0.1):
        introduce(second, said)
        assert is_hung_up(second)


def test_a_proof_of_the_server_is_none_of_a_client(server: Server) -> None:
    """Even one that could be had for a nonce of one's own choice."""
    with stranger(server.port) as connection, within(0.1):
        nonce = exactly(connection, 32)[16:]
        name = f"127.0.0.1 {server.port}".encode()
        connection.sendall(bytes(16) + wire_proof._proof(SECRET, b"server", nonce + bytes(16), name))
        assert connection.recv(1) == b""


def test_strangers_keep_nobody_out(server: Server) -> None:
    with ExitStack() as stack:
        strangers = [stack.enter_context(stranger(server.port)) for _ in range(150)]
        with within(0.3):
            assert serves(server)
        with within(0.3):  # long before their time is over
            for connection in strangers[:80]:
                assert is_hung_up(connection)
        wait_until(lambda: 60 < len(server._guests._strangers) <= wire_guests.MAX_STRANGERS)
    wait_until(lambda: not server._guests._strangers)


@pytest.mark.parametrize("pause_s", [0.02, 10.0], ids=["drips", "silent"])
def test_a_stranger_has_little_time(monkeypatch: pytest.MonkeyPatch, pause_s: float) -> None:
    monkeypatch.setattr(wire_server, "_PROOF_S", 0.2)
    stop = threading.Event()

    def drip(connection: socket.socket) -> None:
        try:
            while not stop.wait(pause_s):
                connection.sendall(b"x")
        except OSError:
            pass

    with serving() as server, stranger(server.port) as connection, within(0.3):
        thread = threading.Thread(target=drip, args=(connection,))
        thread.start()
        wait_until(lambda: bool(server._guests._strangers))
        wait_until(lambda: not server._guests._strangers)
        stop.set()
        thread.join()


def test_a_request_that_stalls_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_server, "_REQUEST_S", 0.1)
    said = b"".join(request_frame(Request(1, body=b"abcdef")))
    with serving() as server:
        for length in (1, 20, len(said) - 1):
            with member(server.port) as connection, within(0.2):
                connection.sendall(said[:length])
                assert is_hung_up(connection)
        with member(
            server.port
        ) as connection:  # it may wait before it asks, and the pieces may come one by one
            time.sleep(0.15)
            for start in range(0, len(said), 16):
                connection.sendall(said[start : start + 16])
            channel = Channel(connection)
            assert bytes(channel.receive_reply(6, fresh, Deadline(DEADLINE_S)).body) == b"fedcba"


def test_a_client_that_does_not_take_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_server, "_REPLY_S", 0.2)
    chunk = bytes(32 << 20)  # more than the buffers of the kernel

    def answer(request: Request) -> Reply:
        return Reply(0, body=chunk) if request.slot else echo(request)

    with serving(answer) as server, member(server.port) as connection:
        connection.sendall(b"".join(request_frame(Request(1, 1))))
        wait_until(lambda: bool(server._guests._busy))
        with within(0.2):
            with asking(server.port) as client:
                assert client.call(Request(1, 0), 0).digest == 0
            wait_until(lambda: not server._guests._busy)


def test_two_requests_at_once_are_answered_one_after_the_other(server: Server) -> None:
    said = b"".join(piece for slot in (1, 2) for piece in request_frame(Request(1, slot)))
    with member(server.port) as connection:
        connection.sendall(said)
        expected = b"".join(piece for slot in (1, 2) for piece in reply_frame(Reply(1, slot)))
        assert exactly(connection, len(expected)) == expected


def test_a_server_goes_on_when_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on processes, which counts those of all tests: a mock in its place."""
    with serving() as server:
        with monkeypatch.context() as patch:

            def start(_: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr(threading.Thread, "start", start)
            with stranger(server.port) as connection:
                assert is_hung_up(connection)
        assert not server._guests._strangers
        assert serves(server)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["admit", "rest", "work", "leave"]), st.integers(0, 7)), max_size=60
    )
)
def test_the_bounds_on_guests_hold(steps: list[tuple[str, int]]) -> None:
    guests, channels = wire_guests.Guests(), [Recorder() for _ in range(8)]
    kinds = [guests._strangers, guests._idle, guests._busy]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_guests, "MAX_STRANGERS", 2)
        patch.setattr(wire_guests, "MAX_KNOWN", 3)
        for step, number in steps:
            if step == "admit":
                channels[number] = Recorder()
            getattr(guests, step)(channels[number])
            inside = [channel for kind in kinds for channel in kind]
            assert len(guests._strangers) <= 2
            assert len(guests._idle) + len(guests._busy) <= 3
            assert len(inside) == len(set(inside))
            assert not any(channel.is_hung_up for channel in inside)  # who is sent away is forgotten
    left = [channel for kind in kinds for channel in kind]
    guests.close()
    assert all(channel.is_hung_up for channel in left)
    assert not guests.rest(channels[0])
    assert not guests.work(channels[0])


class Recorder(Channel):
    """A channel without a connection."""

    def __init__(self) -> None:
        self.is_hung_up = False

    def hang_up(self) -> None:
        self.is_hung_up = True
