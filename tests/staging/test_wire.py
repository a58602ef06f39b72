"""Client and server that both keep to the protocol."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hpctrain.errors import StorageError
from hpctrain.staging.wire import (
    ERROR,
    ERROR_BYTES,
    MAX_REQUEST_BYTES,
    Client,
    PeerFailure,
    Reply,
    Request,
    Server,
)
from hpctrain.staging.wire import guests as wire_guests
from hpctrain.staging.wire import server as wire_server
from tests.staging.wire_support import SECRET, asking, echo, member, serving, stranger, wait_until, within

LARGEST = (1 << 64) - 1


def text_of(reply: Reply) -> str:
    assert reply.status == ERROR
    return bytes(reply.body).decode()


def test_what_is_asked_arrives_and_so_does_the_answer() -> None:
    with serving() as server, asking(server.port) as client:
        reply = client.call(Request(7, LARGEST, 3, b"abc"), 3)
        assert (reply.status, reply.digest, reply.arg, bytes(reply.body)) == (7, LARGEST, 3, b"cba")
        assert client.call(Request(0), 0).body == b""


def test_a_large_answer_lies_in_the_buffer_that_was_given() -> None:
    chunk = np.random.default_rng(0).integers(0, 256, 5_000_000, dtype=np.uint8)
    buffer = np.zeros(chunk.size + 10, np.uint8)
    sizes = []

    def allocate(num_bytes: int) -> np.ndarray:
        sizes.append(num_bytes)
        return buffer[5 : 5 + num_bytes]

    with serving(lambda _: Reply(0, body=chunk.data)) as server, asking(server.port) as client:
        reply = client.call(Request(1), chunk.size, allocate)
    assert np.shares_memory(np.frombuffer(reply.body, np.uint8), buffer)
    assert sizes == [chunk.size]
    assert np.array_equal(buffer[5:-5], chunk)
    assert not buffer[:5].any()
    assert not buffer[-5:].any()


def test_a_large_request_arrives() -> None:
    body = os.urandom(5_000_000)
    with serving() as server, asking(server.port) as client:
        assert bytes(client.call(Request(1, body=body), len(body)).body) == body[::-1]


def test_many_threads_share_a_client_and_get_their_own_answers() -> None:
    threads: set[int] = set()

    def answer(request: Request) -> Reply:
        threads.add(threading.get_ident())
        return echo(request)

    def ask(number: int) -> bool:
        reply = client.call(Request(1, number, body=b"%d" % number), 100)
        return reply.digest == number and bytes(reply.body) == (b"%d" % number)[::-1]

    with serving(answer) as server, asking(server.port) as client, ThreadPoolExecutor(6) as pool:
        assert all(pool.map(ask, range(300)))
    assert len(threads) <= 6  # one connection for each thread that asks, and they are used again


def test_it_connects_again_where_the_server_has_closed_idle_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire_server, "_IDLE_S", 0.05)
    with serving() as server, asking(server.port) as client:
        for number in range(3):
            assert client.call(Request(1, number), 0).digest == number
            wait_until(lambda: not server._guests._idle)


def test_slow_answers_hold_up_nobody_else() -> None:
    go_on = threading.Event()

    def answer(request: Request) -> Reply:
        if request.slot:
            go_on.wait(10)
        return echo(request)

    with serving(answer) as server, asking(server.port) as client, ThreadPoolExecutor(3) as pool:
        slow = [pool.submit(client.call, Request(1, 1), 0) for _ in range(3)]
        wait_until(lambda: len(server._guests._busy) == 3)
        with within(0.2):
            assert client.call(Request(1, 0), 0).digest == 0
        go_on.set()
        assert [one.result(10).digest for one in slow] == [1, 1, 1]


def test_a_call_has_a_deadline_of_its_own_if_it_likes() -> None:
    def answer(request: Request) -> Reply:
        time.sleep(request.arg / 1000)
        return Reply(0)

    with serving(answer) as server, asking(server.port, request_timeout_s=0.1) as client:
        with within(0.1), pytest.raises(PeerFailure, match=r"port \d+: no answer within 0.1 s"):
            client.call(Request(1, arg=400), 0)
        assert client.call(Request(1, arg=300), 0, timeout_s=10).status == 0
        with within(0.05), pytest.raises(PeerFailure, match=r"no answer within 0.05 s"):
            client.call(Request(1, arg=400), 0, timeout_s=0.05)


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (ValueError("no such thing"), "ValueError: no such thing"),
        (OSError(5, "Input/output error", "/x\udcff"), "OSError: [Errno 5] Input/output error: '/x\\udcff'"),
        (OSError("odd name \udcff"), "OSError: odd name ?"),
    ],
)
def test_an_answer_that_fails_is_told_of_and_the_server_goes_on(raised: Exception, text: str) -> None:
    def answer(request: Request) -> Reply:
        if request.op:
            raise raised
        return Reply(0)

    with serving(answer) as server, asking(server.port) as client:
        for _ in range(2):
            assert text_of(client.call(Request(1), 0)) == text
            assert client.call(Request(0), 0).status == 0


def test_the_text_of_an_error_is_bounded() -> None:
    def answer(_: Request) -> Reply:
        raise RuntimeError("x" * 100_000)

    with serving(answer) as server, asking(server.port) as client:
        assert len(client.call(Request(1), 0).body) == ERROR_BYTES


@pytest.mark.parametrize(
    "reply",
    [
        Reply(256),
        Reply(0, digest=-1),
        Reply(0, arg=1 << 64),
        Reply(0, body=memoryview(b"abcdef")[::2]),
        Reply(0, body="text"),  # type: ignore[arg-type]
        None,
    ],
)
def test_an_answer_that_cannot_be_sent_is_an_error(reply: Reply) -> None:
    with serving(lambda _: reply) as server, asking(server.port) as client:
        assert "Error: " in text_of(client.call(Request(1), 100))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(1, body=bytes(MAX_REQUEST_BYTES + 1)), "67108865 bytes, 67108864 are the bound"),
        (Request(256), "256, 0, 0"),
        (Request(1, slot=-1), "1, -1, 0"),
        (Request(1, arg=1 << 64), "1, 0, 18446744073709551616"),
    ],
)
def test_a_request_that_cannot_be_sent_is_refused(request_: Request, words: str) -> None:
    with serving() as server, asking(server.port) as client:
        with pytest.raises(ValueError, match=words):
            client.call(request_, 0)
        assert not server._guests._idle  # nothing was sent


def test_an_answer_larger_than_allowed_is_refused_and_never_allocated() -> None:
    with serving() as server, asking(server.port) as client:
        with pytest.raises(PeerFailure, match="an answer of 10 bytes where 9 are the most"):
            client.call(Request(1, body=bytes(10)), 9, lambda _: pytest.fail("allocated"))
        assert len(client.call(Request(1, body=bytes(10)), 10).body) == 10


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_one_port_on_several_addresses_ipv6_too() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    with serving(echo, "127.0.0.1", "::1", "127.0.0.2") as server:
        for host in ("127.0.0.1", "::1", "127.0.0.2"):
            with asking(server.port, host=host) as client:
                assert client.call(Request(1, 5), 0).digest == 5


def test_an_address_that_this_host_does_not_have() -> None:
    with pytest.raises(StorageError, match=r"cannot listen on 127.0.0.1, 192.0.2.77: Cannot assign"):
        Server(SECRET, ["127.0.0.1", "192.0.2.77"], echo)


def test_names_are_not_looked_up() -> None:
    with (
        serving() as server,
        asking(server.port, host="localhost") as client,  # every host knows this name
        pytest.raises(PeerFailure, match=rf"localhost port {server.port}: "),
    ):
        client.call(Request(1), 0)


def test_a_secret_that_is_hardly_one_is_refused_and_not_told() -> None:
    with pytest.raises(ValueError, match="a secret of 7 bytes, 16 are the least") as caught:
        Server(b"hunter2", ["127.0.0.1"], echo)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValueError, match="a secret of 0 bytes"):
        Client("127.0.0.1", 1, b"")


def test_a_server_closes_at_once_whatever_goes_on() -> None:
    go_on = threading.Event()

    def answer(request: Request) -> Reply:
        if request.slot:
            go_on.wait(10)
        return Reply(0)

    with (
        serving(answer) as server,
        asking(server.port) as client,
        stranger(server.port) as silent,
        member(server.port) as idle,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(client.call, Request(1, 1), 0)
        wait_until(lambda: (len(server._guests._busy), len(server._guests._idle)) == (1, 1))
        with within(0.25):
            server.close()
            with pytest.raises(PeerFailure, match=r"hung up|refused"):
                waiting.result(5)
        silent.settimeout(5)
        while silent.recv(100):
            pass
        assert idle.recv(1) == b""
        with pytest.raises(PeerFailure, match="Connection refused"):
            client.call(Request(1), 0)
        go_on.set()
        wait_until(lambda: not server._guests._busy)
        server.close()  # twice does no harm


def test_a_client_closes_at_once_and_wakes_who_waits() -> None:
    go_on = threading.Event()

    def answer(request: Request) -> Reply:
        if request.slot:
            go_on.wait(10)
        return Reply(0)

    with serving(answer) as server, asking(server.port) as client, ThreadPoolExecutor(2) as pool:
        client.call(Request(1), 0)
        waiting = [pool.submit(client.call, Request(1, 1), 0) for _ in range(2)]
        wait_until(lambda: len(server._guests._busy) == 2)
        with within(0.1):
            client.close()
            for one in waiting:  # one had a connection of its own, one that had been used before
                with pytest.raises(PeerFailure):
                    one.result(5)
        with pytest.raises(PeerFailure, match="closed by this side"):
            client.call(Request(1), 0)
        go_on.set()


def test_the_client_idle_longest_makes_room_and_connects_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_guests, "MAX_KNOWN", 3)
    with serving() as server:
        clients = [Client("127.0.0.1", server.port, SECRET) for _ in range(8)]
        for _ in range(2):
            for number, client in enumerate(clients):
                assert client.call(Request(1, number), 0).digest == number
        assert len(server._guests._idle) <= 3
        for client in clients:
            client.close()


def test_a_server_that_works_for_as_many_as_it_can_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_guests, "MAX_KNOWN", 1)
    go_on = threading.Event()

    def answer(_: Request) -> Reply:
        go_on.wait(10)
        return Reply(0)

    with serving(answer) as server, asking(server.port) as client, ThreadPoolExecutor(1) as pool:
        working = pool.submit(client.call, Request(1), 0)
        wait_until(lambda: len(server._guests._busy) == 1)
        with asking(server.port) as other, pytest.raises(PeerFailure, match=r"hung up|reset|pipe"):
            other.call(Request(1), 0)
        go_on.set()
        assert working.result(5).status == 0
