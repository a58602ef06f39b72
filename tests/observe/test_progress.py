from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pty
import time
from pathlib import Path
from typing import Any

import pytest

from hpctrain.observe import progress as progress_module
from hpctrain.observe.events import EventLog, EventTail
from hpctrain.observe.progress import (
    BarProgress,
    LineProgress,
    Pace,
    Progress,
    describe_event,
    describe_step,
    make_progress,
)


@pytest.fixture
def log(tmp_path: Path) -> EventLog:
    made = EventLog(tmp_path / "rank-0.jsonl")
    yield made
    made.close()


def follow(tmp_path: Path, interval_s: float = 0.0) -> tuple[LineProgress, io.StringIO]:
    stream = io.StringIO()
    progress = LineProgress(stream, interval_s)
    progress.follow(tmp_path)
    return progress, stream


def test_steps_become_one_line_per_interval(tmp_path: Path, log: EventLog) -> None:
    progress, stream = follow(tmp_path, interval_s=3600)
    for step in range(50):
        log.emit("step", step=step)
        progress.poll()
    assert stream.getvalue() == ""
    assert progress.last_step == 49
    progress, stream = follow(tmp_path)
    progress.poll()
    progress.poll()
    assert stream.getvalue().count("\n") == 1, "the same step is not said twice"
    assert "step 49" in stream.getvalue()


def test_a_step_in_words() -> None:
    event = {"step": 30, "steps_total": 120, "epoch": 2, "loss": 0.123456, "samples_per_s": 1234.5}
    assert describe_step(event, 3725.0) == "step 30/120, epoch 2, loss 0.1235, 1234 samples/s, 1:02:05 left"
    assert describe_step({"step": 1, "loss": "nan"}) == "step 1, loss nan"


def test_the_time_left_follows_the_pace_of_this_attempt(tmp_path: Path) -> None:
    lines = [
        '{"t": 100, "kind": "step", "step": 10, "steps_total": 40}',
        '{"t": 110, "kind": "step", "step": 20, "steps_total": 40}',
    ]
    (tmp_path / "rank-0.jsonl").write_text("\n".join(lines) + "\n")
    progress, stream = follow(tmp_path)
    progress.poll()
    assert "0:00:20 left" in stream.getvalue()


def test_what_matters_is_said_at_once(tmp_path: Path, log: EventLog) -> None:
    progress, stream = follow(tmp_path, interval_s=3600)
    log.emit("restore", name="step-000000010-a0001", step=10)
    log.emit("refused_checkpoint", name="step-000000020-a0001", reason="digest of model.safetensors")
    log.emit("evaluate", step=10, metrics={"top1": 0.954321})
    log.emit("warning", message="uneven lanes")
    log.emit("staging", chunks=1, total=9)
    progress.poll()
    said = [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]
    assert said == [
        "restore: name step-000000010-a0001, step 10",
        "refused checkpoint: name step-000000020-a0001, reason digest of model.safetensors",
        "evaluate: step 10, top1 0.9543",
        "warning: uneven lanes",
    ]


def test_warnings_of_all_ranks_are_said_once(tmp_path: Path) -> None:
    for rank in range(4):
        other = EventLog(tmp_path / f"rank-{rank}.jsonl")
        other.emit("warning", message="no space left in /ssd: reading on from the shared files")
        other.emit("step", step=100 + rank)
        other.close()
    progress, stream = follow(tmp_path, interval_s=3600)
    progress.poll()
    assert stream.getvalue().count("no space left") == 1
    assert progress.last_step == 100, "steps are those of rank 0"


def test_another_attempt_begins_anew(tmp_path: Path, log: EventLog) -> None:
    progress, _ = follow(tmp_path)
    log.emit("step", step=7)
    progress.poll()
    progress.follow(tmp_path / "next")
    progress.poll()
    assert progress.last_step == -1


def test_the_pace_of_starting_stepping_and_saving_is_remembered(tmp_path: Path) -> None:
    """Also across attempts: the next one will take about as long."""
    progress = Progress()
    assert progress.pace == Pace(0.0, 0.0, 0.0)
    progress.follow(tmp_path)
    began_s = time.time()

    def add(**event: Any) -> None:
        with (tmp_path / "rank-0.jsonl").open("a") as stream:
            stream.write(json.dumps(event) + "\n")
        progress.poll()

    add(kind="step", t=began_s + 7, step=11)
    assert progress.pace.start_s == pytest.approx(7, abs=0.5)
    assert progress.pace.step_s == 0, "one step tells nothing about the next"
    add(kind="step", t=began_s + 13, step=14)
    add(kind="checkpoint", t=began_s + 14, step=14, seconds=0.75)
    assert progress.pace.step_s == pytest.approx(2)
    progress.follow(tmp_path / "next")
    progress.poll()
    assert progress.pace.step_s == pytest.approx(2)
    assert progress.pace.save_s == 0.75
    assert progress.pace.start_s == pytest.approx(7, abs=0.5)


