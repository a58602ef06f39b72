"""`recovery`: how soon a run goes on after the loss of a rank or a node, how soon it leaves on a warning, what is lost.

Measured on a mini cluster, with the `digits` recipe on two ranks as a job of `slurm/train.sbatch`. Every run begins
undisturbed, so each has its own plain start to compare with.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.environment import filesystem
from benchmarks.harness import Clock, Ended, Measurement, Repetitions, Say, Values, measure
from benchmarks.recovery_report import (
    KILLED,
    NODE,
    RULE,
    WARNED,
    Judged,
    bars_of,
    bars_table,
    relaunch_table,
    warning_table,
)
from benchmarks.recovery_runs import NODES, RANKS, Runs, copy_packed, own_cluster, require_cluster
from benchmarks.report import Report
from benchmarks.training import DigitsTraining, Storage, Training
from hpctrain.minicluster.cluster import Cluster


@dataclass(frozen=True)
class RecoveryConfig:
    """How much is measured, and how long it may take (`budget_s` in all, `node_s` of it for the loss of nodes).

    Attributes:
        rounds: of a killed rank and a warning.
        node_rounds: of a lost node; 0: it is left out.
        interval_steps: steps from checkpoint to checkpoint.
        lane_batch: samples per lane and step. Many, so that a step takes long enough for each to be reported.
    """

    rounds: int = 6
    node_rounds: int = 2
    interval_steps: int = 6
    lane_batch: int = 250
    budget_s: float = 720.0
    node_s: float = 180.0


QUICK: Final = RecoveryConfig(rounds=2, node_rounds=0, budget_s=150.0, node_s=0.0)


def run_recovery(
    config: RecoveryConfig, folder: Path, report: Report, say: Say, clock: Clock = time.monotonic
) -> None:
    """Measure, and fill `report`; what was measured before an interruption or a failure stays in it.

    Raises:
        ConfigError: this machine cannot hold a mini cluster.
        HangError: the cluster does not come up.
    """
    begun_s = clock()
    require_cluster()
    report.config = dataclasses.asdict(config) | {
        "bars": [dataclasses.asdict(bar) for bar in bars_of(config.interval_steps)]
    }
    report.notes, report.rules = _notes(config), [RULE]
    training = DigitsTraining(folder, Training(ranks=RANKS), say)
    packed = training.packed(Storage())
    with own_cluster(say) as cluster:
        _describe_cluster(cluster, report)
        runs = Runs(cluster, copy_packed(packed, cluster), config.interval_steps, config.lane_batch)
        _measure_all(config, runs, report, begun_s, say, clock)
    report.environment["load_1min_after"] = round(os.getloadavg()[0], 2)
    report.advice += _doubts(report)


def _measure_all(
    config: RecoveryConfig, runs: Runs, report: Report, begun_s: float, say: Say, clock: Clock
) -> None:
    settings = {KILLED: runs.kill_rank, WARNED: runs.warn}
    deadline_s = begun_s + config.budget_s
    repetitions = Repetitions(config.rounds, warmup=(KILLED,), deadline_s=deadline_s - config.node_s)
    bars = _measure("bars", settings, repetitions, say, clock)
    report.measurements["bars"] = bars
    judged = [Judged.of(bar, bars) for bar in bars_of(config.interval_steps)]
    report.advice = [item.sentence() for item in judged]
    relaunches = [bars]
    if config.node_rounds and bars.ended in (Ended.COMPLETE, Ended.TIME):
        repetitions = Repetitions(config.node_rounds, warmup=(), deadline_s=deadline_s)
        nodes = _measure("node", {NODE: runs.cut_power}, repetitions, say, clock)
        report.measurements["node"] = nodes
        relaunches.append(nodes)
    report.tables = [bars_table(judged), relaunch_table(relaunches), warning_table(bars)]


def _measure(
    name: str,
    settings: Mapping[str, Callable[[int], Values]],
    repetitions: Repetitions,
    say: Say,
    clock: Clock,
) -> Measurement:
    return measure(settings, repetitions, lambda text: say(f"{name} {text}"), clock)


def _describe_cluster(cluster: Cluster, report: Report) -> None:
    report.environment["filesystem"] = filesystem(cluster.spec.shared_dir)
    report.environment["slurm"] = cluster.run("sinfo", "--version").stdout.strip()


def _doubts(report: Report) -> list[str]:
    """On a busy machine the seconds are those of whatever else ran."""
    load, cores = report.environment["load_1min_before"], report.environment["cores_usable"]
    if load <= cores:
        return []
    return [
        f"The machine was busy before (load {load:g} on {cores} cores), so the seconds mean little: measure again "
        "when it is idle."
    ]


def _notes(config: RecoveryConfig) -> list[str]:
    steps = config.interval_steps
    return [
        f"A mini cluster of {NODES} nodes on this one machine; {RANKS} ranks on two of them. `sbatch "
        f"slurm/train.sbatch` of the `digits` recipe with {config.lane_batch} samples per lane, a checkpoint every "
        f"{steps} steps, and all else as it comes. The hosts share this machine's cores, so these times are longer "
        "than on real nodes.",
        f"Whatever happens, happens when step {steps + steps // 2} was reported, midway between two checkpoints. "
        "SIGKILL: to the pid of the last rank, on its node. Warning: `scancel --batch --signal=USR1`. Node: its power "
        "is cut.",
        "Plain start: from the start record of attempt 1 to its first finished step; every run has one, and the bars' "
        "differences are taken within a run. A fault counts from before the command that makes it.",
        "Steps are those that rank 0 reports (all of them, where one takes longer than 0.2 s). Lost: reported and not "
        "restored by the next attempt; after a warning that is one of another job on the same run directory.",
        "Rounds measure both settings, every second in the opposite order; one warm-up (a killed rank) is thrown away. "
        "Times are of the wall clock: one that is set meanwhile falsifies its round.",
    ]
