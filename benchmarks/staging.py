"""`staging`: how fast and how sparingly data reaches the nodes, and whether it survives kills, for the bars.

Rates on this machine's disk; jobs on a mini cluster whose shared directory is a device that the kernel counts and can
slow down; and programs that are killed at random writes.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.harness import Clock, Ended, Measurement, Repetitions, Say, Values, measure
from benchmarks.recovery_runs import NODES, own_cluster, require_cluster
from benchmarks.report import Report
from benchmarks.staging_bars import RULE, Reasons
from benchmarks.staging_cluster import LIMIT_BYTES_PER_S, ORDERS, ClusterRuns
from benchmarks.staging_first_runs import FirstBatch
from benchmarks.staging_kill_runs import Killed, kill_all
from benchmarks.staging_rates import Keeping, StagingRates
from benchmarks.staging_report import fill
from benchmarks.staging_sets import KIB, MIB, SetSpec, write_set
from benchmarks.staging_shared import make_image, mounted, require_root, views
from hpctrain.errors import HpctrainError

CHUNKS: Final = {"1 MiB": MIB, "64 KiB": 64 * KIB}
CLUSTER_CHUNK: Final = MIB
FIRST_CHUNK: Final = 256 * KIB
KEEPING_CHUNK: Final = 256 * KIB
_SET: Final = "set"


@dataclass(frozen=True)
class StagingConfig:
    """How much is measured, and how long it may take.

    Attributes:
        set_mib: size of the sets on this machine's disk.
        cluster_mib: of the set of the jobs.
        rounds: of rates; the others of first batches, of jobs that are counted, and of epochs that are timed.
        counted, requeued: orders of the jobs that are counted, and of those that are requeued.
        kills: of all four programs together.
        seed: of the kills.
    """

    set_mib: int = 300
    first_mib: int = 300
    cluster_mib: int = 192
    rounds: int = 7
    first_rounds: int = 6
    count_rounds: int = 2
    epoch_rounds: int = 6
    counted: tuple[str, ...] = ORDERS
    requeued: tuple[str, ...] = ORDERS
    kills: int = 200
    seed: int = dataclasses.field(default_factory=lambda: random.SystemRandom().getrandbits(32))
    budget_s: float = 1800.0


def quick_config() -> StagingConfig:
    """Small sets, one or two rounds, and a few kills."""
    return StagingConfig(
        set_mib=100,
        first_mib=100,
        cluster_mib=144,
        rounds=2,
        first_rounds=1,
        count_rounds=1,
        epoch_rounds=1,
        counted=ORDERS[-1:],
        requeued=(),
        kills=12,
    )


def run_staging(
    config: StagingConfig, folder: Path, report: Report, say: Say, clock: Clock = time.monotonic
) -> None:
    """Measure, and fill `report`.

    A part that cannot be measured here (no root, no loop devices) is left out, and the report says why; one that fails
    ends, and the others go on. What was measured before an interruption stays.
    """
    run = _Run(config, folder, report, say, clock)
    parts: dict[str, Callable[[], None]] = {
        "kills": run.kills,
        "rates": run.rates,
        "keeping": run.keeping,
        "first batch": run.first_batch,
        "cluster": run.cluster,
    }
    report.config, report.rules = dataclasses.asdict(config), [RULE]
    for name, part in parts.items():
        try:
            part()
        except HpctrainError as error:
            run.reasons.add(name, error)
        except KeyboardInterrupt:
            report.measurements[name] = Measurement((), ended=Ended.INTERRUPTED)
        if report.ended is Ended.INTERRUPTED:
            break
    fill(report, run.killed, run.reasons.of)


class _Run:
    """One call of `run_staging`: its parts."""

    def __init__(self, config: StagingConfig, folder: Path, report: Report, say: Say, clock: Clock) -> None:
        self._config, self._folder, self._report, self._clock = config, folder, report, clock
        self._begun_s = clock()
        self._tell = say
        self.reasons = Reasons(self._say)
        self.killed: list[Killed] = []

    def _say(self, text: str) -> None:
        self._tell(f"{self._clock() - self._begun_s:6.1f} s  {text}")

    def kills(self) -> None:
        """The programs that are killed."""
        place = self._folder / "kills"
        place.mkdir()
        self._say(f"kills: {self._config.kills} with seed {self._config.seed}")
        self.killed = kill_all(self._config.kills, self._config.seed, place, self._say)

    def rates(self) -> None:
        """Staging beside `cp`."""
        place = self._folder / "rates"
        place.mkdir()
        self._say(f"writing sets of {self._config.set_mib} MiB")
        sets = {
            name: write_set(SetSpec(self._config.set_mib * MIB // size, size), place / name)
            for name, size in CHUNKS.items()
        }
        self._measure("rates", StagingRates(sets, place).settings(), self._config.rounds)

    def keeping(self) -> None:
        """Verify, backup, restore, archive."""
        num_chunks = self._config.set_mib * MIB // KEEPING_CHUNK
        keeping = Keeping(SetSpec(num_chunks, KEEPING_CHUNK, changed=num_chunks // 100), self._folder)
        self._measure("keeping", keeping.settings(), self._config.rounds)

    def first_batch(self) -> None:
        """The first batch with and without staging."""
        spec = SetSpec(self._config.first_mib * MIB // FIRST_CHUNK, FIRST_CHUNK)
        place = self._folder / "first"
        write_set(spec, place / "files" / _SET)
        first = FirstBatch(place / "files" / _SET, place)
        try:
            require_root()
            self._measure_limited(first, place)
        except HpctrainError as error:
            self.reasons.add("first batch, limited", error)
        self._measure("first batch", first.settings("disk"), self._config.first_rounds)

    def _measure_limited(self, first: FirstBatch, place: Path) -> None:
        image = make_image(place / "files", place / "image")
        with (
            views(image, 1) as (view,),
            mounted(view, place / "shared") as shared,
            view.limited(LIMIT_BYTES_PER_S),
        ):
            settings = first.settings("limited", shared / _SET)
            self._measure("first batch, limited", settings, self._config.first_rounds)

    def cluster(self) -> None:
        """Jobs on the mini cluster."""
        require_cluster()
        place = self._folder / "cluster"
        spec = SetSpec(self._config.cluster_mib * MIB // CLUSTER_CHUNK, CLUSTER_CHUNK)
        write_set(spec, place / "files" / _SET)
        image = make_image(place / "files", place / "image")
        # the devices go when the cluster is gone: its hosts have them mounted
        with views(image, NODES) as devices, own_cluster(self._say) as cluster:
            self._report.environment["slurm"] = cluster.run("sinfo", "--version").stdout.strip()
            runs = ClusterRuns(cluster, devices, spec, _SET)
            self._count(runs)
            timed = {
                "reading the shared directory": lambda _: runs.epochs(staged=False),
                "staged": lambda _: runs.epochs(staged=True),
            }
            self._measure("epochs", timed, self._config.epoch_rounds)

    def _count(self, runs: ClusterRuns) -> None:
        """What jobs read from the shared directory, from nothing, again, and requeued."""
        for part, method, orders in (
            ("cluster", runs.count, self._config.counted),
            ("requeued", runs.requeue, self._config.requeued),
        ):
            self.reasons.of |= {
                f"{part}, {order}": "left out by --quick" for order in ORDERS if order not in orders
            }
            settings = {order: partial(_of_order, method, order) for order in orders}
            self._measure(part, settings, self._config.count_rounds)

    def _measure(self, name: str, settings: Mapping[str, Callable[[int], Values]], rounds: int) -> None:
        repetitions = Repetitions(
            rounds, min_rounds=1, warmup=(), deadline_s=self._begun_s + self._config.budget_s
        )
        found = measure(settings, repetitions, lambda text: self._say(f"{name} {text}"), self._clock)
        self._report.measurements[name] = found
        if found.failure is not None:
            self.reasons.add(name, found.failure)
        if found.ended is Ended.INTERRUPTED:
            raise KeyboardInterrupt


def _of_order(method: Callable[[str], Values], order: str, _: int) -> Values:
    return method(order)
