"""The agent of this node, as the rank that started it sees it."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

import numpy.typing as npt

from hpctrain.errors import ConfigError, HangError, StorageError
from hpctrain.staging.message import Arrays, receive_message, send_message

_END_S: Final = 5.0

Message = tuple[dict[str, Any], Arrays]


class AgentProcess:
    """Starts an agent, talks to it through pipes, and ends it. It ends by itself with this process."""

    def __init__(self) -> None:
        # no preexec_fn: without one the child comes about by vfork, which is safe beside MPI
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hpctrain.staging.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the terminal is for the supervisor
        )
        self._replies: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="agent", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(
        self,
        head: Mapping[str, Any],
        arrays: Mapping[str, npt.NDArray[Any]] | None = None,
        timeout_s: float = 60.0,
    ) -> Message:
        """Tell the agent something, and wait for its answer.

        Raises `ConfigError` and `StorageError` as the agent does, `ConnectionError` where it has ended, and `HangError`
        where it does not answer in time: then it is killed, lest others wait for it too.
        """
        # an agent that hangs does not empty the pipe either
        threading.Thread(target=self._send, args=(head, arrays), name="to_agent", daemon=True).start()
        try:
            reply = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            self._process.kill()
            raise HangError(f"the staging agent did not answer for {timeout_s:g} s") from None
        if reply is None:
            raise ConnectionError("the staging agent has ended (see the rank's log)")
        if "error" in reply[0]:
            kind = ConfigError if reply[0]["error"] == "ConfigError" else StorageError
            raise kind(reply[0]["message"])
        return reply

    def close(self) -> None:
        """End the agent; what is staged stays."""
        with contextlib.suppress(OSError):
            _stream(self._process.stdin).close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # it may be in a write to a disk that hangs: it ends when that returns

    def _send(self, head: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]] | None) -> None:
        try:
            send_message(_stream(self._process.stdin), head, arrays)
        except (OSError, ValueError):  # it has ended, or was closed
            self._replies.put(None)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), _stream(self._process.stdout) as stream:
            while (message := receive_message(stream)) is not None:
                self._replies.put(message)
        self._replies.put(None)


def _stream(stream: Any) -> BinaryIO:
    return stream  # type: ignore[no-any-return]
