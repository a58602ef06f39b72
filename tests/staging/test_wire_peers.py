"""A client whose peer lies, stalls or dies: each is a `PeerFailure` in time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.staging.wire import Client, PeerFailure, Reply, Request
from hpctrain.staging.wire import proof as wire_proof
from hpctrain.staging.wire.channel import Channel, Deadline, reply_frame
from tests.staging.wire_support import (
    DEADLINE_S,
    OTHER_SECRET,
    SECRET,
    after_proof,
    asking,
    scripted,
    serving,
    wait_until,
    within,
)

SAID = b"".join(bytes(piece) for piece in reply_frame(Reply(1, 2, 3, b"0123456789")))
HEADER_BYTES = len(SAID) - 10


def never(num_bytes: int) -> np.ndarray:
    pytest.fail(f"{num_bytes} bytes were allocated for a peer that lies")


def drip(connection: socket.socket, content: bytes) -> None:
    for number in range(len(content)):
        connection.sendall(content[number : number + 1])
        time.sleep(0.02)


def stall(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def failure_of(script: Callable[[socket.socket], None], limit_s: float, **options: float) -> str:
    """What a client says of a server that does what the script says; it must say it within the limit."""
    with scripted(script) as port, asking(port, **options) as client:
        with within(limit_s), pytest.raises(PeerFailure) as caught:
            client.call(Request(1), 10)
        return str(caught.value)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        asking(port) as client,
        within(0.1),
        pytest.raises(PeerFailure, match=rf"{port}: Connection refused"),
    ):
        client.call(Request(1), 0)


def test_nobody_takes_the_connection() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # the kernel takes one more than the backlog, and lets the others wait
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        client = stack.enter_context(asking(listener.getsockname()[1], connect_timeout_s=0.2))
        with within(0.2), pytest.raises(PeerFailure, match=r"no connection within 0.2 s"):
            client.call(Request(1), 0)


@pytest.mark.parametrize(
    "script", [stall, lambda c: drip(c, b"hpctrain stage 1" * 100)], ids=["silent", "drips"]
)
def test_a_server_that_does_not_say_who_it_is(script: Callable[[socket.socket], None]) -> None:
    words = failure_of(script, 0.2, connect_timeout_s=0.2)
    assert "takes connections, but does not say who it is within 0.2 s" in words or "is no agent" in words


def test_the_deadline_of_a_request_holds_for_connecting_too() -> None:
    assert "within 0.2 s" in failure_of(stall, 0.2, request_timeout_s=0.2)


def test_a_server_of_another_kind() -> None:
    words = failure_of(lambda c: c.sendall(b"HTTP/1.1 400 Bad Request\r\nServer: something\r\n\r\n"), 0.1)
    assert "is no agent of this version" in words


def test_a_server_that_hangs_up_before_it_says_anything() -> None:
    assert "hung up" in failure_of(lambda c: None, 0.1)


def test_a_server_of_another_job_learns_nothing_and_neither_does_the_client() -> None:
    asked = []
    with (
        serving(lambda r: asked.append(r) or Reply(0), secret=OTHER_SECRET) as server,
        asking(server.port) as client,
        within(0.1),
        pytest.raises(PeerFailure, match="did not accept the job's secret") as caught,
    ):
        client.call(Request(1), 0)
    assert not asked
    assert "secret of" not in str(caught.value)
    assert SECRET.hex() not in repr(caught.value)


def reflect(connection: socket.socket) -> None:
    """Says that it is an agent, and gives the client its own proof back."""
    connection.sendall(wire_proof._GREETING + bytes(16))
    said = connection.recv(48, socket.MSG_WAITALL)
    connection.sendall(said[16:])
    stall(connection)


def reflect_the_nonce(connection: socket.socket) -> None:
    """Uses the client itself, in the part of the server, to find out what to say."""
    connection.sendall(wire_proof._GREETING + bytes(16))
    said = connection.recv(48, socket.MSG_WAITALL)
    connection.sendall(said[:16] + said[16:32])
    stall(connection)


@pytest.mark.parametrize("script", [reflect, reflect_the_nonce])
def test_a_server_that_only_repeats_what_it_hears(script: Callable[[socket.socket], None]) -> None:
    assert "does not know the job's secret" in failure_of(script, 0.1)


def test_a_port_that_passes_everything_on_to_a_real_agent() -> None:
    """Whoever listens where an agent was cannot stand between its clients and another agent."""
    asked = []

    def pass_on(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as onward:
            threading.Thread(target=pump, args=(onward, connection), daemon=True).start()
            pump(connection, onward)

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                sink.sendall(content)
            sink.shutdown(socket.SHUT_WR)

    with serving(lambda r: asked.append(r) or Reply(0)) as server:
        assert "did not accept the job's secret" in failure_of(pass_on, 0.1)
    assert not asked


@pytest.mark.parametrize("said", [b"", SAID[:1], SAID[: HEADER_BYTES - 1], SAID[:HEADER_BYTES], SAID[:-1]])
def test_an_answer_that_is_cut_off(said: bytes) -> None:
    def cut(connection: socket.socket) -> None:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_RDWR)

    words = failure_of(after_proof(cut), 0.1)
    assert (
        "cut off in the middle of an answer of 10 bytes" if len(said) >= HEADER_BYTES else "hung up"
    ) in words


@pytest.mark.parametrize("said", [b"", SAID[:5], SAID[:HEADER_BYTES], SAID[:-1]])
def test_an_answer_that_stalls(said: bytes) -> None:
    def stall_after(connection: socket.socket) -> None:
        connection.sendall(said)
        stall(connection)

    assert "no answer within 0.2 s" in failure_of(after_proof(stall_after), 0.2, request_timeout_s=0.2)


def test_an_answer_that_drips() -> None:
    words = failure_of(after_proof(lambda c: drip(c, SAID)), 0.2, request_timeout_s=0.2)
    assert "no answer within 0.2 s" in words


def test_signals_do_not_prolong_the_wait() -> None:
    """A timer that fires all the time must not begin the wait anew."""
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        assert "within 0.2 s" in failure_of(after_proof(stall), 0.2, request_timeout_s=0.2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def lying() -> Iterator[tuple[Client, list[bytes]]]:
    """A client of a server that answers with what is put into the list, and stalls after it."""
    content: list[bytes] = []
    with (
        scripted(after_proof(lambda c: (c.sendall(content.pop()), stall(c)))) as port,
        asking(port) as client,
    ):
        yield client, content


@pytest.mark.parametrize("kind", range(8))
def test_a_header_with_a_flipped_bit(kind: int) -> None:
    with lying() as (client, content):
        for place in range(kind, HEADER_BYTES * 8, 8 * 3 + 1):
            damaged = bytearray(SAID)
            damaged[place // 8] ^= 1 << place % 8
            content.append(bytes(damaged))
            with (
                within(0.1),
                pytest.raises(PeerFailure, match="is no frame of this protocol, or a damaged one"),
            ):
                client.call(Request(1), 1 << 60, never)


@pytest.mark.parametrize("size", [11, 1 << 32, 1 << 60, (1 << 64) - 1])
def test_an_answer_that_claims_to_be_huge(size: int) -> None:
    fields = struct.pack("<4sBQQQ", b"HPS1", 0, 0, 0, size)
    with lying() as (client, content):
        content.append(fields + struct.pack("<I", zlib.crc32(fields)))
        with (
            within(0.1),
            pytest.raises(PeerFailure, match=f"an answer of {size} bytes where 10 are the most"),
        ):
            client.call(Request(1), 10, never)


@settings(max_examples=30, deadline=None)
@given(noise=st.binary(max_size=200))
def test_noise_after_the_proof(noise: bytes) -> None:
    def say(connection: socket.socket) -> None:
        connection.sendall(noise)
        connection.shutdown(socket.SHUT_RDWR)

    failure_of(after_proof(say), 0.5)


@settings(max_examples=30, deadline=None)
@given(noise=st.binary(max_size=200), is_greeted=st.booleans())
def test_noise_in_place_of_a_proof(noise: bytes, is_greeted: bool) -> None:
    def say(connection: socket.socket) -> None:
        connection.sendall(wire_proof._GREETING * is_greeted + noise)
        connection.shutdown(socket.SHUT_WR)
        stall(connection)

    failure_of(say, 0.5)


AGENT = f"""
import time
from hpctrain.staging.wire import Reply, Server
server = Server({SECRET!r}, ["127.0.0.1"], lambda request: Reply(request.op))
print(server.port, flush=True)
time.sleep(60)
"""


def test_an_agent_that_is_stopped_goes_on_and_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        try:
            assert agent.stdin is not None
            assert agent.stdout is not None
            agent.stdin.write(AGENT.encode())
            agent.stdin.close()
            port = int(agent.stdout.readline())
            with asking(port, request_timeout_s=0.2) as used, asking(port, request_timeout_s=0.2) as new:
                assert used.call(Request(7), 0, timeout_s=DEADLINE_S).status == 7
                os.kill(agent.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, agent.pid, os.WSTOPPED)
                for client in (used, new):
                    with within(0.2), pytest.raises(PeerFailure, match=r"within 0.2 s"):
                        client.call(Request(7), 0)
                os.kill(agent.pid, signal.SIGCONT)
                for client in (used, new):
                    assert client.call(Request(7), 0, timeout_s=DEADLINE_S).status == 7
                agent.kill()
                agent.wait(DEADLINE_S)
                for client in (used, new):
                    with within(0.2), pytest.raises(PeerFailure, match="Connection refused"):
                        client.call(Request(7), 0)
        finally:
            agent.kill()


def test_failures_leave_no_descriptors_behind() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    with serving(secret=OTHER_SECRET) as other, serving() as server, asking(server.port) as good:
        good.call(Request(1), 0)
        before = count()
        with (
            asking(other.port) as bad,
            asking(server.port, host="no number") as lost,
            asking(server.port) as small,
        ):
            for _ in range(20):
                for client in (bad, lost, small):
                    with pytest.raises(PeerFailure):
                        client.call(Request(1, body=b"ab"), 1)
        wait_until(lambda: count() == before)


def test_the_channel_of_a_call_that_failed_is_not_used_again() -> None:
    """An answer that comes too late must not be taken for that to the next request."""

    def answer(request: Request) -> Reply:
        time.sleep(request.arg / 1000)
        return Reply(0, request.slot)

    with serving(answer) as server, asking(server.port) as client:
        client.call(Request(1, 1), 0)
        with pytest.raises(PeerFailure):
            client.call(Request(1, 2, arg=150), 0, timeout_s=0.05)
        time.sleep(0.15)
        assert client.call(Request(1, 3), 0).digest == 3


def test_an_answer_that_is_cut_off_on_a_connection_that_was_good_is_not_asked_for_again() -> None:
    """It may have been allocated from what is counted: once only."""
    content, sizes = [SAID[:-1], SAID], []

    def allocate(num_bytes: int) -> np.ndarray:
        sizes.append(num_bytes)
        return np.zeros(num_bytes, np.uint8)

    def say(connection: socket.socket) -> None:
        connection.sendall(content.pop())
        if len(content) == 0:
            connection.shutdown(socket.SHUT_RDWR)

    with scripted(after_proof(say)) as port, asking(port) as client:
        assert client.call(Request(1), 10, allocate).arg == 3
        with pytest.raises(PeerFailure, match="cut off in the middle of an answer of 10 bytes"):
            client.call(Request(1), 10, allocate)
    assert sizes == [10, 10]


def test_a_deadline() -> None:
    deadline = Deadline(0.05)
    assert 0 < deadline.left_s() <= 0.05
    time.sleep(0.06)
    with pytest.raises(TimeoutError):
        deadline.left_s()


def test_hanging_up_in_another_thread_ends_a_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        channel = Channel(socket.create_connection(listener.getsockname()))
        threading.Timer(0.05, channel.hang_up).start()
        with within(0.1), pytest.raises(ConnectionError):
            channel.receive(1, Deadline(DEADLINE_S))
        channel.close()
        channel.hang_up()  # harmless
