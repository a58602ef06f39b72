"""One launch of this rank: what it was told, where it reports, and how it ends."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any, NoReturn

from hpctrain.comm.world import stop_world
from hpctrain.config import RunConfig, parse_run
from hpctrain.durable import replace_file
from hpctrain.observe.events import EventLog
from hpctrain.resilience.attempts import attempt_dir, refuse_superseded
from hpctrain.resilience.exits import EndRecord, FailureClass, write_end_record
from hpctrain.resilience.processes import pid_namespace
from hpctrain.resilience.scratch import enter_scratch
from hpctrain.resilience.signals import StopFlag
from hpctrain.resilience.watchdog import Watchdog
from hpctrain.training.phases import Phases

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_PEER_GRACE_S = 2.0
"""A rank that lost a peer waits so long before it aborts the job: the peer may be writing its record."""
_ABORT_GRACE_S = 5.0
_DEFAULT_TIMEOUT_S = 600.0
_SLOW_PHASES = frozenset({"start", "restore", "save", "exchange after save"})
"""They wait for the shared filesystem, on one rank or on all: `resilience.start_timeout_s` is their deadline."""


class RankAttempt:
    """This rank's view of `attempts/aNNNN/`. Usable for reporting at once, for running after `open`."""

    start: dict[str, Any]
    """`start.json`: what the supervisor decided."""
    config: RunConfig
    phases: Phases

    def __init__(self, run_dir: Path, number: int) -> None:
        self.run_dir, self.number = run_dir, number
        self.directory = attempt_dir(run_dir, number)
        self.rank = launcher_rank()
        self.events = EventLog(self.directory / "events" / f"rank-{self.rank}.jsonl")
        self.watchdog = Watchdog(self.directory, self.rank, _DEFAULT_TIMEOUT_S, _DEFAULT_TIMEOUT_S)
        self.stop = StopFlag()
        self.stop.install()  # before the pid is known: who reads it may send a signal at once
        ranks = self.directory / "ranks"
        ranks.mkdir(parents=True, exist_ok=True)
        identity = {"host": socket.gethostname(), "pid": os.getpid(), "pid_namespace": pid_namespace()}
        replace_file(ranks / f"{self.rank}.pid.json", json.dumps(identity).encode())

    def open(self) -> None:
        """Read what this rank is to do, and begin to watch it.

        Raises `PeerError` where a newer attempt was started: this rank was launched on a node that was cut off.
        """
        refuse_superseded(self.run_dir, self.number)
        enter_scratch(self.number)
        self.start = json.loads((self.directory / "start.json").read_bytes())
        self.config = parse_run(tomllib.loads((self.run_dir / "run.toml").read_text(encoding="utf-8")))
        limits = self.config.resilience
        self.watchdog = Watchdog(self.directory, self.rank, limits.hang_timeout_s, limits.start_timeout_s)
        self.phases = Phases(self.watchdog, _SLOW_PHASES, limits.start_timeout_s)
        self.watchdog.start()

    def leave_together(self, failure: FailureClass) -> None:
        """Record an orderly end on all ranks before any exits.

        The process then ends with 0, asked to leave or done: a launcher kills the other ranks at the first exit that is
        not 0, and would catch them in MPI_Finalize.
        """
        from mpi4py import MPI

        phase, step = self.watchdog.current
        write_end_record(self.directory, EndRecord.now(self.rank, failure, step=step, phase=phase))
        self.watchdog.beat("exit", step)
        stop_world()
        MPI.COMM_WORLD.Barrier()

    def abort(self, error: BaseException) -> NoReturn:
        """Record an error, then end every rank of the job; this one at the latest when MPI does not do it in time."""
        phase, step = self.watchdog.current
        record = EndRecord.of_error(self.rank, error, step=step, phase=phase)
        write_end_record(self.directory, record)
        self.events.emit("end", failure=record.failure, message=record.message, step=step, phase=phase)
        sys.stderr.write(f"rank {self.rank}: {record.traceback or record.message}\n")
        sys.stderr.flush()
        if record.failure is FailureClass.PEER:
            time.sleep(_PEER_GRACE_S)
        code = record.code or 1
        threading.Timer(_ABORT_GRACE_S, os._exit, (code,)).start()
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(code)
        os._exit(code)


def launcher_rank() -> int:
    """This process's rank as the launcher says, before MPI is initialised; 0 where no launcher says anything."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)
