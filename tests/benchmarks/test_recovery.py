from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recovery
from benchmarks.harness import Ended, Measurement, Observation, Repetitions
from benchmarks.recovery import RecoveryConfig, run_recovery
from benchmarks.recovery_job import Growth, processes_of
from benchmarks.recovery_report import KILLED, NODE, WARNED, Judged, bars_of, relaunch_table, warning_table
from benchmarks.recovery_times import has_stepped, last_step, relaunch_times, warning_times
from benchmarks.report import Report, as_json
from benchmarks.training import BenchmarkFailed
from hpctrain.errors import ConfigError
from hpctrain.minicluster.namespaces import held_hosts
from hpctrain.minicluster.spec import ClusterSpec
from hpctrain.resilience.attempts import (
    ATTEMPT_VARIABLE,
    EndSummary,
    StartRecord,
    next_attempt,
    write_end,
    write_restored,
    write_start,
)
from hpctrain.resilience.exits import FailureClass
from tests.slurm_support import require_minicluster
from tests.support import ROOT

# What rank 0 wrote in a real run on a loaded machine, less the fields that do not matter here.
RECORDED_FIRST = """\
{"t":1796071227.617851,"kind":"start","attempt":1,"ranks":2}
{"t":1796071227.763534,"kind":"staging","chunks":24,"total":24}
{"t":1796071230.13112,"kind":"step","step":1,"epoch":0}
{"t":1796071231.933139,"kind":"step","step":2,"epoch":0}
{"t":1796071233.49669,"kind":"step","step":3,"epoch":0}
{"t":1796071235.037179,"kind":"step","step":4,"epoch":1}
{"t":1796071237.091201,"kind":"step","step":5,"epoch":1}
{"t":1796071238.453495,"kind":"step","step":6,"epoch":1}
{"t":1796071238.607947,"kind":"checkpoint","step":6,"seconds":0.1401751459998195}
{"t":1796071240.640858,"kind":"step","step":7,"epoch":1}
{"t":1796071242.174648,"kind":"step","step":8,"epoch":2}
{"t":1796071243.448403,"kind":"step","step":9,"epoch":2}
"""
RECORDED_SECOND = """\
{"t":1796071270.89068,"kind":"start","attempt":2,"ranks":2}
{"t":1796071270.979755,"kind":"restore","name":"step-000000006-a0001","step":6,"epoch":1}
{"t":1796071271.065954,"kind":"staging","chunks":24,"total":24}
{"t":1796071272.380343,"kind":"step","step":7,"epoch":1}
{"t":1796071273.181136,"kind":"step","step":8,"epoch":2}
{"t":1796071273.240862,"kind":"checkpoint","step":8,"seconds":0.05917337199934991}
{"t":1796071273.241246,"kind":"stop","step":8,"signal":"SIGUSR1"}
"""
RECORDED_WARNED = """\
{"t":1796071291.809332,"kind":"start","attempt":1,"ranks":2}
{"t":1796071293.172767,"kind":"step","step":1,"epoch":0}
{"t":1796071298.821729,"kind":"step","step":6,"epoch":1}
{"t":1796071298.997314,"kind":"checkpoint","step":6,"seconds":0.14936741000019538}
{"t":1796071302.037348,"kind":"step","step":9,"epoch":2}
{"t":1796071303.012998,"kind":"step","step":10,"epoch":2}
{"t":1796071303.058292,"kind":"checkpoint","step":10,"seconds":0.0446102219993918}
{"t":1796071303.058738,"kind":"stop","step":10,"signal":"SIGUSR1"}
"""


# ---- Arithmetic --------------------------------------------------------------------------------------------------


