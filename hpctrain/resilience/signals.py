"""Being asked to leave, and dying with the parent.

A signal only sets a flag. The loop reduces the flag over all ranks at a step boundary, so that all leave
together; nothing collective ever runs inside a handler. The flag is polled in every phase.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from hpctrain.errors import PeerError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


class StopFlag:
    """Set by the first stop signal and never cleared; further signals are only noted in `seen`.

    Children started by `subprocess` get the default handlers back (exec resets caught signals).
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether anyone asked to leave."""
        return bool(self.seen)

    @property
    def signal_name(self) -> str | None:
        """The first signal that came, such as `SIGTERM`."""
        return self.seen[0] if self.seen else None

    def install(self) -> None:
        """Take over the stop signals (main thread only); a second call changes nothing."""
        for number in STOP_SIGNALS:
            if number not in self._previous:
                self._previous[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Give the signals back to the handlers found by `install`; the flag stays as it is."""
        for number, handler in self._previous.items():
            # A handler that was not installed from Python reads as None and cannot be put back by Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen.append(signal.Signals(number).name)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel SIGKILL this process when its parent ends (Linux; elsewhere the watchdog checks).

    Args:
        parent_pid: the parent expected; raises `PeerError` where it is gone already. None: whoever it is now.
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected:  # it went before the request was made: no signal would ever come
        raise PeerError(f"the launcher (pid {expected}) ended while this rank was starting; run again")


def become_subreaper() -> bool:
    """Make orphaned descendants children of this process, so that none escapes. False: not supported here."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def parent_death_request() -> Callable[[], None]:
    """For `subprocess.Popen(preexec_fn=...)`: the child will be SIGKILLed when this process ends.

    Everything is looked up now, in the parent: between fork and exec a child may hardly do anything.
    """
    parent_pid, prctl = os.getpid(), _libc_prctl()

    def request() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)

    return request


def _prctl(option: int, argument: int) -> bool:
    prctl = _libc_prctl()
    return prctl is not None and prctl(option, ctypes.c_ulong(argument), 0, 0, 0) == 0


def _libc_prctl() -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):  # not Linux
        return None
    return function
