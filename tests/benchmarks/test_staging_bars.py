from __future__ import annotations

from typing import Any

import pytest

from benchmarks.harness import Measurement, Observation
from benchmarks.report import Report
from benchmarks.staging_bars import Bar, Judged, bars_table
from benchmarks.staging_kill_runs import Killed
from benchmarks.staging_kills import Trial
from benchmarks.staging_rates import RATE, name_of
from benchmarks.staging_report import fill


def measured(values: dict[str, list[dict[str, float]]]) -> Measurement:
    """Round by round what each setting gave."""
    observations = [
        Observation(name, number, found, 1.0)
        for name, rounds in values.items()
        for number, found in enumerate(rounds)
    ]
    return Measurement(tuple(values), observations)


@pytest.mark.parametrize(
    ("relation", "every", "values", "met"),
    [
        ("at least", False, (0.5, 0.9, 2.0), True),
        ("at least", False, (0.5, 0.89, 2.0), False),
        ("at least", True, (0.89, 1.0, 1.0), False),
        ("at most", False, (0.5, 0.9, 2.0), True),
        ("at most", True, (0.5, 0.9, 0.91), False),
        ("at most", True, (0.9,), True),
        ("at most", True, (), None),
        (None, False, (1.0,), None),
    ],
)
def test_the_median_decides_or_the_worst(
    relation: Any, every: bool, values: tuple[float, ...], met: bool | None
) -> None:
    judged = Judged(Bar("rate", "here", 0.9, relation, every), values)
    assert judged.is_met is met
    assert judged.document()["met"] is met


def test_a_bar_without_figures_says_why() -> None:
    judged = Judged(Bar("rate", "here", 0.9, "at least"), (), "no root")
    assert judged.sentence() == "Not measured: rate, here: no root (bar: at least 0.9)."
    assert bars_table([judged]).rows == [("rate", "here", "0", "no root", "at least 0.9", "-")]


def test_a_missed_bar_is_told_with_its_number() -> None:
    assert Judged(Bar("rate", "here", 0.9, "at least"), (0.5,)).sentence() == (
        "MISSED: rate, here: 0.500, bar: at least 0.9."
    )


# ---- The whole report ------------------------------------------------------------------------------------------


def report_of(measurements: dict[str, Measurement], killed: list[Killed], reasons: dict[str, str]) -> Report:
    report = Report("staging", {"load_1min_before": 0.1}, {}, measurements)
    fill(report, killed, reasons)
    return report


def bar(report: Report, what: str, on: str) -> dict[str, Any]:
    (found,) = [item for item in report.bars if item["what"] == what and item["on"] == on]
    return found


def test_every_bar_of_the_issue_stands_in_a_report_without_figures() -> None:
    report = report_of({}, [], {"cluster": "no root"})
    named = " ".join(item["what"] for item in report.bars)
    for words in (
        "cp with fsync",
        "first batch",
        "5 epochs",
        "second run",
        "requeue",
        "epoch reading",
        "backup adds",
    ):
        assert words in named
    assert bar(report, "epoch reading the shared directory / staged", "50 MB/s")["reason"] == "no root"
    assert report.advice[0].startswith("0 of ")
    assert "Not measured" in report.markdown()


def test_staging_is_compared_with_cp_within_each_round() -> None:
    mine, other = name_of("staging", "1 MiB", "warm"), name_of("cp", "1 MiB", "warm")
    rates = measured({mine: [{RATE: 80.0}, {RATE: 300.0}], other: [{RATE: 100.0}, {RATE: 200.0}]})
    found = bar(report_of({"rates": rates}, [], {}), "staging rate / cp with fsync", "1 MiB chunks, warm")
    assert (found["figure"], found["met"]) == (pytest.approx((0.8 + 1.5) / 2), True)


def test_the_first_batch_is_judged_by_its_share_and_against_reading_without_staging() -> None:
    first = measured(
        {
            "staging, disk": [{"first_batch_s": 0.2, "opened_and_first_batch_s": 0.3, "staged_s": 2.0}],
            "direct, disk": [{"first_batch_s": 0.3, "opened_and_first_batch_s": 0.3, "staged_s": 0.3}],
        }
    )
    report = report_of({"first batch": first}, [], {})
    assert bar(report, "first batch / full staging time", "disk")["met"] is False
    assert bar(report, "first batch without staging / with", "disk")["figure"] == pytest.approx(1.5)
    assert bar(report, "the same, with opening the data path", "disk")["relation"] is None


def test_one_round_that_read_too_much_misses_the_bar() -> None:
    jobs = measured({"global": [{"device_sets": 1.0}, {"device_sets": 1.03}, {"device_sets": 1.0}]})
    found = bar(report_of({"cluster": jobs}, [], {}), "sets read in 5 epochs, as the kernel counts", "global")
    assert (found["figure"], found["met"]) == (1.03, False)


def test_one_wrong_trial_of_kills_misses_the_bar_and_is_kept() -> None:
    trials = [Trial("pack", "new", 3, 9, problem, 0.5) for problem in ("", "after the kill: other bytes")]
    report = report_of({}, [Killed("pack", 2, 7, trials)], {})
    assert bar(report, "kills at random writes, all right", "pack")["met"] is False
    assert [item["nth"] for item in report.config["problems_of_kills"]] == [3]
    assert "Seeds: pack 7" in report.markdown()


def test_kills_that_were_not_all_made_miss_the_bar() -> None:
    report = report_of(
        {}, [Killed("pack", 2, 7, [Trial("pack", "new", 3, 9, "", 0.5)], "it ended with 1")], {}
    )
    assert bar(report, "kills at random writes, all right", "pack")["met"] is False


def test_what_a_backup_adds_is_judged_by_the_files_of_the_store() -> None:
    values = {"grown_share": 0.016, "added_share": 0.01, "changed_share": 0.01, "backup_again_s": 2.0}
    keeping = measured({"backup, restore": [values], "cp -r": [{"cp_s": 1.0}]})
    report = report_of({"keeping": keeping}, [], {})
    on = "1.00% of the chunks changed"
    assert bar(report, "bytes a backup adds / bytes of the set", on)["met"] is False
    assert bar(report, "cp -r time / backup time", on)["figure"] == 0.5
