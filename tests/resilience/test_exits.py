from __future__ import annotations

import errno
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain import errors
from hpctrain.resilience.exits import (
    EndRecord,
    FailureClass,
    classify,
    gravest,
    read_end_records,
    write_end_record,
)


class HorovodInternalError(RuntimeError):
    """Known to `classify` by its name only."""


@pytest.mark.parametrize(
    ("error", "failure", "code"),
    [
        (errors.UsageError("x"), FailureClass.USER, 64),
        (errors.DataError("x"), FailureClass.USER, 65),
        (errors.ConfigError("x"), FailureClass.USER, 78),
        (errors.BuildError("x"), FailureClass.USER, 69),
        (errors.HangError("x"), FailureClass.HANG, 71),
        (errors.StorageError("x"), FailureClass.IO, 74),
        (errors.PeerError("x"), FailureClass.PEER, 76),
        (errors.HpctrainError("x"), FailureClass.BUG, 70),
        (HorovodInternalError("x"), FailureClass.PEER, 76),
        (OSError(errno.EIO, "x"), FailureClass.IO, 74),
        (OSError(errno.ENOSPC, "x"), FailureClass.IO, 74),
        (OSError(errno.ESTALE, "x"), FailureClass.IO, 74),
        (FileNotFoundError(errno.ENOENT, "x"), FailureClass.BUG, 70),
        (MemoryError(), FailureClass.BUG, 70),
        (ZeroDivisionError(), FailureClass.BUG, 70),
        (KeyboardInterrupt(), FailureClass.OTHER, 72),
        (SystemExit(3), FailureClass.OTHER, 3),
        (SystemExit("text"), FailureClass.OTHER, 1),
        (SystemExit(None), FailureClass.OTHER, 0),
    ],
)
def test_classify(error: BaseException, failure: FailureClass, code: int) -> None:
    assert classify(error) == (failure, code)


def test_an_error_of_mpi_is_a_lost_peer() -> None:
    from mpi4py import MPI

    assert classify(MPI.Exception(MPI.ERR_OTHER))[0] is FailureClass.PEER


def record(rank: int = 0, failure: FailureClass = FailureClass.BUG, ended_s: float = 0.0) -> EndRecord:
    made = EndRecord.now(rank, failure, step=3, phase="compute", message="why")
    return replace(made, ended_unix_s=ended_s)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    try:
        raise ValueError("lost 3 of 4")
    except ValueError as error:
        written = EndRecord.of_error(7, error, step=12, phase="reduce")
    write_end_record(tmp_path, written)
    assert read_end_records(tmp_path) == {7: written}
    assert written.exception == "ValueError"
    assert written.message == "lost 3 of 4"
    assert "raise ValueError" in (written.traceback or "")


def test_the_first_record_of_a_rank_wins_and_leaves_no_other_file(tmp_path: Path) -> None:
    write_end_record(tmp_path, record(failure=FailureClass.HANG))
    write_end_record(tmp_path, record(failure=FailureClass.PEER))
    assert read_end_records(tmp_path)[0].failure is FailureClass.HANG
    assert [path.name for path in (tmp_path / "ranks").iterdir()] == ["0.json"]


def _write_many(directory: Path, code: int) -> None:
    for _ in range(20):
        write_end_record(directory, replace(record(), code=code))


def test_concurrent_writers_leave_one_whole_record(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(tmp_path, code)) for code in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    assert read_end_records(tmp_path)[0].code in range(4)
    assert len(list((tmp_path / "ranks").iterdir())) == 1


def test_a_record_that_cannot_be_written_goes_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ranks").write_text("a file where the directory should be")
    write_end_record(tmp_path, record())
    assert "end record not written" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"failure": "unheard of"}'])
def test_a_damaged_record_counts_as_other(tmp_path: Path, content: str) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "2.json").write_text(content)
    found = read_end_records(tmp_path)[2]
    assert found.failure is FailureClass.OTHER
    assert "2.json" in (found.message or "")


def test_other_files_are_no_records(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "2.pid.json").write_text(json.dumps({"pid": 1}))
    assert read_end_records(tmp_path) == {}


@given(st.dictionaries(st.integers(0, 5), st.sampled_from(FailureClass)), st.integers(1, 6))
def test_the_gravest_class_is_taken(classes: dict[int, FailureClass], num_ranks: int) -> None:
    records = {rank: record(rank, failure) for rank, failure in classes.items() if rank < num_ranks}
    found, decisive = gravest(records, num_ranks)
    present = [item.failure for item in records.values()]
    if len(records) < num_ranks:
        present.append(FailureClass.KILLED)
    assert found.gravity == min(failure.gravity for failure in present)
    assert decisive is None or decisive.failure is found


def test_among_equals_the_earliest_decides() -> None:
    records = {0: record(0, ended_s=2.0), 1: record(1, ended_s=1.0), 2: record(2, ended_s=3.0)}
    assert gravest(records, 3)[1] == records[1]


def test_order_of_gravity_is_that_of_the_design() -> None:
    order = ["user", "hang", "io", "bug", "killed", "other", "peer", "leave", "done"]
    assert sorted(FailureClass, key=lambda item: item.gravity) == order


def test_a_file_that_cannot_be_read_is_shown_to_who_looks_once(tmp_path: Path) -> None:
    """Who looks again will find it then; `known` records are taken as they are."""
    (tmp_path / "ranks" / "2.json").mkdir(parents=True)  # EISDIR, for root too
    assert "not an end record" in read_end_records(tmp_path)[2].message
    assert read_end_records(tmp_path, {}) == {}
    known = {5: EndRecord.now(5, FailureClass.DONE, step=1, phase="compute")}
    assert read_end_records(tmp_path, known) == known
