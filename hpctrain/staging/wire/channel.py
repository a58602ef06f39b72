"""Frames on a TCP connection: fixed headers, bounds on every length, and a deadline for the whole of every wait.

A frame is a header and a body. The header (little endian) is the magic number, a kind (the operation of a request, the
status of a reply), two numbers, the length of the body, and the CRC-32 of all that: what was damaged is never taken for
a length. Bodies are as good as the digests that those who ask hold against them.

A peer that sends or takes a byte now and then holds nobody up: what is waited for has one deadline, by a clock that
cannot be set. Signals do not prolong it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import select
import socket
import struct
import time
import zlib
from typing import Final

from hpctrain.h5.chunks import Allocate, fresh
from hpctrain.h5.filters import Buffer

ERROR: Final = 255
"""Status of a reply: the server could not answer; the body says why, in `ERROR_BYTES` at most."""
ERROR_BYTES: Final = 4096
MAX_REQUEST_BYTES: Final = 64 << 20
"""Of the body of a request."""

_MAGIC: Final = b"HPS1"
_FIELDS: Final = struct.Struct("<4sBQQQ")
_CHECK: Final = struct.Struct("<I")
_HEADER_BYTES: Final = _FIELDS.size + _CHECK.size
_LONGEST_WAIT_MS: Final = (1 << 31) - 1
# A host that died, or was cut off, is found out within about a minute.
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}


class PeerFailure(OSError):
    """Another process does not answer, or not as it should; the text says which and how."""


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """What is asked: an operation (0 to 255), a slot, a number (both unsigned, 64 bits), and bytes."""

    op: int
    slot: int = 0
    arg: int = 0
    body: bytes = b""


@dataclasses.dataclass(frozen=True, eq=False)
class Reply:
    """The answer: a status (0 to 254, or `ERROR`), a digest, a number (both unsigned, 64 bits), and bytes."""

    status: int
    digest: int = 0
    arg: int = 0
    body: Buffer = b""


Frame = list[memoryview]
"""The pieces of a frame that are still to be sent."""


class Deadline:
    """A moment until which something must be done."""

    def __init__(self, timeout_s: float) -> None:
        self._at_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds left. Raises `TimeoutError` where none are."""
        left_s = self._at_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        return left_s


def request_frame(request: Request) -> Frame:
    """Raises `ValueError` for a body above the bound, and for numbers that do not fit."""
    if len(request.body) > MAX_REQUEST_BYTES:
        raise ValueError(f"a request of {len(request.body)} bytes, {MAX_REQUEST_BYTES} are the bound")
    return _frame(request.op, request.slot, request.arg, request.body)


def reply_frame(reply: Reply) -> Frame:
    """Raises `ValueError` for numbers that do not fit; `TypeError` for a body that is not contiguous bytes."""
    return _frame(reply.status, reply.digest, reply.arg, reply.body)


class Channel:
    """One connection, either side. Used by one thread at a time, but for `hang_up`. All methods raise `OSError`.

    In particular `TimeoutError` at a deadline, `ConnectionError` where the other side hung up, and `PeerFailure` where
    it does not keep to the protocol.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket = connection
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        self._header = memoryview(bytearray(_HEADER_BYTES))

    def server_name(self, *, is_server: bool) -> bytes:
        """Address and port of the server, which both sides see alike."""
        host, port = (self._socket.getsockname() if is_server else self._socket.getpeername())[:2]
        return f"{host.partition('%')[0]} {port}".encode()  # a scope is known to one side only

    def send(self, frame: Frame, deadline: Deadline) -> None:
        """All of the pieces; they are taken out of the list as they go."""
        while frame:
            try:
                sent = self._socket.sendmsg(frame)
            except BlockingIOError:
                _wait(self._writable, deadline)
                continue
            while frame and sent >= len(frame[0]):
                sent -= len(frame.pop(0))
            if frame:
                frame[0] = frame[0][sent:]

    def receive(self, num_bytes: int, deadline: Deadline) -> bytes:
        """Exactly so many bytes."""
        out = fresh(num_bytes)
        self._fill(out.data, deadline)
        return out.tobytes()

    def receive_request(self, idle_s: float, timeout_s: float) -> Request:
        """Server: wait so long for the next request to begin, then so long for all of it."""
        _wait(self._readable, Deadline(idle_s))
        deadline = Deadline(timeout_s)
        op, slot, arg, size = self._receive_header(deadline)
        if size > MAX_REQUEST_BYTES:
            raise PeerFailure(f"a request of {size} bytes, {MAX_REQUEST_BYTES} are the bound")
        return Request(op, slot, arg, self.receive(size, deadline) if size else b"")

    def receive_reply(self, max_bytes: int, allocate: Allocate, deadline: Deadline) -> Reply:
        """Client: the answer, its body in what `allocate` gave.

        A `ConnectionError` means that there was no answer: nothing was allocated.
        """
        _wait(self._readable, deadline)
        status, digest, arg, size = self._receive_header(deadline)
        if status == ERROR:
            max_bytes, allocate = max(max_bytes, ERROR_BYTES), fresh
        if size > max_bytes:
            raise PeerFailure(f"an answer of {size} bytes where {max_bytes} are the most")
        if not size:
            return Reply(status, digest, arg)
        body = allocate(size).data
        try:
            self._fill(body, deadline)
        except ConnectionError as error:
            raise PeerFailure(f"cut off in the middle of an answer of {size} bytes") from error
        return Reply(status, digest, arg, body)

    def hang_up(self) -> None:
        """End the connection, by any thread: whoever waits in another method gets an error at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and give the descriptor back."""
        self.hang_up()
        self._socket.close()

    def _receive_header(self, deadline: Deadline) -> tuple[int, int, int, int]:
        self._fill(self._header, deadline)
        magic, kind, first, second, size = _FIELDS.unpack_from(self._header)
        (check,) = _CHECK.unpack_from(self._header, _FIELDS.size)
        if magic != _MAGIC or check != zlib.crc32(self._header[: _FIELDS.size]):
            raise PeerFailure("what was received is no frame of this protocol, or a damaged one")
        return kind, first, second, size

    def _fill(self, view: memoryview, deadline: Deadline) -> None:
        while view:
            try:
                received = self._socket.recv_into(view)
            except BlockingIOError:
                _wait(self._readable, deadline)
                continue
            if not received:
                raise ConnectionResetError("hung up")
            view = view[received:]


def _frame(kind: int, first: int, second: int, body: Buffer) -> Frame:
    view = memoryview(body)
    try:
        fields = _FIELDS.pack(_MAGIC, kind, first, second, view.nbytes)
    except struct.error as error:
        raise ValueError(f"numbers that fit no header: {kind}, {first}, {second}") from error
    header = memoryview(fields + _CHECK.pack(zlib.crc32(fields)))
    return [header, view.cast("B")] if view.nbytes else [header]


def _wait(poll: select.poll, deadline: Deadline) -> None:
    """Until something can be done, if only to learn that the other side hung up."""
    wait_ms = min(math.ceil(deadline.left_s() * 1000), _LONGEST_WAIT_MS)
    if not poll.poll(wait_ms):
        raise TimeoutError("the deadline has passed")
