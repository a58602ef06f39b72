"""Reading with patience: what a shared filesystem refuses for a moment is tried again before it is an error.

A server that restarts or a path that fails over shows as EIO, ESTALE or ETIMEDOUT. A stale handle stays stale, however
often it is asked: so a file is opened anew before each further try.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, TypeVar

import stamina

from hpctrain.errors import ConfigError

PATIENCE_VARIABLE: Final = "HPCTRAIN_IO_PATIENCE_S"
"""Environment variable: for how many seconds a read that fails is tried again; 0: not at all."""
PATIENCE_S: Final = 60.0
"""The same without the variable: a server that restarts is back by then, and nothing has been taken for a hang."""
MAX_TRIES: Final = 25

_PASSING: Final = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN)
_QUIET: Final = logging.NullHandler()
_T = TypeVar("_T")
_P = ParamSpec("_P")


def patiently(action: Callable[[], _T], on_retry: Callable[[OSError], None] | None = None) -> _T:
    """What `action` returns; while it fails with EIO, ESTALE, ETIMEDOUT or EAGAIN it is tried again.

    The second try follows at once, the further ones after pauses that double, with jitter: at most `MAX_TRIES` in about
    `PATIENCE_S` (`PATIENCE_VARIABLE`). Before each, `on_retry` is called with the error; what it raises counts as the
    outcome of that try. In the end the last error is raised, with the tries and seconds in its `strerror`; other errors
    pass at once. A `ConfigError` tells that the variable is not a number of seconds.
    """
    try:
        return action()  # nearly always: without the cost of what follows
    except OSError as error:
        return _insist(action, on_retry, error)


def is_passing(error: Exception) -> bool:
    """Whether an error of storage may be over in a moment."""
    return isinstance(error, OSError) and error.errno in _PASSING


class OpenFiles:
    """Files open for reading: each is opened at first use, and anew after an error that may pass.

    `open_file` gives a descriptor. `warn` is told once per file that it had to be read again. Safe to share between
    threads.
    """

    def __init__(
        self, open_file: Callable[[Path], int], warn: Callable[[str], None] = lambda message: None
    ) -> None:
        self._open_file, self._warn = open_file, warn
        self._descriptors: dict[Path, int] = {}
        self._warned: set[Path] = set()
        self._lock = threading.Lock()

    def read(
        self, path: Path, action: Callable[Concatenate[int, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """What `action` makes of the file's descriptor, with the patience of `patiently`; raises what it raises.

        A retry of another thread may put the file that has the name now behind the descriptor at any moment.
        """
        try:
            return action(self._descriptor(path), *args, **kwargs)
        except OSError as error:
            return _insist(
                lambda: action(self._descriptor(path), *args, **kwargs),
                lambda error: self._reopen(path, error),
                error,
            )

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        with self._lock:
            descriptors, self._descriptors = self._descriptors, {}
        for descriptor in descriptors.values():
            os.close(descriptor)

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            descriptor = self._descriptors.get(path)
            if descriptor is None:
                descriptor = self._descriptors[path] = self._open_file(path)
            return descriptor

    def _reopen(self, path: Path, error: OSError) -> None:
        """Put the file that `path` names now behind its descriptor.

        Its number stays (dup2), so a thread that is reading from it is not cut off: its call ends with the old file.
        """
        with self._lock:
            is_first = path not in self._warned
            self._warned.add(path)
        if is_first:
            self._warn(f"{path}: {error.strerror} (errno {error.errno}) while reading; trying again")
        with self._lock:
            descriptor = self._descriptors.get(path)
            if descriptor is not None:
                again = self._open_file(path)
                os.dup2(again, descriptor, inheritable=False)
                os.close(again)


def _insist(action: Callable[[], _T], on_retry: Callable[[OSError], None] | None, last: OSError) -> _T:
    """After a first try that ended with `last`."""
    if not is_passing(last):
        raise last
    began_s, tries, patience_s = time.monotonic(), 1, _patience_s()

    def again() -> _T:
        nonlocal tries, last
        tries += 1
        try:
            if on_retry is not None:
                on_retry(last)
            return action()
        except OSError as error:
            last = error
            raise

    # Without a handler, logging would write stamina's own words to standard error for every single try.
    logging.getLogger("stamina").addHandler(_QUIET)
    try:
        if patience_s == 0:
            raise last
        return _caller(patience_s)(is_passing, again)
    except OSError as error:
        if not is_passing(error):
            raise
        words = f"{error.strerror} ({tries} tries in {time.monotonic() - began_s:.1f} s)"
        raise OSError(error.errno, words, error.filename) from error


def _caller(patience_s: float) -> stamina.RetryingCaller:
    """With the usual patience, pauses of 0.1, 0.2, ... 5 s and up to a second more."""
    return stamina.RetryingCaller(
        attempts=MAX_TRIES - 1,
        timeout=patience_s,
        wait_initial=patience_s / 600,
        wait_max=patience_s / 12,
        wait_jitter=patience_s / 60,
    )


def _patience_s() -> float:
    text = os.environ.get(PATIENCE_VARIABLE, str(PATIENCE_S))
    try:
        patience_s = float(text)
    except ValueError:
        patience_s = math.nan
    if not 0 <= patience_s < math.inf:
        raise ConfigError(
            f"{PATIENCE_VARIABLE} is {text!r}: give a number of seconds, 0 for no further tries"
        )
    return patience_s
