"""Frames between two ends of a connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpctrain.h5.chunks import fresh
from hpctrain.staging.wire import Reply, Request
from hpctrain.staging.wire.channel import Channel, Deadline, reply_frame, request_frame
from tests.staging.wire_support import DEADLINE_S

kinds = st.integers(0, 255)
numbers = st.integers(0, (1 << 64) - 1)
bodies = st.binary(max_size=3000)


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[Channel, Channel]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = Channel(socket.create_connection(listener.getsockname()))
        other = Channel(listener.accept()[0])
    yield one, other
    one.close()
    other.close()


@settings(deadline=None, max_examples=60)
@given(request=st.builds(Request, kinds, numbers, numbers, bodies))
def test_requests(ends: tuple[Channel, Channel], request: Request) -> None:
    ends[0].send(request_frame(request), Deadline(DEADLINE_S))
    assert vars(ends[1].receive_request(DEADLINE_S, DEADLINE_S)) == vars(request)


@settings(deadline=None, max_examples=60)
@given(
    replies=st.lists(st.builds(Reply, kinds, numbers, numbers, bodies), max_size=4),
    make=st.sampled_from([bytes, bytearray, memoryview, lambda body: np.frombuffer(body, "<u1").data]),
)
@example(
    replies=[Reply(0, body=b"12345678")], make=lambda body: np.frombuffer(body, "<u4").reshape(2, 1).data
)
@example(replies=[Reply(0)], make=lambda body: np.zeros((0, 3), np.int64).data)
def test_replies(ends: tuple[Channel, Channel], replies: list[Reply], make) -> None:  # type: ignore[no-untyped-def]
    for reply in replies:
        content = make(reply.body)
        ends[0].send(reply_frame(Reply(reply.status, reply.digest, reply.arg, content)), Deadline(DEADLINE_S))
    for reply in replies:
        received = ends[1].receive_reply(3000, fresh, Deadline(DEADLINE_S))
        assert (received.status, received.digest, received.arg) == (reply.status, reply.digest, reply.arg)
        assert bytes(received.body) == bytes(reply.body)


def test_more_than_the_kernel_holds(ends: tuple[Channel, Channel]) -> None:
    body = np.random.default_rng(0).integers(0, 256, 8_000_000, dtype=np.uint8)
    frame = reply_frame(Reply(0, body=body.data))
    thread = threading.Thread(target=ends[0].send, args=(frame, Deadline(DEADLINE_S)))
    thread.start()
    received = ends[1].receive_reply(body.size, fresh, Deadline(DEADLINE_S))
    thread.join(DEADLINE_S)
    assert np.array_equal(np.frombuffer(received.body, np.uint8), body)
    assert frame == []
