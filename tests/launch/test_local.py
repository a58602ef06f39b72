from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.launch.local import (
    LocalLauncher,
    Mpi,
    allreduce_description,
    find_mpi,
    mpirun_command,
    parse_version,
    rank_environment,
    start_process,
)
from hpctrain.resilience.attempts import attempt_dir, next_attempt
from tests.resilience.conftest import make_config, wait_until

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


def test_no_mpirun_is_an_error_that_says_what_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ConfigError, match="MPI module"):
        LocalLauncher().check(make_config())


def test_an_mpirun_that_does_not_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bin" / "mpirun"
    broken.parent.mkdir()
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ConfigError, match="working mpirun"):
        find_mpi()


def test_options_are_those_of_the_mpi() -> None:
    command = mpirun_command(OPEN_MPI, 3, ["python", "x"])
    assert command == ["/opt/mpirun", "-n", "3", "--oversubscribe", "--bind-to", "none", "python", "x"]
    assert mpirun_command(MPICH, 3, ["python"]) == ["/opt/mpirun", "-n", "3", "python"]


def test_stated_variables_win_and_threads_follow_the_description(tmp_path: Path) -> None:
    variables = rank_environment(config(precision={"compute_threads": 3}), OPEN_MPI, 2, tmp_path)
    assert variables["OMP_NUM_THREADS"] == variables["MKL_NUM_THREADS"] == "3"
    assert variables["HDF5_USE_FILE_LOCKING"] == "FALSE"


def test_the_users_choice_of_transports_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMPI_MCA_btl", raising=False)
    assert rank_environment(make_config(), OPEN_MPI, 1, tmp_path)["OMPI_MCA_btl"] == "^ofi"
    monkeypatch.setenv("OMPI_MCA_btl", "self,tcp")
    assert "OMPI_MCA_btl" not in rank_environment(make_config(), OPEN_MPI, 1, tmp_path)


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


def launch(tmp_path: Path, code: str, num_ranks: int = 3, **sections: Any) -> tuple[int, str]:
    """Run `code` on ranks of a real mpirun; returns its exit code and log."""
    program = tmp_path / "program.py"
    program.write_text(code)
    run_dir = tmp_path / "run dir"  # a space on purpose
    number = next_attempt(run_dir)
    launcher = LocalLauncher([sys.executable, str(program)])
    process = launcher.start(run_dir, number, num_ranks, config(**sections))
    try:
        code_found = process.wait(60)
    finally:
        process.kill()
        process.wait()
        launcher.clean(run_dir)
    return code_found, (attempt_dir(run_dir, number) / "logs" / "mpirun.log").read_text()


@pytest.mark.mpi
def test_ranks_get_their_arguments_and_mpirun_says_nothing_of_its_own(tmp_path: Path) -> None:
    code, log = launch(tmp_path, "import os, sys\nos.write(1, (repr(sys.argv[1:]) + chr(10)).encode())")
    assert code == 0
    assert log.splitlines() == [f"['{tmp_path}/run dir', '1']"] * 3


@pytest.mark.mpi
def test_ranks_see_the_variables_and_their_own_session(tmp_path: Path) -> None:
    program = (
        "import os\nprint(os.environ['HPCTRAIN_ATTEMPT_DIR'], os.environ['HPCTRAIN_ALLREDUCE'], os.getsid(0))"
    )
    code, log = launch(tmp_path, program, num_ranks=1)
    assert code == 0
    assert log.startswith(f"{attempt_dir(tmp_path / 'run dir', 1)} {find_mpi()}: its own choice")
    assert int(log.split()[-1]) != os.getsid(0)


# 1e8 + 1 - 1e8 in float32 is 0 or 1, as the sum is ordered. A ring begins the sum of each segment at another rank;
# the other algorithms order all elements alike.
ORDERS = """
from mpi4py import MPI
import numpy as np
values = np.full(3000, (1e8, 1.0, -1e8)[MPI.COMM_WORLD.rank], np.float32)
MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, values)
if MPI.COMM_WORLD.rank == 0:
    print(len(np.unique(values)))
"""


@pytest.mark.mpi
@pytest.mark.parametrize(("allreduce", "orders"), [("auto", "1"), ("ring", "2")])
def test_a_forced_ring_is_a_ring(tmp_path: Path, allreduce: str, orders: str) -> None:
    code, log = launch(tmp_path, ORDERS, comm={"allreduce": allreduce})
    assert (code, log.strip()) == (0, orders)


@pytest.mark.mpi
def test_a_killed_rank_ends_mpirun_within_seconds(tmp_path: Path) -> None:
    program = """
import os, signal, time
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
MPI.COMM_WORLD.Barrier()
"""
    code, log = launch(tmp_path, program)
    assert code != 0
    assert "process rank 1" in log


@pytest.mark.mpi
def test_scratch_is_private_and_removed(tmp_path: Path) -> None:
    """While ranks talk, sockets and shared memory lie in the two directories; afterwards nothing does."""
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, sys, time\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"
        "here = pathlib.Path(sys.argv[1])\n(here / f'at-{MPI.COMM_WORLD.rank}').touch()\n"
        "while not (here / 'go').exists():\n    time.sleep(0.01)\n"
    )
    next_attempt(tmp_path)
    launcher = LocalLauncher([sys.executable, str(program)])
    process = launcher.start(tmp_path, 1, 2, make_config())
    try:
        wait_until(lambda: len(list(tmp_path.glob("at-*"))) == 2)
        for path in launcher._scratch:
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
            assert list(path.iterdir()) != []
        (tmp_path / "go").touch()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        launcher.clean(tmp_path)
    assert not any(path.exists() for path in launcher._scratch)


def test_cleaning_leaves_links_and_other_runs_alone(tmp_path: Path) -> None:
    launcher = LocalLauncher(["true"])
    next_attempt(tmp_path)
    launcher.start(tmp_path, 1, 1, make_config()).wait(60)
    mine = launcher._scratch[0]
    target = tmp_path / "precious"
    target.mkdir()
    link = mine.with_name(mine.name + "-link")
    link.symlink_to(target)
    try:
        LocalLauncher().clean(tmp_path / "another run")
        assert mine.exists()
        LocalLauncher().clean(tmp_path)
        assert not mine.exists()
        assert target.exists()
    finally:
        link.unlink()


def test_output_is_appended_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for word in ("one", "two"):
        process: subprocess.Popen[bytes] = start_process(["echo", word], dict(os.environ), log)
        assert process.wait(20) == 0
    assert log.read_text() == "one\ntwo\n"
