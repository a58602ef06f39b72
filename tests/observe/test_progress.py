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
from hpctrain.observe.event_words import describe_event, describe_step
from hpctrain.observe.events import EventLog, EventTail
from hpctrain.observe.progress import BarProgress, LineProgress, Pace, Progress, make_progress


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


# ---- staging


def staging(folder: Path, rank: int, present_gb: float, *, t: float, **more: Any) -> None:
    """A node of 4 GB says how far it is."""
    present = int(present_gb * 1e9)
    event = {"present_bytes": present, "total_bytes": 4 * 10**9, "shared_bytes": present, "peer_bytes": 0}
    event |= {"t": t, "kind": "staging", "node": f"n{rank}", "done": present_gb == 4, **more}
    with (folder / f"rank-{rank}.jsonl").open("a") as stream:
        stream.write(json.dumps(event) + "\n")


def said(stream: io.StringIO) -> list[str]:
    """The lines so far, without the time of day."""
    return [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for more events."""
    for name in ("_OTHERS_S", "_SETTLE_S"):
        monkeypatch.setattr(progress_module, name, 0.0)
    monkeypatch.setattr(progress_module, "_OTHERS_PER_S", 10**9)


@pytest.mark.usefixtures("at_once")
def test_staging_is_told_for_all_nodes_together(tmp_path: Path, log: EventLog) -> None:
    """Before the first step, then behind the step; in the end once more, and never again."""
    progress, stream = follow(tmp_path)
    for rank in range(2):
        staging(tmp_path, rank, 1, t=10)
    progress.poll()
    for rank in range(2):
        staging(tmp_path, rank, 2, t=12)
    progress.poll()
    log.emit("step", step=3)
    progress.poll()
    for rank in range(2):
        staging(tmp_path, rank, 4, t=16)
    for _ in range(3):
        progress.poll()
    log.emit("step", step=4)
    progress.poll()
    progress.close()
    assert said(stream) == [
        "staging 25 % of 8.0 GB on 2 nodes",
        "staging 50 % of 8.0 GB on 2 nodes, 1.0 GB/s",
        "step 3, staging 50 % of 8.0 GB on 2 nodes, 1.0 GB/s",
        "staged 8.0 GB on 2 nodes: 8.0 GB from the shared filesystem",
        "step 3",
        "step 4",
    ]


def test_staging_is_not_over_while_a_node_has_not_spoken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "_OTHERS_S", 0.0)
    progress, stream = follow(tmp_path)
    staging(tmp_path, 0, 4, t=10)
    progress.poll()
    progress.poll()
    assert said(stream) == []
    staging(tmp_path, 1, 4, t=11, shared_bytes=0)
    progress.close()
    assert said(stream) == ["staged 8.0 GB on 2 nodes: 4.0 GB from the shared filesystem"]


@pytest.mark.usefixtures("at_once")
def test_staging_is_told_again_where_it_has_changed(tmp_path: Path) -> None:
    progress, stream = follow(tmp_path)
    staging(tmp_path, 0, 4, t=10)
    progress.poll()
    progress.poll()
    staging(tmp_path, 0, 4, t=20, peer_bytes=10**9)
    progress.poll()
    progress.poll()
    assert said(stream) == [
        "staged 4.0 GB on 1 node: 4.0 GB from the shared filesystem",
        "staged 4.0 GB on 1 node: 4.0 GB from the shared filesystem, 1.0 GB from other nodes",
    ]


@pytest.mark.usefixtures("at_once")
def test_long_staging_is_no_flood(tmp_path: Path) -> None:
    progress, stream = follow(tmp_path, interval_s=3600)
    for number in range(50):
        staging(tmp_path, 0, number / 50, t=number)
        progress.poll()
    assert said(stream) == []


def test_staging_on_a_terminal(tmp_path: Path, log: EventLog) -> None:
    """A bar of its own, as long as it goes on."""
    shown = []
    for steps, present_gb in ((0, 1), (3, 2), (4, 4)):
        master, slave = pty.openpty()
        with os.fdopen(slave, "w") as terminal:
            progress = make_progress(terminal)
            progress.follow(tmp_path)
            if steps:
                log.emit("step", step=steps, steps_total=4)
            staging(tmp_path, 0, present_gb, t=10 + steps)
            progress.poll()
            progress.close()
        shown.append(read_all(master))
    assert "staging 25 % of 4.0 GB on 1 node" in shown[0]
    assert "step" not in shown[0]
    assert "staging 50 % of 4.0 GB on 1 node, 333.3 MB/s" in shown[1]
    assert "step 3/4" in shown[1]
    assert "staging" not in shown[2]
    assert "staged 4.0 GB on 1 node: 4.0 GB from the shared filesystem" in shown[2].replace("\r\n", " ")
