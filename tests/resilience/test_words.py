"""Logs as mpirun wrote them (Open MPI 5.0.11, Open MPI 4.1, MPICH 5.0.2)."""

from __future__ import annotations

from pathlib import Path

from hpctrain.resilience.words import launcher_word, read_log

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
        word = launcher_word(log, {})
        assert word is not None
        assert (word.rank, word.node, word.signal_number, word.exit_code) == (rank, node, number, None)
        assert word.quote in " ".join(log.split())


def test_open_mpi_names_rank_and_exit_code() -> None:
    for log in (OPEN_MPI_5_CODE, OPEN_MPI_4_CODE):
        word = launcher_word(log, {})
        assert word is not None
        assert (word.rank, word.signal_number, word.exit_code) == (2, None, 71)


def test_hydra_names_the_process() -> None:
    word = launcher_word(HYDRA_SIGNAL, {0: 13332, 1: 13333})
    assert word is not None
    assert (word.rank, word.node, word.signal_number) == (1, "vm", 9)
    assert launcher_word(HYDRA_SIGNAL, {}).rank is None  # type: ignore[union-attr]


def test_hydra_without_its_last_lines_gives_an_exit_code() -> None:
    word = launcher_word(HYDRA_SIGNAL.partition("YOUR APPLICATION TERMINATED")[0], {})
    assert word is not None
    assert (word.signal_number, word.exit_code) == (None, 9)


def test_other_text_says_nothing() -> None:
    assert launcher_word("step 3 of rank 1 exited the loop\n", {}) is None
    assert launcher_word("", {}) is None


def test_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mpirun.log"
    path.write_bytes(b"x" * 5000 + b"\xff last words")
    assert read_log(path, max_bytes=12).endswith(" last words")
    assert len(read_log(path, max_bytes=12)) == 12
    assert read_log(tmp_path / "missing") == ""