def attempt(
    run_dir: Path, started_s: float, events: str, restored: int | None, ended_s: float | None = None
) -> Path:
    """One attempt, with the events of rank 0 as they were recorded in a real run."""
    number = next_attempt(run_dir)
    directory = run_dir / "attempts" / f"a{number:04d}"
    identity = {"task_dir": "/", "host": "n1", "pid": 7, "boot_id": "b", "nodes": ["n1", "n2"]}
    write_start(
        run_dir,
        StartRecord(number, 2, [], **identity, started_unix_s=started_s, version="1", job="5"),  # type: ignore[arg-type]
    )
    (directory / "events" / "rank-0.jsonl").write_text(events)
    if restored is not None:
        write_restored(directory, restored)
    if ended_s is not None:
        end = EndSummary(
            number, FailureClass.KILLED, 70, "rank 1 was killed", 1, "n2", False, 0, 6, [], 1, None, started_s, ended_s
        )  # fmt: skip
        write_end(run_dir, end)
    return directory


def event(t: float, kind: str, **fields: Any) -> str:
    return json.dumps({"t": t, "kind": kind, **fields}, separators=(",", ":")) + "\n"


def steps(first_s: float, numbers: range) -> str:
    """A step every quarter of a second."""
    return "".join(event(first_s + at / 4, "step", step=number) for at, number in enumerate(numbers))


def a_killed_run(run_dir: Path) -> None:
    """Started at 100 s, first step at 105 s, killed after step 9 at 107.1 s, with a checkpoint of step 6."""
    said = (
        event(101.0, "start", attempt=1)
        + steps(105.0, range(1, 10))
        + event(106.4, "checkpoint", step=6, seconds=0.1)
    )
    attempt(run_dir, 100.0, said, restored=0, ended_s=108.0)
    attempt(run_dir, 108.5, event(111.0, "restore", step=6) + steps(113.0, range(7, 9)), restored=6)


def test_a_recorded_run_whose_rank_was_killed(tmp_path: Path) -> None:
    attempt(tmp_path, 1796071208.609, RECORDED_FIRST, restored=0, ended_s=1796071243.931)
    attempt(tmp_path, 1796071244.241, RECORDED_SECOND, restored=6)
    assert relaunch_times(tmp_path, 1796071243.453, 1796071243.736) == pytest.approx(
        {
            "plain_start_s": 21.522, "recovery_s": 28.927, "excess_s": 7.405, "lost_steps": 3,
            "detection_s": 0.283, "ending_s": 0.195, "placing_s": 0.310, "start_s": 28.139,
        },
        abs=1e-3,
    )  # fmt: skip


def test_a_recorded_run_that_was_warned(tmp_path: Path) -> None:
    attempt(tmp_path, 1796071278.796, RECORDED_WARNED, restored=0, ended_s=1796071308.1)
    attempt(tmp_path, 1796071310.5, "", restored=10)
    values = warning_times(tmp_path, 1796071302.0, gone_unix_s=1796071308.136, requeued_unix_s=1796071308.916)
    assert values == pytest.approx(
        {
            "plain_start_s": 14.377, "saved_s": 1.058, "gone_s": 6.136, "requeued_s": 6.916, "warning_s": 6.916,
            "save_s": 0.045, "excess_s": 6.871, "lost_steps": 0,
        },
        abs=1e-3,
    )  # fmt: skip


def test_recovery_is_split_into_what_it_consists_of(tmp_path: Path) -> None:
    a_killed_run(tmp_path)
    values = relaunch_times(tmp_path, fault_unix_s=107.1, noticed_unix_s=107.4)
    assert values == pytest.approx(
        {
            "plain_start_s": 5.0, "recovery_s": 5.9, "excess_s": 0.9, "lost_steps": 3,
            "detection_s": 0.3, "ending_s": 0.6, "placing_s": 0.5, "start_s": 4.5,
        }
    )  # fmt: skip
    parts = ("detection_s", "ending_s", "placing_s", "start_s")
    assert sum(values[part] for part in parts) == pytest.approx(values["recovery_s"])


def test_a_step_that_was_finished_after_the_signal_is_lost_as_well(tmp_path: Path) -> None:
    a_killed_run(tmp_path)
    with (tmp_path / "attempts/a0001/events/rank-0.jsonl").open("a") as stream:
        stream.write(event(107.3, "step", step=10))
        stream.write('{"t":107.4,"kind":"step","st')  # killed while it wrote
    assert relaunch_times(tmp_path, 107.1)["lost_steps"] == 4


