"""No process of an attempt outlives it: finding, signalling and ending what was started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from hpctrain.errors import HangError
from hpctrain.resilience.attempts import read_json
from hpctrain.resilience.signals import become_subreaper

_END_TIMEOUT_S = 10.0
_POLL_S = 0.01


class Descendants:
    """All processes that come to descend from this one after the object is made.

    As a subreaper this process inherits orphans, so that a rank whose mpirun died is still found.
    """

    def __init__(self) -> None:
        become_subreaper()
        self._started: set[int] = set()
        self._apart: set[int] = set()
        self._before = {process.pid for process in psutil.Process().children(recursive=True)}

    def started(self, pid: int) -> None:
        """This process started `pid` itself and will wait for it."""
        self._started.add(pid)

    def spare(self, pid: int) -> None:
        """`pid`, which this process started, and all that descends from it are none of them."""
        self._apart.add(pid)

    def alive(self) -> list[psutil.Process]:
        """Those that still run; ended ones that nobody waited for do not count."""
        found = psutil.Process().children(recursive=True)
        apart = self._before | {pid for root in self._apart for pid in _family(root)}
        return [process for process in found if process.pid not in apart and not is_gone(process.pid)]

    def send(self, number: signal.Signals, pids: Iterable[int]) -> set[int]:
        """Signal those of `pids` that are descendants (numbers are used again); returns them."""
        reached = {process.pid for process in self.alive()} & set(pids)
        for pid in reached:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return reached

    def end_all(self, timeout_s: float = _END_TIMEOUT_S) -> int:
        """SIGKILL every descendant and wait until none is left; returns how many there were.

        Raises:
            HangError: some survive (a process in uninterruptible I/O): starting anew beside them is not safe.
        """
        ended = _end(self.alive, timeout_s)
        self._reap_adopted()
        return ended

    def _reap_adopted(self) -> None:
        """Take the exit statuses of orphans that this process inherited: nobody else waits for them."""
        for process in psutil.Process().children():
            if process.pid not in self._before | self._started | self._apart:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)


def end_strays(run_dir: Path, variable: str, timeout_s: float = _END_TIMEOUT_S) -> int:
    """End processes of a run whose supervisor died, wherever they hang in the process tree; returns how many.

    They are known by `variable`, the attempt's directory, in the environment they were started with.

    Raises:
        HangError: some survive.
    """
    prefix = f"{run_dir.resolve() / 'attempts'}{os.sep}"

    def strays() -> list[psutil.Process]:
        return [
            process for process in psutil.process_iter() if _attempt_of(process, variable).startswith(prefix)
        ]

    return _end(strays, timeout_s)


class RankProcess(NamedTuple):
    """What a rank says of itself as its first deed."""

    host: str
    pid: int
    pid_namespace: str

    @property
    def is_here(self) -> bool:
        """Whether it is on this host, and its pid means the same here (not so from a container of its own)."""
        return (self.host, self.pid_namespace) == (socket.gethostname(), pid_namespace())


def started_ranks(attempt: Path, known: Mapping[int, RankProcess] | None = None) -> dict[int, RankProcess]:
    """The ranks that run or ran, on any host, from `ranks/N.pid.json`; those `known` are not read again."""
    found = dict(known or {})
    for path in (attempt / "ranks").glob("*.pid.json"):
        rank = path.name.removesuffix(".pid.json")
        if rank.isdigit() and int(rank) not in found and (content := read_json(path)) is not None:
            namespace = str(content.get("pid_namespace", pid_namespace()))
            found[int(rank)] = RankProcess(str(content["host"]), int(content["pid"]), namespace)
    return found


def rank_pids(attempt: Path) -> dict[int, int]:
    """Process ids, by rank, of the ranks on this host."""
    return {rank: process.pid for rank, process in started_ranks(attempt).items() if process.is_here}


def pid_namespace() -> str:
    """What tells processes that count pids alike from others, such as those in a container of their own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_gone(pid: int) -> bool:
    """Whether a process has ended, waited for or not."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _family(pid: int) -> set[int]:
    """A process and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {pid, *(process.pid for process in psutil.Process(pid).children(recursive=True))}
    return set()


def _end(find: Callable[[], list[psutil.Process]], timeout_s: float) -> int:
    deadline_s = time.monotonic() + timeout_s
    found: set[int] = set()
    while processes := find():
        for process in processes:
            found.add(process.pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_POLL_S)  # not waited for: exit statuses belong to whoever started them
        if time.monotonic() > deadline_s:
            pids = ", ".join(str(process.pid) for process in processes)
            raise HangError(
                f"processes {pids} of this run survive SIGKILL after {timeout_s:g} s (waiting for a disk "
                "or a device?); run again once they are gone"
            )
    return len(found)


def _attempt_of(process: psutil.Process, variable: str) -> str:
    if process.pid == os.getpid():
        return ""
    try:
        if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return str(process.environ().get(variable, ""))
    except (psutil.Error, OSError):  # ended meanwhile, or not ours to read
        return ""
