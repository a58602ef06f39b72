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
from hpctrain.launch.local import LocalLauncher, LocalRanks, mpirun_command, start_process
from hpctrain.launch.mpi import Mpi, find_mpi
from hpctrain.resilience.attempts import attempt_dir, next_attempt
from tests.resilience.conftest import make_config, wait_until

OPEN_MPI = Mpi(Path("/opt/mpirun"), "Open MPI", "5.0.11")
MPICH = Mpi(Path("/opt/mpirun"), "MPICH", "5.0.2")


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({**make_config().model_dump(), **sections})


def test_no_mpirun_is_an_error_that_says_what_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ConfigError, match="MPI module"):
        LocalLauncher(1).check(make_config())


def test_options_are_those_of_the_mpi() -> None:
    command = mpirun_command(OPEN_MPI, 3, ["python", "x"])
    assert command == ["/opt/mpirun", "-n", "3", "--oversubscribe", "--bind-to", "none", "python", "x"]
    assert mpirun_command(MPICH, 3, ["python"]) == ["/opt/mpirun", "-n", "3", "python"]


SPEAK = "import os\nprint(os.environ.get('OMPI_MCA_btl'))"


@pytest.mark.mpi
@pytest.mark.parametrize("chosen", [None, "self,tcp"])
def test_the_users_choice_of_transports_is_kept(
    tmp_path: Path, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chosen is None:
        monkeypatch.delenv("OMPI_MCA_btl", raising=False)
    else:
        monkeypatch.setenv("OMPI_MCA_btl", chosen)
    code, log = launch(tmp_path, SPEAK, num_ranks=1)
    assert (code, log.strip()) == (0, chosen or "^ofi")


def launch(tmp_path: Path, code: str, num_ranks: int = 3, **sections: Any) -> tuple[int, str]:
    """Run `code` on ranks of a real mpirun; returns its exit code and log."""
    program = tmp_path / "program.py"
    program.write_text(code)
    run_dir = tmp_path / "run dir"  # a space on purpose
    number = next_attempt(run_dir)
    launcher = LocalLauncher(num_ranks, [sys.executable, str(program)])
    ranks = begin(launcher, run_dir, number, config(**sections))
    try:
        code_found = ranks.process.wait(60)
    finally:
        ranks.end()
        ranks.process.wait()
        launcher.clean(run_dir)
    return code_found, launcher.log(run_dir, number).read_text()


def begin(launcher: LocalLauncher, run_dir: Path, number: int, description: RunConfig) -> LocalRanks:
    return launcher.start(run_dir, number, launcher.place(run_dir, description, again=False), description)


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
    launcher = LocalLauncher(2, [sys.executable, str(program)])
    ranks = begin(launcher, tmp_path, 1, make_config())
    try:
        wait_until(lambda: len(list(tmp_path.glob("at-*"))) == 2)
        for path in launcher._scratch:
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
            assert list(path.iterdir()) != []
        (tmp_path / "go").touch()
        assert ranks.process.wait(30) == 0
    finally:
        ranks.end()
        ranks.process.wait()
        launcher.clean(tmp_path)
    assert not any(path.exists() for path in launcher._scratch)


def test_cleaning_leaves_links_and_other_runs_alone(tmp_path: Path) -> None:
    launcher = LocalLauncher(1, ["true"])
    next_attempt(tmp_path)
    begin(launcher, tmp_path, 1, make_config()).process.wait(60)
    mine = launcher._scratch[0]
    target = tmp_path / "precious"
    target.mkdir()
    link = mine.with_name(mine.name + "-link")
    link.symlink_to(target)
    try:
        LocalLauncher(1).clean(tmp_path / "another run")
        assert mine.exists()
        LocalLauncher(1).clean(tmp_path)
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


@pytest.mark.mpi
def test_every_rank_is_asked_to_leave_once(tmp_path: Path) -> None:
    """Ranks that start late are asked as soon as they say who they are; nobody else is signalled."""
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, pathlib, signal, socket, sys, time\n"
        "rank = os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']\n"
        "here = pathlib.Path(os.environ['HPCTRAIN_ATTEMPT_DIR'])\n"
        "signals = []\n"
        "signal.signal(signal.SIGUSR1, lambda number, frame: signals.append(number))\n"
        "pid = json.dumps({'host': socket.gethostname(), 'pid': os.getpid()})\n"
        "time.sleep(0.5 * int(rank))\n"
        "(here / 'ranks' / f'{rank}.pid.json').write_text(pid)\n"
        "while not signals:\n    time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        "sys.exit(len(signals) - 1)\n"
    )
    next_attempt(tmp_path)
    launcher = LocalLauncher(2, [sys.executable, str(program)])
    ranks = begin(launcher, tmp_path, 1, make_config())
    try:

        def ended() -> bool:
            ranks.ask_to_leave()
            return ranks.process.poll() is not None

        wait_until(ended)
        assert ranks.process.returncode == 0
        assert ranks.lost_node() is None
    finally:
        ranks.end()
        ranks.process.wait()
        launcher.clean(tmp_path)