def test_a_fault_that_nobody_spoke_of_was_noticed_at_the_end(tmp_path: Path) -> None:
    a_killed_run(tmp_path)
    values = relaunch_times(tmp_path, 107.1)
    assert (values["detection_s"], values["ending_s"]) == (pytest.approx(0.9), 0.0)


def test_an_attempt_that_failed_again_counts_as_time_not_as_recovery(tmp_path: Path) -> None:
    attempt(tmp_path, 100.0, steps(105.0, range(1, 10)), restored=0, ended_s=108.0)
    attempt(tmp_path, 109.0, event(110.0, "start", attempt=2), restored=6, ended_s=112.0)
    attempt(tmp_path, 113.0, steps(118.0, range(7, 8)), restored=6)
    values = relaunch_times(tmp_path, 107.1, 107.2)
    assert (values["recovery_s"], values["placing_s"]) == (pytest.approx(10.9), 5.0)
    assert has_stepped(tmp_path, after=1)
    assert not has_stepped(tmp_path, after=3)


def a_warned_run(run_dir: Path, restored: int = 10) -> None:
    """Warned at 107.1 s: the step under way is finished, saved in 0.4 s, and nothing is lost."""
    said = event(101.0, "start", attempt=1) + event(106.4, "checkpoint", step=6, seconds=0.1)
    said += (
        steps(105.0, range(1, 10))
        + event(107.9, "checkpoint", step=10, seconds=0.4)
        + event(107.9, "stop", step=10)
    )
    attempt(run_dir, 100.0, said, restored=0, ended_s=108.5)
    attempt(run_dir, 120.0, "", restored=restored)


def test_a_warning_costs_what_is_not_saving(tmp_path: Path) -> None:
    a_warned_run(tmp_path)
    assert warning_times(tmp_path, 107.1, gone_unix_s=108.3, requeued_unix_s=109.6) == pytest.approx(
        {
            "plain_start_s": 5.0, "saved_s": 0.8, "gone_s": 1.2, "requeued_s": 2.5, "warning_s": 2.5,
            "save_s": 0.4, "excess_s": 2.1, "lost_steps": 0,
        }
    )  # fmt: skip
    assert warning_times(tmp_path, 107.1, 110.0, 109.0)["warning_s"] == pytest.approx(2.9)


def test_what_the_next_attempt_did_not_restore_is_lost(tmp_path: Path) -> None:
    a_warned_run(tmp_path, restored=6)
    assert warning_times(tmp_path, 107.1, 108.0, 109.0)["lost_steps"] == 4


def test_more_restored_than_reported_is_nothing_lost(tmp_path: Path) -> None:
    attempt(tmp_path, 100.0, steps(105.0, range(1, 6)), restored=0, ended_s=108.0)
    attempt(tmp_path, 108.5, steps(113.0, range(7, 9)), restored=6)
    assert relaunch_times(tmp_path, 107.1)["lost_steps"] == 0


