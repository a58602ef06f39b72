"""A child process for what a damaged HDF5 file may bring down: libhdf5 crashes on some, loops, or asks for all memory.

It answers calls one after the other. When it dies or falls silent, the call fails, and the next one gets a new child.
What passes between the two is pickled by these processes themselves, through a pipe that nobody else has.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Final, ParamSpec, TypeVar

import hpctrain
from hpctrain.errors import DataError, HpctrainError
from hpctrain.h5.retry import PATIENCE_VARIABLE

P = ParamSpec("P")
T = TypeVar("T")

_START_TIMEOUT_S: Final = 120.0  # Python and its libraries, read from a shared filesystem by many
_CALL_TIMEOUT_S: Final = 300.0  # the chunk table of a large file on a busy disk or a tape's cache
_EXTRA_MEMORY_BYTES: Final = 8 << 30
"""Address space the child may add to what Python and its libraries take."""


class Child:
    """The process; started by the first call, ended by `close` or on leaving the `with` block. For one thread."""

    def __init__(self, call_timeout_s: float = _CALL_TIMEOUT_S) -> None:
        self._call_timeout_s = call_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """What a function of a module returns there, or the `HpctrainError` that it raises.

        Raises `DataError`, saying so, when the child crashes or takes too long.
        """
        try:
            pipe = self._started()
            pipe.send((function.__module__, function.__qualname__, arguments, named))
            if not pipe.poll(self._call_timeout_s):
                raise DataError(f"looking at it took longer than {self._call_timeout_s:g} s")
            worked, answer = pipe.recv()
        except (EOFError, OSError) as error:
            cause = self._cause_of_death()
            self.close()
            raise DataError(cause) from error
        except BaseException:
            self.close()
            raise
        if not worked:
            raise answer
        return answer  # type: ignore[no-any-return]  # it passed through a pipe

    def kill(self) -> None:
        """End the process from another thread: a call that is under way fails."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process; a later call starts another."""
        if self._pipe is not None and self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.wait()
        self._pipe = self._process = None

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> Connection:
        if self._pipe is None:
            self._pipe, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # what the C library says of a broken heap is no news
                    pass_fds=[theirs.fileno()],
                    env=_environment(),
                )
            if not self._pipe.poll(_START_TIMEOUT_S):
                self.close()
                raise DataError(f"a process to look at files did not start within {_START_TIMEOUT_S:g} s")
            self._pipe.recv()
        return self._pipe

    def _cause_of_death(self) -> str:
        code = self._process.wait(_START_TIMEOUT_S) if self._process is not None else 0
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"libhdf5 crashes on it ({how})"


def _environment() -> dict[str, str]:
    """That of this process, with imports from where this one has them, and without thread pools (address space)."""
    root = str(Path(hpctrain.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    # A disk that is asked again and again for each bad sector would make one file take hours.
    patience = {PATIENCE_VARIABLE: "1", **os.environ}
    return patience | {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}


def _serve(pipe: Connection) -> None:
    pipe.send("ready")
    while True:
        module, name, arguments, named = pipe.recv()
        function = getattr(importlib.import_module(module), name)
        try:
            answer = (True, function(*arguments, **named))
        except HpctrainError as error:
            answer = (False, error)
        except MemoryError:
            answer = (False, DataError(f"needs more than {_EXTRA_MEMORY_BYTES >> 20} MiB of memory"))
        pipe.send(answer)


def _limit_resources() -> None:
    """Bound the address space; and leave no core file of a crash that is expected."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    wanted = pages * resource.getpagesize() + _EXTRA_MEMORY_BYTES
    for kind, value in ((resource.RLIMIT_AS, wanted), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    _limit_resources()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        _serve(Connection(int(sys.argv[1])))
