from __future__ import annotations

import json
import math
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.observe.events import EventLog, EventTail, read_events


def test_events_are_read_as_they_were_emitted(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-0.jsonl"
    log = EventLog(path)
    began_s = time.time()
    log.emit("step", step=3, loss=0.5, name="Grüße\n", metrics={"top1": 0.9}, nothing=None)
    log.emit("end")
    first, second = read_events(path)
    assert began_s - 1e-3 <= first.pop("t") <= time.time() + 1e-3
    assert first == {
        "kind": "step",
        "step": 3,
        "loss": 0.5,
        "name": "Grüße\n",
        "metrics": {"top1": 0.9},
        "nothing": None,
    }
    assert second["kind"] == "end"
    log.close()


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.float32("nan"), "nan"),
        ([np.float64(1.0), {"a": math.inf}], [1.0, {"a": "inf"}]),
        (Path("/data"), "/data"),
        ({3: 1}, {"3": 1}),
    ],
)
def test_every_value_becomes_json_that_other_tools_read(tmp_path: Path, value: Any, written: Any) -> None:
    log = EventLog(tmp_path / "log")
    log.emit("x", value=value)
    line = (tmp_path / "log").read_text()
    found = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert found["value"] == written
    log.close()


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 200))
def test_a_torn_line_is_left_out_until_it_is_complete(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("events") / "log"
    log = EventLog(path)
    for number in range(3):
        log.emit("step", step=number)
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    tail = EventTail(path)
    early = tail.poll()
    assert [event["step"] for event in early] == list(range(whole[:cut].count(b"\n")))
    path.write_bytes(whole)
    assert [event["step"] for event in early + tail.poll()] == [0, 1, 2]


def test_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"t": 1, "kin\n[1]\n{"t": 1}\n\xff\xfe\n{"t": 2, "kind": "end"}\n')
    assert [event["kind"] for event in read_events(path)] == ["end"]


def _emit_many(path: Path, writer: int) -> None:
    log = EventLog(path)
    for number in range(200):
        log.emit("x", writer=writer, number=number, text="y" * 300)


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_emit_many, args=(tmp_path / "log", number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    events = read_events(tmp_path / "log")
    assert len(events) == 600
    for writer in range(3):
        assert [event["number"] for event in events if event["writer"] == writer] == list(range(200))


def test_a_disk_that_takes_nothing_does_not_end_the_run() -> None:
    log = EventLog(Path("/dev/full"))
    log.emit("step", step=1)
    log.emit("step", step=2)
    assert log.lost == 2
    log.close()


def test_a_missing_file_has_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "missing") == []
