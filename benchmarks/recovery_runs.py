"""Runs of the `digits` recipe as jobs of `slurm/train.sbatch` on a mini cluster, and what is done to them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.environment import ROOT
from benchmarks.harness import Say, Values
from benchmarks.recovery_job import Growth, Job, processes_of
from benchmarks.recovery_times import has_stepped, relaunch_times, warning_times
from benchmarks.training import BenchmarkFailed
from hpctrain.config import dump_run, parse_run
from hpctrain.errors import ConfigError
from hpctrain.minicluster import cluster as clusters
from hpctrain.minicluster import faults
from hpctrain.minicluster.cluster import Cluster
from hpctrain.minicluster.packages import install_command, missing_packages
from hpctrain.minicluster.shares import needed_shares
from hpctrain.minicluster.spec import ClusterSpec
from hpctrain.recipes import recipe_path
from hpctrain.resilience.attempts import attempt_dir

RANKS: Final = 2
NODES: Final = 3

_EPOCHS: Final = 10_000
"""The run is never to end by itself."""
_IDLE_S: Final = 60.0


def require_cluster() -> None:
    """Raise `ConfigError` where this machine cannot hold a mini cluster, and say how it could."""
    clusters.require_root()
    if missing := missing_packages():
        raise ConfigError(
            f"the benchmark measures on a mini cluster, which needs packages that are not installed: "
            f"{', '.join(missing)}; run `hpctrain minicluster up --install` (and `down`) once, or as root: "
            f"{' '.join(install_command(missing))}"
        )


@contextlib.contextmanager
def own_cluster(say: Say) -> Iterator[Cluster]:
    """A cluster that nobody else uses; whatever happens, nothing is left of it."""
    spec = ClusterSpec(f"b-{os.getpid()}", NODES, shared=needed_shares([ROOT]))
    try:
        yield clusters.up(spec, lambda text: say(f"mini cluster {spec.name}: {text}"))
    finally:
        with _uninterrupted():
            clusters.down(spec.name)


class Runs:
    """What is measured: each method plays one run from its submission to its end.

    Args:
        cluster: idle; nothing else runs on it.
        packed: the packed sets `train` and `test`, where the nodes see them.
        interval_steps: of the checkpoints. Whatever happens, happens in the middle between the first two.
        lane_batch: samples per lane and step.
    """

    def __init__(self, cluster: Cluster, packed: Path, interval_steps: int, lane_batch: int) -> None:
        self._cluster, self._packed = cluster, packed
        self._interval_steps, self._lane_batch = interval_steps, lane_batch
        self._count = 0

    def kill_rank(self, _: int = 0) -> Values:
        """SIGKILL for one rank; ends when the run has gone on. Values of `relaunch_times`, and the load."""
        with self._running() as run:
            host, pid = run.rank(RANKS - 1)
            watch, values, fault_s = Growth(run.srun_log), _load(), time.time()
            self._check(self._cluster.run("kill", "-KILL", str(pid), host=host).returncode, "kill")
            run.until("the next step", lambda: watch.look() and has_stepped(run.directory, after=1))
        return relaunch_times(run.directory, fault_s, watch.grown_unix_s) | values

    def cut_power(self, _: int = 0) -> Values:
        """The node of one rank is gone, and the job has a spare one; the same values as `kill_rank`."""
        with self._running(f"--nodes={NODES}", cluster={"spare_nodes": NODES - RANKS}) as run:
            start = run.start()
            node = next(name for name in start.nodes if name != start.host)  # the supervisor lives on
            watch, values, fault_s = Growth(run.srun_log), _load(), time.time()
            faults.kill_node(self._cluster, node)
            run.until("the next step", lambda: watch.look() and has_stepped(run.directory, after=1))
            run.cancel()
            faults.heal_node(self._cluster, node)
        return relaunch_times(run.directory, fault_s, watch.grown_unix_s) | values

    def warn(self, _: int = 0) -> Values:
        """USR1 for the batch script, hours ahead of the end; values of `warning_times`, and the load.

        Slurm keeps a requeued job waiting for half a minute, so another job takes the run directory over to show what
        was saved.
        """
        with self._running() as run:
            processes = processes_of(run.directory)
            values, signal_s = _load(), time.time()
            self._check(
                self._cluster.run("scancel", "--batch", "--signal=USR1", run.job).returncode, "scancel"
            )
            gone_s = run.await_no_process(processes)
            run.until("the job to be requeued", run.is_requeued)
            requeued_s = time.time()
            run.cancel()
            run.submit()
            restored = attempt_dir(run.directory, 2) / "restored.json"
            run.until("the state to be restored", restored.exists)
        return warning_times(run.directory, signal_s, gone_s, requeued_s) | values

    @contextlib.contextmanager
    def _running(self, *options: str, **sections: dict[str, Any]) -> Iterator[Job]:
        """A run that is in the middle between two checkpoints; afterwards it is cancelled, and the nodes are idle."""
        self._count += 1
        folder = self._cluster.spec.shared_dir / f"run-{self._count}"
        folder.mkdir()
        description = folder / "run.toml"
        description.write_text(self._description(sections), encoding="utf-8")
        run = Job(self._cluster, folder, options)
        run.submit()
        run.until_step(self._interval_steps + self._interval_steps // 2)
        yield run
        run.cancel()
        self._cluster.await_states(self._cluster.spec.nodes, "idle", timeout_s=_IDLE_S)

    def _description(self, sections: dict[str, dict[str, Any]]) -> str:
        """The recipe, with steps long enough that each is reported, and checkpoints by steps."""
        raw = tomllib.loads(recipe_path("digits").read_text(encoding="utf-8"))
        raw["data"] |= {"train": str(self._packed / "train"), "evaluate": str(self._packed / "test")}
        raw["lanes"]["lane_batch"] = self._lane_batch
        raw["train"]["epochs"] = _EPOCHS
        raw["checkpoint"] = {"interval_steps": self._interval_steps, "interval_s": 0}
        raw["staging"] = {"dir": "$HPCTRAIN_SSD/hpctrain"}
        return dump_run(parse_run(raw | sections, source="digits, for a benchmark"))

    def _check(self, code: int, program: str) -> None:
        if code != 0:
            raise BenchmarkFailed(f"{program} on the mini cluster ended with {code}; run the benchmark again")


def copy_packed(packed: Path, cluster: Cluster) -> Path:
    """Copy packed sets to where the nodes see them."""
    return Path(shutil.copytree(packed, cluster.spec.shared_dir / "digits"))


def _load() -> Values:
    return {"load_1min": os.getloadavg()[0]}


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C once more does not stop the cleaning up."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