def test_a_reader_that_went_away_does_not_end_the_run() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w", buffering=1) as stream:
        LineProgress(stream).say("nobody listens")
        with open(os.devnull, "w") as sink:
            os.dup2(sink.fileno(), stream.fileno())  # so that closing may flush what is left


def test_the_display_suits_the_stream() -> None:
    assert isinstance(make_progress(io.StringIO()), LineProgress)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        assert isinstance(make_progress(terminal), BarProgress)
    os.close(master)


def read_all(master: int) -> str:
    """Everything that was written to a terminal which is closed now."""
    content = b""
    with (
        os.fdopen(master, "rb", buffering=0) as stream,
        contextlib.suppress(OSError),
    ):  # EIO is the end of a terminal
        while part := stream.read(65536):
            content += part
    return content.decode()


def test_a_bar_on_a_terminal(tmp_path: Path, log: EventLog) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        progress = make_progress(terminal)
        progress.follow(tmp_path)
        progress.poll()
        log.emit("step", step=3, steps_total=4, loss=0.5)
        progress.poll()
        progress.say("attempt 1: rank 1 was killed [signal 9]")
        progress.close()
        progress.close()
        progress.say("finished")
    shown = read_all(master)
    for words in ("step 3/4, loss 0.5", "rank 1 was killed [signal 9]", "finished"):
        assert words in shown


def test_nothing_is_said_where_nobody_asked(tmp_path: Path, log: EventLog) -> None:
    progress = Progress()
    progress.poll()
    progress.follow(tmp_path)
    log.emit("step", step=3)
    log.emit("warning", message="x")
    progress.poll()
    progress.close()
    assert progress.last_step == 3


def test_any_event_can_be_said() -> None:
    assert (
        describe_event({"t": 1, "kind": "checkpoint_failed", "message": "no space"})
        == "checkpoint failed: no space"
    )
    assert describe_event({"t": 1, "kind": "stop"}) == "stop: "


def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that events are read from, from now on."""
    names: list[str] = []
    read = EventTail.poll

    def poll(tail: EventTail) -> list[dict[str, Any]]:
        names.append(tail.path.name)
        return read(tail)

    monkeypatch.setattr(EventTail, "poll", poll)
    return names


def test_files_of_other_ranks_are_read_only_where_they_have_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand of them lie on a shared filesystem."""
    monkeypatch.setattr(progress_module, "_OTHERS_S", 0.0)
    monkeypatch.setattr(progress_module, "_OTHERS_PER_S", 10**9)
    logs = [EventLog(tmp_path / f"rank-{rank}.jsonl") for rank in range(4)]
    for log in logs:
        log.emit("step", step=1)
    names = opened(tmp_path, monkeypatch)
    progress, stream = follow(tmp_path, interval_s=3600)
    progress.poll()
    assert names == [f"rank-{rank}.jsonl" for rank in range(4)]
    names.clear()
    progress.poll()
    logs[2].emit("warning", message="uneven lanes")
    progress.poll()
    assert [name for name in names if name != "rank-0.jsonl"] == ["rank-2.jsonl"]
    assert "uneven lanes" in stream.getvalue()
    with logs[3].path.open("a") as torn:
        torn.write('{"t": 1, "kind": "warning", ')
    progress.poll()
    with logs[3].path.open("a") as torn:
        torn.write('"message": "no space"}\n')
    progress.poll()
    assert "no space" in stream.getvalue()
    for log in logs:
        log.close()


def test_many_ranks_are_looked_at_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_OTHERS_S", 0.0)
    monkeypatch.setattr(progress_module, "_OTHERS_PER_S", 10)
    for rank in range(6):
        (tmp_path / f"rank-{rank}.jsonl").touch()
    progress, stream = follow(tmp_path, interval_s=3600)
    progress.poll()
    log = EventLog(tmp_path / "rank-5.jsonl")
    log.emit("warning", message="uneven lanes")
    log.close()
    began_s = time.monotonic()
    while "uneven lanes" not in stream.getvalue():
        progress.poll()
        assert time.monotonic() - began_s < 10
    assert time.monotonic() - began_s > 0.4, "five others, ten per second"


def test_a_filesystem_that_does_not_answer_brings_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "_OTHERS_S", 0.0)
    log = EventLog(tmp_path / "rank-1.jsonl")
    log.emit("warning", message="uneven lanes")
    log.close()
    progress, stream = follow(tmp_path, interval_s=3600)

    def stale(*_: object) -> None:  # no filesystem here gives ESTALE on demand
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(progress_module.os, "scandir", stale)
        progress.poll()
    assert stream.getvalue() == ""
    progress.poll()
    assert "uneven lanes" in stream.getvalue()
