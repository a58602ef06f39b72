"""Packing with several processes: the files of one, and an end of all where one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hpctrain.h5.pack import PackOptions, pack, pack_path
from hpctrain.h5.packed import open_packed
from hpctrain.h5.team import Alone, check_alike, launched_processes
from tests.mpi import packs
from tests.support import ROOT, mpirun

DEADLINE_S = 90


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    for name, source, options in packs.packs():
        pack(source, folder / name, options)
    return folder


def files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


def check_same(by_one: Path, folder: Path) -> None:
    for name, _, _ in packs.packs():
        assert files(folder / name) == files(by_one / name), name
    assert len(files(by_one / "plain")) > 10
    assert "cleaning.json" in files(by_one / "clean")
    assert open_packed(folder / "auto").num_samples == packs.NUM_SAMPLES


def environment() -> dict[str, str]:
    """To be asked for after `mpirun`, which allows root in it."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def start(ranks: int, folder: Path, end: str) -> subprocess.Popen[str]:
    command = [*mpirun(ranks), sys.executable, "-m", "tests.mpi.packs", str(folder), end]
    return subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.mpi
def test_three_processes_write_the_files_of_one_and_an_error_on_the_last_ends_all(
    by_one: Path, tmp_path: Path
) -> None:
    process = start(3, tmp_path, "error")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 65, out + err
    assert err.count("shown: the message of the last process") == 1
    assert err.count("shown:") == 1
    assert "Traceback" not in err
    check_same(by_one, tmp_path)
    assert not [path.name for path in tmp_path.iterdir() if "bad" in path.name]


@pytest.mark.mpi
def test_an_interrupt_ends_all(tmp_path: Path) -> None:
    process = start(2, tmp_path, "wait")
    began_s = time.monotonic()
    while not (tmp_path / "slow").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() - began_s < DEADLINE_S
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode != 0
    assert not (tmp_path / "interrupted").exists()
    # What the launcher killed before it could clean up goes with the next pack of that name.
    packs.pack(packs.ArraySource({"x": np.zeros(3)}), tmp_path / "interrupted")
    assert not list(tmp_path.glob(".interrupted*"))


@pytest.mark.mpi
def test_an_error_is_shown_though_rank_0_cannot_listen(tmp_path: Path) -> None:
    process = start(2, tmp_path, "deaf")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 65, out + err
    assert err.count("shown: the last process cannot read it") == 1


@pytest.mark.mpi
def test_the_command_line_finds_its_processes_by_itself(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(1000.0))
    command = [*mpirun(2), sys.executable, "-m", "hpctrain.cli", "pack", str(tmp_path / "x.npy")]
    options = ["--shard-mib", "0.001", "--chunk-samples", "10", "--clean", "duplicates=drop"]
    done = subprocess.run(
        [*command, str(tmp_path / "two"), *options],
        env=environment(),
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cleaning: 1000 of 1000 samples kept") == 1
    alone = PackOptions(shard_mib=0.001, chunk_samples=10, clean={"duplicates": "drop"})
    pack_path(tmp_path / "x.npy", tmp_path / "one", alone)
    assert files(tmp_path / "two") == files(tmp_path / "one")


def test_a_launch_is_known_by_the_variables_of_its_launcher() -> None:
    assert launched_processes({"HOME": "/"}) == 1
    assert launched_processes({"OMPI_COMM_WORLD_SIZE": "4"}) == 4
    assert launched_processes({"PMI_SIZE": "3"}) == 3
    assert launched_processes({"SLURM_STEP_NUM_TASKS": "5"}) == 1, "srun without an MPI plugin"
    assert launched_processes({"SLURM_STEP_NUM_TASKS": "5", "PMIX_RANK": "0"}) == 5
    assert launched_processes({"SLURM_STEP_NUM_TASKS": "6", "PALS_RANKID": "2"}) == 6, "Cray"
    assert launched_processes({"PMI_SIZE": "many"}) == 1


def test_processes_that_see_different_files_are_refused() -> None:
    class Pair(Alone):
        def gather(self, part: object) -> list[object]:
            return [part, (99, ("x",))]

    with pytest.raises(
        ValueError, match=r"process 1 sees another source than process 0 \(\(99, \('x',\)\) and"
    ):
        check_alike(Pair(), "source", (100, ("x",)))
