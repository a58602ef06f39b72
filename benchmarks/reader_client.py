"""The processes of `reader_side`, from outside: started, asked, and ended whatever happens."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.reader_side import FAMILIES, MODULES
from hpctrain.errors import DataError

INSTALL: Final = "not installed: pip install hpctrain[peers]"
_END_S: Final = 5.0
_LOG_BYTES: Final = 2000
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def why_absent(family: str) -> str | None:
    """Why a family cannot be measured here; None where it can."""
    module = MODULES.get(family)
    return None if module is None or importlib.util.find_spec(module) else INSTALL


class SideError(DataError):
    """A side failed, said nothing in time, or ended."""


class Client:
    """The process of one family.

    It leads a process group of its own, so that the workers of a peer end with it.
    """

    def __init__(self, family: str, folders: list[Path], log: Path) -> None:
        self.family = family
        self._log = log
        command = [sys.executable, "-P", "-m", "benchmarks.reader_side", family, *map(str, folders)]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
        environment |= dict.fromkeys(_ONE_THREAD, "1")
        # Peers leave locks and sockets there; not below `log`, which may be too long a path for a socket.
        self._temporary = tempfile.TemporaryDirectory(prefix="hpctrain-side-")
        environment["TMPDIR"] = self._temporary.name
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env=environment,
                start_new_session=True,
            )
        self._pending = b""

    def ask(self, order: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to an order; raises `SideError`."""
        what = f"{order.get('side', self.family)}: {order['do']}"
        assert self._process.stdin is not None  # a pipe was asked for
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
        except (OSError, ValueError) as error:  # ended, or closed by us
            raise SideError(f"{what}: its process is gone: {self._last_words()}") from error
        answer: dict[str, Any] = json.loads(self._line(what, time.monotonic() + timeout_s))
        if "error" in answer:
            raise SideError(f"{what}: {answer['error']}")
        return answer

    def _line(self, what: str, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    self.close(0)  # a late answer would be taken for that to the next order
                    raise SideError(f"{what}: no answer in time: {self._last_words()}")
                part = os.read(descriptor, 1 << 16)
                if not part:
                    raise SideError(f"{what}: its process ended: {self._last_words()}")
                self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _last_words(self) -> str:
        text = self._log.read_bytes()[-_LOG_BYTES:].decode("utf-8", errors="replace").strip()
        return text.splitlines()[-1] if text else "it said nothing"

    def close(self, patience_s: float = _END_S) -> None:
        """End it, and what it started; before it is killed it has some seconds to do so by itself."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_END_S)
        self._temporary.cleanup()


@contextlib.contextmanager
def started(families: Sequence[str], folders: list[Path], logs: Path) -> Iterator[list[Client]]:
    """One process for each family, until the block is left."""
    with contextlib.ExitStack() as ending:
        clients = []
        for family in families:
            clients.append(Client(family, folders, logs / f"{family}.log"))
            ending.callback(clients[-1].close)
        yield clients


def present() -> tuple[list[str], dict[str, str]]:
    """The families that can be measured here, and why the others cannot."""
    reasons = {family: why_absent(family) for family in FAMILIES}
    return (
        [family for family, reason in reasons.items() if reason is None],
        {family: reason for family, reason in reasons.items() if reason is not None},
    )