@pytest.mark.parametrize(
    ("removed", "words"),
    [
        ("a0001/end.json", "no end record"),
        ("a0001/start.json", "no start record"),
        ("a0001/events/rank-0.jsonl", "no step was finished"),
        ("a0002/events/rank-0.jsonl", "no attempt finished a step after the first one"),
        ("a0002/restored.json", "did not come as far as restoring"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, removed: str, words: str) -> None:
    a_killed_run(tmp_path)
    (tmp_path / "attempts" / removed).unlink()
    with pytest.raises(BenchmarkFailed, match=words):
        relaunch_times(tmp_path, 107.1)


def test_a_warning_without_a_save_is_no_measurement(tmp_path: Path) -> None:
    attempt(tmp_path, 100.0, steps(105.0, range(1, 3)), restored=0, ended_s=108.0)
    with pytest.raises(BenchmarkFailed, match="1 attempts were made, 2 are needed"):
        warning_times(tmp_path, 107.0, 108.0, 108.0)
    attempt(tmp_path, 109.0, "", restored=0)
    with pytest.raises(BenchmarkFailed, match="nothing was saved on the warning; rank 1 was killed"):
        warning_times(tmp_path, 107.0, 108.0, 108.0)


def test_no_event_is_no_step(tmp_path: Path) -> None:
    assert last_step(tmp_path) == 0
    assert not has_stepped(tmp_path, after=0)


# ---- Bars and tables ---------------------------------------------------------------------------------------------


def measured(setting: str, **quantities: list[float]) -> Measurement:
    rounds = zip(*quantities.values(), strict=True)
    items = [
        Observation(setting, number, dict(zip(quantities, values, strict=True)), 1.0)
        for number, values in enumerate(rounds)
    ]
    return Measurement((setting,), items)


def test_seconds_are_judged_by_the_median_and_steps_by_the_worst() -> None:
    killed = measured(KILLED, excess_s=[1.0, 2.5, 9.0], lost_steps=[3.0, 7.0, 4.0])
    seconds, lost = (Judged.of(bar, killed) for bar in bars_of(6)[:2])
    assert (seconds.figure, seconds.is_met, seconds.num_kept) == (2.5, True, 2)
    assert (lost.figure, lost.is_met, lost.num_kept) == (7.0, False, 2)
    assert seconds.sentence() == (
        "Met: from SIGKILL of a rank to the next finished step, beyond a plain start: 2.50 s, bar: at most 3 s "
        "(kept in 2 of 3 rounds)."
    )
    assert lost.sentence() == (
        "MISSED: steps lost after SIGKILL (one checkpoint interval): 7 steps, bar: at most 6 steps "
        "(kept in 2 of 3 rounds)."
    )


def test_a_bar_is_met_up_to_its_bound() -> None:
    bars = measured(WARNED, excess_s=[5.0, 5.0], lost_steps=[0.0, 0.0])
    assert [Judged.of(bar, bars).is_met for bar in bars_of(6)[2:]] == [True, True]
    bars = measured(WARNED, excess_s=[5.01, 5.01], lost_steps=[0.0, 1.0])
    assert [Judged.of(bar, bars).is_met for bar in bars_of(6)[2:]] == [False, False]


def test_a_bar_without_figures_is_neither_met_nor_missed() -> None:
    judged = Judged.of(bars_of(6)[0], Measurement((KILLED,)))
    assert (judged.figure, judged.is_met) == (None, None)
    assert judged.sentence().startswith("Not measured: from SIGKILL of a rank")


def test_tables_say_where_the_time_goes(tmp_path: Path) -> None:
    a_killed_run(tmp_path / "killed")
    a_warned_run(tmp_path / "warned")
    killed = relaunch_times(tmp_path / "killed", 107.1, 107.4) | {"load_1min": 1.0}
    warned = warning_times(tmp_path / "warned", 107.1, 108.3, 109.6) | {"load_1min": 1.0}
    bars = Measurement(
        (KILLED, WARNED), [Observation(KILLED, 0, killed, 1), Observation(WARNED, 0, warned, 1)]
    )
    node = Measurement((NODE,), [Observation(NODE, 0, killed | {"detection_s": 12.0}, 1)])
    rows = relaunch_table([bars, node]).rows
    assert [(row[0], row[1]) for row in rows] == [(KILLED, "1"), (NODE, "1")]
    assert rows[0][2:6] == (
        "5.00 [5.00, 5.00]",
        "5.90 [5.90, 5.90]",
        "0.300 [0.300, 0.300]",
        "0.600 [0.600, 0.600]",
    )
    assert rows[1][4] == "12.0 [12.0, 12.0]"
    (row,) = warning_table(bars).rows
    cells = (
        "2.50 [2.50, 2.50]",
        "0.800 [0.800, 0.800]",
        "1.20 [1.20, 1.20]",
        "2.50 [2.50, 2.50]",
        "0.400 [0.400, 0.400]",
    )
    assert row[:7] == (WARNED, "1", *cells)


# ---- Watching from outside ---------------------------------------------------------------------------------------


def test_a_file_grows_once(tmp_path: Path) -> None:
    path = tmp_path / "srun.log"
    path.write_text("a warning from before\n")
    watch = Growth(path)
    assert watch.look()
    assert watch.grown_unix_s == math.inf
    with path.open("a") as stream:
        stream.write("srun: error: n2: task 1: Killed\n")
    watch.look()
    seen_s = watch.grown_unix_s
    assert time.time() - 60 < seen_s <= time.time()
    path.write_text("x" * 1000)
    watch.look()
    assert watch.grown_unix_s == seen_s


def test_a_file_that_is_made_later_has_grown(tmp_path: Path) -> None:
    watch = Growth(tmp_path / "srun.log")
    watch.look()
    assert watch.grown_unix_s == math.inf
    (tmp_path / "srun.log").write_text("srun: error")
    watch.look()
    assert watch.grown_unix_s <= time.time()


def test_processes_are_those_of_the_attempts_of_this_run(tmp_path: Path) -> None:
    names = ("run/attempts/a0001", "run/attempts/a0002", "run-2/attempts/a0001")
    started = [
        subprocess.Popen(["sleep", "60"], env={**os.environ, ATTEMPT_VARIABLE: str(tmp_path / name)})
        for name in names
    ]
    try:
        assert {process.pid for process in processes_of(tmp_path / "run")} == {
            item.pid for item in started[:2]
        }
        started[0].kill()
        started[0].wait()
        assert [process.pid for process in processes_of(tmp_path / "run")] == [started[1].pid]
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_without_a_mini_cluster_the_command_says_what_to_do(tmp_path: Path) -> None:
    # nothing but the programs of the venv is on PATH: whatever is installed here, srun is not found
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks", "recovery", "--quick"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert answer.returncode == ConfigError.exit_code
    assert "Traceback" not in answer.stderr
    words = ("slurm-client", "apt-get install", "hpctrain minicluster up --install")
    for word in words if os.geteuid() == 0 else ("needs root",):
        assert word in answer.stderr


# ---- On a real cluster -------------------------------------------------------------------------------------------


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(480)  # a minute on an idle machine
@pytest.mark.usefixtures("own_digits")
def test_one_round_on_a_cluster_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_minicluster()
    monkeypatch.setattr(recovery, "Repetitions", without_warmup)  # it only costs time here
    said: list[str] = []
    report = Report("recovery", {"load_1min_before": 9.5, "cores_usable": 2}, {})
    config = RecoveryConfig(rounds=1, node_rounds=0, interval_steps=4, lane_batch=75)
    run_recovery(config, tmp_path, report, said.append)
    assert report.failure is None
    bars = report.measurements["bars"]
    assert (bars.ended, bars.measured()) == (Ended.COMPLETE, [KILLED, WARNED])
    (killed,), (warned,) = (
        [item.values for item in bars.observations if item.setting == name] for name in (KILLED, WARNED)
    )
    assert killed["lost_steps"] <= 4
    assert killed["recovery_s"] > killed["start_s"] > 0.5
    assert warned["lost_steps"] == 0
    assert 0 < warned["saved_s"] < warned["gone_s"] <= warned["warning_s"]
    document = json.loads(as_json(report))
    assert [bar["bound"] for bar in document["config"]["bars"]] == [3, 4, 5, 0]
    assert len(report.advice) == 5
    assert "busy before (load 9.5 on 2 cores)" in report.advice[-1]
    assert not ClusterSpec(f"b-{os.getpid()}").state_dir.exists()
    assert not held_hosts(f"b-{os.getpid()}")


def without_warmup(rounds: int, **settings: Any) -> Repetitions:
    return Repetitions(rounds, **settings | {"warmup": ()})
