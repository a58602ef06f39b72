from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.harness import Ended, Measurement, Observation
from benchmarks.report import Report, Table, as_json, check_target, number, spread, with_interval, write
from hpctrain.errors import DataError, StorageError, UsageError

GOLDEN = """\
# Benchmark: storage

**Ended early: time limit.** The figures are those measured until then.

**Use this.**

Rule: the fastest.

## Reader

| what | GB/s |
| :-- | --: |
| none | 1.50 [1.00, 2.00] |
| gzip | 0.100 (no interval, n = 1) |

A note.

## How it was measured

- Warm.

## Environment

- cpu model: unknown
- cpu flags: avx2, f16c
- mpi flags: none
- versions: numpy 2, torch None
"""


def a_report() -> Report:
    observations = [
        Observation("none", 0, {"rate": 1.0}, 0.5),
        Observation("gzip", 0, {"rate": 0.1}, 0.5),
        Observation("none", 1, {"rate": 2.0}, 0.5),
    ]
    part = Measurement(("none", "gzip"), observations, ("zstd",), Ended.TIME)
    rows = [
        ("none", spread(part.values("none", "rate"))),
        ("gzip", with_interval(part.ratios("gzip", "none", "rate"))),
    ]
    environment = {
        "cpu_model": None,
        "cpu_flags": ["avx2", "f16c"],
        "mpi_flags": [],
        "versions": {"numpy": 2, "torch": None},
    }
    return Report(
        "storage",
        environment,
        {"rounds": 2},
        {"reader": part},
        [Table("Reader", ("what", "GB/s"), rows, "A note.")],
        ["Use this."],
        ["the fastest."],
        ["Warm."],
    )


def test_markdown_golden() -> None:
    assert a_report().markdown() == GOLDEN


def test_json_golden() -> None:
    found = json.loads(as_json(a_report()))
    part = found["measurements"].pop("reader")
    assert found == {
        "format": "hpctrain-benchmark",
        "version": 1,
        "benchmark": "storage",
        "ended": "time limit",
        "advice": ["Use this."],
        "rules": ["the fastest."],
        "notes": ["Warm."],
        "environment": a_report().environment,
        "config": {"rounds": 2},
        "measurements": {},
    }
    assert part["settings"]["none"]["rate"] == {
        "n": 2, "median": 1.5, "low": 1.0, "high": 2.0, "quartiles": [1.25, 1.75], "interval": None,
    }  # fmt: skip
    assert (part["baseline"], part["left_out"], part["ended"]) == ("none", ["zstd"], "time limit")
    assert part["observations"][2] == {
        "setting": "none",
        "round_number": 1,
        "values": {"rate": 2.0},
        "seconds": 0.5,
    }


def test_json_of_a_diverged_run_is_still_json() -> None:
    report = a_report()
    report.measurements["reader"].observations.append(Observation("none", 2, {"loss": float("nan")}, 1.0))
    assert json.loads(as_json(report))["measurements"]["reader"]["settings"]["none"]["loss"]["median"] is None


def test_json_of_a_part_without_settings() -> None:
    report = a_report()
    report.measurements["training"] = Measurement(())
    part = json.loads(as_json(report))["measurements"]["training"]
    assert (part["settings"], part["observations"]) == ({}, [])


def test_the_gravest_end_counts() -> None:
    report = a_report()
    error = DataError("bad")
    assert (report.ended, report.failure) == (Ended.TIME, None)
    report.measurements["training"] = Measurement(("none",), ended=Ended.FAILED, failure=error)
    report.measurements["more"] = Measurement(("none",), ended=Ended.INTERRUPTED)
    assert (report.ended, report.failure) == (Ended.FAILED, error)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (1, "1.00"), (0.99999, "1.00"), (12.345, "12.3"), (123.4, "123"), (1234.5, "1,234"),
        (-0.00123, "-0.00123"),
        (1.5e-9, "1.50e-09"), (float("nan"), "nan"), (float("inf"), "inf"),
    ],
)  # fmt: skip
def test_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_intervals_and_dashes() -> None:
    assert with_interval([1, 2, 3, 4, 5, 6]) == "3.50 (1.00 .. 6.00)"
    assert (with_interval([]), spread([])) == ("-", "-")


@pytest.mark.parametrize("target", ["", "missing/report.json"])
def test_targets_that_cannot_be_written_are_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        check_target(tmp_path / target)


def test_targets_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_target(None)
    check_target(tmp_path / "report.json")
    check_target(Path("report.json"))


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "report.md"
    target.write_text("old", encoding="utf-8")
    write("new", target)
    assert target.read_text(encoding="utf-8") == "new"
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    with pytest.raises(StorageError, match="cannot be written"):
        write("new", tmp_path / "folder")  # cannot be replaced by a file
    assert os.listdir(tmp_path / "folder") == ["inner"]
    assert sorted(os.listdir(tmp_path)) == ["folder", "report.md"]
