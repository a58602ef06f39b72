"""Ranks on this machine, under mpirun (Open MPI 4 and 5, MPICH)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hpctrain.config import RunConfig
from hpctrain.launch.mpi import Mpi, find_mpi, rank_environment, ring_variables
from hpctrain.resilience.attempts import attempt_dir
from hpctrain.resilience.launching import Placement
from hpctrain.resilience.processes import Descendants, rank_pids
from hpctrain.resilience.scratch import scratch_prefix
from hpctrain.resilience.signals import parent_death_request
from hpctrain.resilience.words import LauncherWord, mpirun_word


def mpirun_command(mpi: Mpi, num_ranks: int, program: Sequence[str]) -> list[str]:
    """The command line that starts `program` on `num_ranks` ranks."""
    # Open MPI would refuse more ranks than cores, and bind two ranks to one core each.
    options = ["--oversubscribe", "--bind-to", "none"] if mpi.name == "Open MPI" else []
    return [str(mpi.path), "-n", str(num_ranks), *options, *program]


class LocalRanks:
    """Ranks on this machine: processes that descend from this one."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, descendants: Descendants) -> None:
        self.process = process
        self._directory = directory
        self._descendants = descendants
        self._asked: set[int] = set()
        descendants.started(process.pid)

    def ask_to_leave(self) -> None:
        """SIGUSR1 to every rank that has not had it; mpirun itself would be the wrong one to tell."""
        waiting = set(rank_pids(self._directory).values()) - self._asked
        self._asked |= self._descendants.send(signal.SIGUSR1, waiting)

    def lost_node(self) -> None:
        """There is one node, and this process is on it."""

    def end(self) -> None:
        """Kill all that descends from mpirun, and wait until nothing is left. Raises `HangError`."""
        self._descendants.end_all()


class LocalLauncher:
    """Starts the ranks of an attempt under mpirun on this machine.

    Args:
        num_ranks: how many.
        program: what a rank runs; the run directory and the attempt's number are appended.
    """

    def __init__(
        self, num_ranks: int, program: Sequence[str] = (sys.executable, "-m", "hpctrain.training")
    ) -> None:
        self._num_ranks = num_ranks
        self._program = list(program)
        self._scratch: list[Path] = []

    def check(self, config: RunConfig) -> None:
        """Raise `ConfigError` where there is no usable mpirun, or it cannot do what `config` asks for."""
        ring_variables(config, find_mpi())

    def place(self, run_dir: Path, config: RunConfig, *, again: bool) -> Placement:
        """All ranks on this machine."""
        return Placement((socket.gethostname(),), self._num_ranks)

    def start(self, run_dir: Path, attempt: int, placement: Placement, config: RunConfig) -> LocalRanks:
        """Start mpirun in its own session; its output goes to `logs/mpirun.log` of the attempt.

        It dies with this process, and a Ctrl-C at the terminal does not reach it. Call from the main thread:
        the kernel ends mpirun with the thread that started it.

        Raises:
            ConfigError: as `check`.
        """
        mpi = find_mpi()
        directory = attempt_dir(run_dir, attempt)
        self.clean(run_dir)
        self._scratch = _make_scratch(run_dir)
        environment = os.environ | rank_environment(config, mpi, placement.num_ranks, directory)
        environment |= _one_host_variables(mpi, self._scratch)
        command = mpirun_command(mpi, placement.num_ranks, [*self._program, str(run_dir), str(attempt)])
        descendants = Descendants()
        process = start_process(command, environment, self.log(run_dir, attempt))
        return LocalRanks(process, directory, descendants)

    def log(self, run_dir: Path, attempt: int) -> Path:
        """What mpirun and the ranks print."""
        return attempt_dir(run_dir, attempt) / "logs" / "mpirun.log"

    def word(self, log: str, pids: dict[int, int]) -> LauncherWord | None:
        """What mpirun says about the first rank that ended badly."""
        return mpirun_word(log, pids)

    def clean(self, run_dir: Path) -> None:
        """Remove what attempts of this run left in /tmp and /dev/shm: a killed mpirun sweeps nothing."""
        for parent in _scratch_parents():
            for path in parent.glob(f"{scratch_prefix(run_dir)}*"):
                if _is_own_directory(path):
                    shutil.rmtree(path, ignore_errors=True)


def _one_host_variables(mpi: Mpi, scratch: Sequence[Path]) -> dict[str, str]:
    """For Open MPI: no search for a fabric, and `scratch` directories for the launcher's sockets and shared memory."""
    if mpi.name != "Open MPI":
        return {}
    variables: dict[str, str] = {}
    if "OMPI_MCA_btl" not in os.environ:
        variables["OMPI_MCA_btl"] = "^ofi"  # looking for a fabric takes a second of MPI_Init
    if scratch:
        session, shared_memory = str(scratch[0]), str(scratch[-1])
        variables |= {"PRTE_MCA_prte_tmpdir_base": session, "OMPI_MCA_orte_tmpdir_base": session}
        variables |= {
            "OMPI_MCA_btl_sm_backing_directory": shared_memory,
            "OMPI_MCA_btl_vader_backing_directory": shared_memory,
        }
    return variables


def start_process(command: Sequence[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, dying with this process, output to `log`."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=parent_death_request(),
        )


def _scratch_parents() -> list[Path]:
    """Short paths on purpose: a socket's name has at most 108 bytes."""
    candidates = [Path("/tmp"), Path("/dev/shm")]
    usable = [path for path in candidates if os.access(path, os.W_OK)]
    return usable or [Path(tempfile.gettempdir())]


def _make_scratch(run_dir: Path) -> list[Path]:
    return [
        Path(tempfile.mkdtemp(prefix=scratch_prefix(run_dir), dir=parent)) for parent in _scratch_parents()
    ]


def _is_own_directory(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False
