"""Logs as mpirun and srun wrote them (Open MPI 5.0.11, Open MPI 4.1, MPICH 5.0.2, Slurm 22.05)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.resilience.words import mpirun_word, read_log, srun_lost_nodes, srun_word

OPEN_MPI_5_SIGNAL = """some output of a rank
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 5678 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
OPEN_MPI_4_SIGNAL = """--------------------------------------------------------------------------
mpirun noticed that process rank 12 with PID 0 on node node-017 exited on signal 11 (Segmentation fault).
--------------------------------------------------------------------------
"""
OPEN_MPI_5_CODE = """--------------------------------------------------------------------------
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-5702@1,2]
   Exit code:    71
--------------------------------------------------------------------------
"""
OPEN_MPI_4_CODE = """--------------------------------------------------------------------------
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[42361,1],2]
  Exit code:    71
--------------------------------------------------------------------------
"""
HYDRA_SIGNAL = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 13333 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""


def test_open_mpi_names_rank_node_and_signal() -> None:
    for log, rank, node, number in ((OPEN_MPI_5_SIGNAL, 1, "vm", 9), (OPEN_MPI_4_SIGNAL, 12, "node-017", 11)):
        word = mpirun_word(log, {})
        assert word is not None
        assert (word.rank, word.node, word.signal_number, word.exit_code) == (rank, node, number, None)
        assert word.quote in " ".join(log.split())


def test_open_mpi_names_rank_and_exit_code() -> None:
    for log in (OPEN_MPI_5_CODE, OPEN_MPI_4_CODE):
        word = mpirun_word(log, {})
        assert word is not None
        assert (word.rank, word.signal_number, word.exit_code) == (2, None, 71)


def test_hydra_names_the_process() -> None:
    word = mpirun_word(HYDRA_SIGNAL, {0: 13332, 1: 13333})
    assert word is not None
    assert (word.rank, word.node, word.signal_number) == (1, "vm", 9)
    assert mpirun_word(HYDRA_SIGNAL, {}).rank is None  # type: ignore[union-attr]


def test_hydra_without_its_last_lines_gives_an_exit_code() -> None:
    word = mpirun_word(HYDRA_SIGNAL.partition("YOUR APPLICATION TERMINATED")[0], {})
    assert word is not None
    assert (word.signal_number, word.exit_code) == (None, 9)


def test_other_text_says_nothing() -> None:
    assert mpirun_word("step 3 of rank 1 exited the loop\n", {}) is None
    assert mpirun_word("", {}) is None


@pytest.mark.parametrize(
    ("line", "rank", "node", "number", "code"),
    [
        ("srun: error: n2: task 1: Killed", 1, "n2", 9, None),
        ("srun: error: n1: tasks 0-1: Exited with exit code 1", 0, "n1", None, 1),
        ("srun: error: gpu-07: tasks 2,4-5: Terminated", 2, "gpu-07", 15, None),
        ("srun: error: n1: task 0: Segmentation fault (core dumped)", 0, "n1", 11, None),
        ("srun: error: n1: task 0: Bus error", 0, "n1", 7, None),
        ("srun: error: n1: task 0: Aborted (core dumped)", 0, "n1", 6, None),
        ("srun: error: n3.cluster: task 12: Out Of Memory", 12, "n3.cluster", 9, None),
    ],
)
def test_srun_names_rank_node_and_end(
    line: str, rank: int, node: str, number: int | None, code: int | None
) -> None:
    word = srun_word(
        f"srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n{line}\n", {}
    )
    assert word is not None
    assert (word.rank, word.node, word.signal_number, word.exit_code) == (rank, node, number, code)
    assert word.quote == line


def test_srun_speaks_of_the_first_rank_first() -> None:
    log = """srun: error: n2: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.0
slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2024-01-02T03:04:05 ***
srun: error: n1: task 0: Exited with exit code 143
"""
    word = srun_word(log, {})
    assert word is not None
    assert (word.rank, word.signal_number) == (1, 9)


@pytest.mark.parametrize(
    "log",
    [
        "",
        "srun: error: task 0 launch failed: Error configuring interconnect\n",
        "srun: error: Unable to create step for job 7: Requested nodes are busy\n",
        "srun: error: n1: tasks: Killed\n",
        "rank 1 on n2: task 1: Killed\n",
    ],
)
def test_other_words_of_srun_blame_nobody(log: str) -> None:
    assert srun_word(log, {}) is None


def test_srun_names_lost_nodes() -> None:
    log = """srun: error: Node failure on n2
srun: error: n1: task 0: Killed
srun: error: Node failure on rack1-n003
"""
    assert srun_lost_nodes(log) == ["n2", "rack1-n003"]
    assert srun_lost_nodes("srun: error: n1: task 0: Killed\n") == []


def test_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mpirun.log"
    path.write_bytes(b"x" * 5000 + b"\xff last words")
    assert read_log(path, max_bytes=12).endswith(" last words")
    assert len(read_log(path, max_bytes=12)) == 12
    assert read_log(tmp_path / "missing") == ""
