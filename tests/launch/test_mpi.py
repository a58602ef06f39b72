from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.launch.mpi import Mpi, allreduce_description, find_mpi, parse_version, rank_environment
from tests.resilience.conftest import make_config

OPEN_MPI = Mpi(Path("/opt/mpirun"), "Open MPI", "5.0.11")
MPICH = Mpi(Path("/opt/mpirun"), "MPICH", "5.0.2")
INTEL = Mpi(Path("/opt/mpirun"), "unknown", "")


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({**make_config().model_dump(), **sections})


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...", "Open MPI", "5.0.11"),
        ("mpirun (Open MPI) 4.1.4rc2\n", "Open MPI", "4.1.4rc2"),
        (
            "HYDRA build details:\n    Version:                                 4.2.3\n    Release",
            "MPICH",
            "4.2.3",
        ),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", "unknown", ""),
        ("", "unknown", ""),
    ],
)
def test_versions(text: str, name: str, version: str) -> None:
    assert parse_version(Path("mpirun"), text) == Mpi(Path("mpirun"), name, version)


def test_an_mpirun_that_does_not_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bin" / "mpirun"
    broken.parent.mkdir()
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ConfigError, match="working mpirun"):
        find_mpi()


def test_stated_variables_win_and_threads_follow_the_description(tmp_path: Path) -> None:
    variables = rank_environment(config(precision={"compute_threads": 3}), OPEN_MPI, 2, tmp_path)
    assert variables["OMP_NUM_THREADS"] == variables["MKL_NUM_THREADS"] == "3"
    assert variables["HDF5_USE_FILE_LOCKING"] == "FALSE"


def test_ranks_yield_only_where_there_are_more_than_cores(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    yields = "OMPI_MCA_mpi_yield_when_idle"
    assert yields not in rank_environment(make_config(), OPEN_MPI, cores, tmp_path)
    assert rank_environment(make_config(), OPEN_MPI, cores + 1, tmp_path)[yields] == "1"


def test_a_ring_is_forced_or_refused(tmp_path: Path) -> None:
    ring = config(comm={"allreduce": "ring"})
    assert rank_environment(ring, OPEN_MPI, 2, tmp_path)["OMPI_MCA_coll_tuned_allreduce_algorithm"] == "4"
    assert rank_environment(ring, MPICH, 2, tmp_path)["MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM"] == "ring"
    with pytest.raises(ConfigError, match=r"/opt/mpirun.*Open MPI and MPICH.*auto"):
        rank_environment(ring, INTEL, 2, tmp_path)
    assert "OMPI_MCA_coll_tuned_allreduce_algorithm" not in rank_environment(
        make_config(), OPEN_MPI, 2, tmp_path
    )


def test_the_algorithm_is_recorded_in_words() -> None:
    assert allreduce_description(OPEN_MPI, "auto") == "Open MPI 5.0.11: its own choice"
    assert "ring, forced (OMPI_MCA_coll_tuned_priority=90" in allreduce_description(OPEN_MPI, "ring")
