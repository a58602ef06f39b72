"""Several processes over MPI that pack one set: `mpirun -n 4 hpctrain pack SRC DST`.

Nothing here waits inside MPI. Each wait asks in turns whether its message is there and whether another process has
failed, so that an error on one ends all within seconds. A process that fails tells all others; each leaves what it
does, which makes an end of its writing, and says so. Only when all have said so (or a deadline is over) does the block
of `ending_together` raise, and rank 0 removes what was written so far.

Loaded only where a launcher started several processes: MPI_Init on a login node aborts on some systems.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from hpctrain.errors import ConfigError, PeerError
from hpctrain.resilience import faults

_DATA: Final = 1
_TICK: Final = 2
_END: Final = 3
_GONE: Final = 4
_TICK_INTERVAL_S: Final = 0.5
_SHORTEST_NAP_S: Final = 0.0002
_LONGEST_NAP_S: Final = 0.01
_ENDING_S: Final = 8.0
"""How long one that fails waits for the others to stop."""
_INTERRUPTED_S: Final = 0.1  # Open MPI kills 0.2 s after it has asked
_LEAVING_S: Final = 18.0
"""How long a process may take from a failure to its end: a function of the user that hangs is not waited for."""


class ElsewhereError(PeerError):
    """Another process of the team has failed, and says why."""


class MpiTeam:
    """The processes of an MPI world as a `hpctrain.h5.team.Team`."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._comm = mpi.COMM_WORLD.Dup()
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self.cores = self._share_of_cores()
        self._pending: list[Any] = []  # MPI reads the messages until they are sent
        self._counts: dict[str, dict[int, tuple[int, ...]]] = {}
        self._told_s = 0.0
        self._ends: dict[int, tuple[bool, int]] = {}
        """By rank: whether the failure was its own, and the exit code."""

    def tick(self, activity: str, *counts: int) -> tuple[int, ...]:
        """See `Team`; others than rank 0 tell it twice a second."""
        self._listen()
        if self.rank == 0:
            known = self._counts.setdefault(activity, {})
            known[0] = counts
            return tuple(map(sum, zip(*known.values(), strict=True)))
        if time.monotonic() - self._told_s >= _TICK_INTERVAL_S:
            self._told_s = time.monotonic()
            self._send((activity, counts), 0, _TICK)
        return counts

    def gather(self, part: Any) -> list[Any]:
        """See `Team`."""
        if self.rank:
            self._send(part, 0, _DATA)
            return []
        return [part, *(self._receive(rank) for rank in range(1, self.size))]

    def share(self, value: Any) -> Any:
        """See `Team`."""
        if self.rank:
            return self._receive(0)
        for rank in range(1, self.size):
            self._send(value, rank, _DATA)
        return value

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """See `Team`; blocks may be nested."""
        try:
            yield
        except BaseException as error:
            if self.rank not in self._ends:
                self._end(error)
            raise

    @property
    def spokesman(self) -> int:
        """After a failure: the lowest rank whose own failure it was, which shows it."""
        return min((rank for rank, (own, _) in self._ends.items() if own), default=self.rank)

    @property
    def exit_code(self) -> int:
        """After a failure: that of the spokesman."""
        return self._ends[self.spokesman][1]

    def leave(self) -> None:
        """After a failure: wait until rank 0 has cleaned up; the launcher kills it when another process ends first."""
        if self.rank == 0:
            for rank in range(1, self.size):
                self._send(None, rank, _GONE)
        elif 0 in self._ends:  # else it cannot listen, cleans nothing up, and is not waited for again
            self._wait(lambda: self._take(0, _GONE), time.monotonic() + _ENDING_S)

    def settle(self) -> None:
        """Wait until all messages are on their way."""
        self._wait(lambda: not self._unsent(), time.monotonic() + _ENDING_S)

    def _end(self, error: BaseException) -> None:
        own, code = not isinstance(error, ElsewhereError), getattr(error, "exit_code", 1)
        self._ends[self.rank] = own, code
        watch = threading.Timer(_LEAVING_S, os._exit, [code])
        watch.daemon = True
        watch.start()
        for rank in range(self.size):
            if rank != self.rank:
                self._send((own, code), rank, _END)
        interrupted = isinstance(error, KeyboardInterrupt)
        deadline_s = time.monotonic() + (_INTERRUPTED_S if interrupted else _ENDING_S)
        if not self._wait(self._all_have_ended, deadline_s):
            # One hangs where it cannot listen, and would keep MPI_Finalize waiting.
            atexit.register(self._comm.Abort, self.exit_code)

    def _all_have_ended(self) -> bool:
        while message := self._take(self._mpi.ANY_SOURCE, _END):
            rank, self._ends[rank] = message
        return len(self._ends) == self.size

    def _listen(self) -> None:
        """Note what the others tell; raise where one has failed."""
        while self.rank == 0 and (message := self._take(self._mpi.ANY_SOURCE, _TICK)):
            rank, (activity, counts) = message
            self._counts.setdefault(activity, {})[rank] = counts
        if message := self._take(self._mpi.ANY_SOURCE, _END):
            rank, self._ends[rank] = message
            raise ElsewhereError(f"process {rank} has failed; see its message")

    def _take(self, rank: int, tag: int) -> tuple[int, Any] | None:
        """A message that has arrived, and who sent it."""
        status = self._mpi.Status()
        if not self._comm.iprobe(rank, tag, status):
            return None
        sender: int = status.Get_source()
        return sender, self._comm.recv(None, sender, tag)

    def _send(self, value: Any, rank: int, tag: int) -> None:
        self._unsent()
        self._pending.append(self._comm.isend(value, rank, tag))

    def _unsent(self) -> int:
        self._pending = [request for request in self._pending if not request.test()[0]]
        return len(self._pending)

    def _receive(self, rank: int) -> Any:
        def arrived() -> tuple[int, Any] | None:
            self._unsent()
            self._listen()
            return self._take(rank, _DATA)

        return self._wait(arrived, float("inf"))[1]

    def _wait(self, event: Callable[[], Any], deadline_s: float) -> Any:
        """What `event` gives once it is true; None after the deadline."""
        nap_s = _SHORTEST_NAP_S
        while not (result := event()):
            if time.monotonic() > deadline_s:
                return None
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        return result

    def _share_of_cores(self) -> int:
        """This process's part of the cores that it and others of its node are all bound to."""
        mine = os.sched_getaffinity(0)
        node = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        sharing: int = node.allgather(sorted(mine)).count(sorted(mine))
        node.Free()
        return max(1, len(mine) // sharing)


@contextlib.contextmanager
def packing_team(num_processes: int) -> Iterator[MpiTeam]:
    """The team of this launch of `num_processes`. Where one fails, it shows the error, and all end with its exit code.

    Raises `ConfigError` where the launcher and the MPI library do not fit each other.
    """
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_size() != num_processes:
        raise ConfigError(
            f"the launcher started {num_processes} processes, but MPI has {MPI.COMM_WORLD.Get_size()}: use the mpirun "
            "that belongs to the MPI library of this environment, or under Slurm `srun --mpi=pmix`; or pack with one"
        )
    team = MpiTeam(MPI)
    faults.configure(team.rank, 0)
    asked = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with team.ending_together():
            yield team
            team.settle()
    except BaseException:
        team.leave()
        if team.rank != team.spokesman:
            raise SystemExit(team.exit_code) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, asked)


def _interrupt(number: int, frame: object) -> None:
    """Launchers hand Ctrl-C on as SIGTERM; once is enough, what follows is cleaning up."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt
