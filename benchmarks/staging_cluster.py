"""Jobs on a mini cluster whose shared directory is counted, node by node, and can be slowed down."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Values
from benchmarks.recovery_job import Job
from benchmarks.staging_sets import SetSpec
from benchmarks.staging_shared import Forgetting, View
from benchmarks.training import BenchmarkFailed
from hpctrain.config import dump_run, parse_run
from hpctrain.minicluster.cluster import Cluster
from hpctrain.minicluster.spec import SSD
from hpctrain.observe.events import read_events
from hpctrain.resilience.attempts import attempt_dir

ORDERS: Final = ("node_local", "global")
LIMIT_BYTES_PER_S: Final = 50_000_000
COUNTED_EPOCHS: Final = 5
_TIMED_EPOCHS: Final = 4
_LONG_EPOCHS: Final = 10_000
_BATCH: Final = 256
"""Large, so that an epoch has few steps: ranks that share this machine's cores take long to exchange anything."""
_WINDOW_CHUNKS: Final = 4
_BUDGET_MIB: Final = 24
"""So little that an epoch's chunks do not stay in the ranks' memory until the next."""
_READ_AHEAD_KIB: Final = 128
_IDLE_S: Final = 60.0
_NEVER_S: Final = 1e9


class ClusterRuns:
    """Jobs of one rank on each node; each method plays some, and gives what was found.

    Args:
        cluster: idle; nothing else runs on it.
        shared: the view of each node.
        spec: of the set.
        name: of its folder below the shared directory.
    """

    def __init__(self, cluster: Cluster, shared: list[View], spec: SetSpec, name: str) -> None:
        self._cluster, self._spec = cluster, spec
        self._views = dict(zip(cluster.spec.nodes, shared, strict=True))
        self._mount = cluster.spec.shared_dir / "data"
        self._mount.mkdir()
        self._set = self._mount / name
        self._count = 0
        self._is_staged = False
        for node, view in self._views.items():
            self._on(node, *view.mount_command(self._mount))
            view.read_ahead(0)

    def count(self, order: str) -> Values:
        """A job from nothing, and the same again: what was read from the shared directory, in sets and chunks."""
        self._clean()
        with self._counting() as read:
            first = self._finished(order, COUNTED_EPOCHS)
            device = read()
        with self._counting() as read:
            again = self._finished(order, COUNTED_EPOCHS)
            device_again = read()
        set_bytes = self._spec.num_bytes
        return {
            "counted_sets": first["shared_bytes"] / set_bytes,
            "device_sets": device / set_bytes,
            "peer_sets": first["peer_bytes"] / set_bytes,
            "again_counted_bytes": float(again["shared_bytes"]),
            "again_device_chunks": device_again / self._spec.chunk_bytes,
        }

    def requeue(self, order: str) -> Values:
        """A job that is requeued once all is staged, and comes back on the same nodes: what its second attempt read."""
        self._clean()
        with self._job(order, _LONG_EPOCHS, staged=True) as job:
            first = attempt_dir(job.directory, 1)
            job.until("all nodes to have staged", lambda: self._have_staged(first))
            job.until("a step after that", lambda: bool(_events(first, 0, "reading")))
            with self._counting() as read:
                self._requeue(job)
                second = attempt_dir(job.directory, 2)
                job.until("an epoch of the second attempt", lambda: len(_events(second, 0, "reading")) > 1)
                device = read()
                counted = sum(
                    max((int(event["shared_bytes"]) for event in _events(second, rank, "staging")), default=0)
                    for rank in range(len(self._views))
                )
                told = [bool(_events(second, rank, "staging")) for rank in range(len(self._views))]
        if not all(told):
            raise BenchmarkFailed(f"not every node of {second} said what it staged")
        return {
            "requeued_counted_bytes": float(counted),
            "requeued_device_chunks": device / self._spec.chunk_bytes,
        }

    def epochs(self, staged: bool) -> Values:
        """Seconds of an epoch with the shared directory limited, all of it staged before or none of it."""
        if staged and not self._is_staged:
            self._finished("global", 1)
        with contextlib.ExitStack() as stack:
            for view in self._views.values():
                view.read_ahead(_READ_AHEAD_KIB)
                stack.callback(view.read_ahead, 0)
                stack.enter_context(view.limited(LIMIT_BYTES_PER_S // len(self._views)))
            with self._job("global", _TIMED_EPOCHS, staged) as job:
                self._until_result(job)
                first = attempt_dir(job.directory, 1)
                return {"epoch_s": statistics.median(_epoch_seconds(first)[1:])}

    def _finished(self, order: str, epochs: int) -> dict[str, int]:
        """The counters of a job that ran to its end."""
        with self._job(order, epochs, staged=True) as job:
            self._until_result(job)
            result: dict[str, Any] = json.loads((job.directory / "result.json").read_bytes())
        if result["restarts"]:
            raise BenchmarkFailed(
                f"{job.directory}: restarted {result['restarts']} times, so nothing is counted"
            )
        self._is_staged = True
        return dict(result["staging"])

    def _until_result(self, job: Job) -> None:
        job.until("the result", (job.directory / "result.json").exists)

    @contextlib.contextmanager
    def _job(self, order: str, epochs: int, staged: bool) -> Iterator[Job]:
        """A job that was submitted; afterwards it is gone, and the nodes are idle."""
        self._count += 1
        folder = self._cluster.spec.shared_dir / f"run-{self._count}"
        folder.mkdir()
        (folder / "run.toml").write_text(describe(self._set, order, epochs, len(self._views), staged))
        job = Job(self._cluster, folder, (f"--nodes={len(self._views)}",))
        job.submit()
        yield job
        job.cancel()
        self._cluster.await_states(self._cluster.spec.nodes, "idle", timeout_s=_IDLE_S)

    def _requeue(self, job: Job) -> None:
        """As before the end of the time: a warning, on which the job saves and requeues itself.

        It is not told to start at once: one that does so while its old script is just ending is taken for failed.
        """
        code = self._cluster.run("scancel", "--batch", "--signal=USR1", job.job).returncode
        self._checked(code, "scancel")
        job.until("the job to be requeued", job.is_requeued)

    def _have_staged(self, attempt: Path) -> bool:
        return all(
            any(event["done"] for event in _events(attempt, rank, "staging"))
            for rank in range(len(self._views))
        )

    @contextlib.contextmanager
    def _counting(self) -> Iterator[Callable[[], int]]:
        """Gives a function that tells the bytes read from all devices since then; nothing stays in page caches."""
        hosts = [self._cluster.host(node) for node in self._views]
        roots = [Path(f"/proc/{host.init.pid}/root") for host in hosts]
        with Forgetting([root / self._set.relative_to("/") for root in roots]):
            before = self._device_bytes()
            yield lambda: self._device_bytes() - before

    def _device_bytes(self) -> int:
        return sum(view.read_bytes for view in self._views.values())

    def _clean(self) -> None:
        for node in self._views:
            self._on(node, "sh", "-c", f"rm -rf {SSD}/hpctrain-*")
        self._is_staged = False

    def _on(self, node: str, *command: str) -> None:
        done = self._cluster.run(*command, host=node)
        self._checked(done.returncode, f"{' '.join(command)} on {node}: {done.stderr.strip()}")

    def _checked(self, code: int, program: str) -> None:
        if code != 0:
            raise BenchmarkFailed(f"{program} ended with {code}")


def describe(train: Path, order: str, epochs: int, num_lanes: int, staged: bool) -> str:
    """The run description: samples of a set, a model of two numbers, and little memory."""
    raw = {
        "name": "staging",
        "task": {"name": "benchmarks.staging_task:Touch"},
        "data": {
            "train": str(train),
            "order": order,
            "window_chunks": _WINDOW_CHUNKS,
            "memory_budget_mib": _BUDGET_MIB,
            "page_cache": "bypass",
        },
        "lanes": {"num_lanes": num_lanes, "lane_batch": _BATCH},
        "train": {"epochs": epochs},
        "checkpoint": {"interval_steps": 0, "interval_s": _NEVER_S},
        "staging": {"dir": "$HPCTRAIN_SSD"} if staged else {},
    }
    return dump_run(parse_run(raw, source="staging, for a benchmark"))


def _events(attempt: Path, rank: int, kind: str) -> list[dict[str, Any]]:
    path = attempt / "events" / f"rank-{rank}.jsonl"
    return [event for event in read_events(path) if event["kind"] == kind] if path.exists() else []


def _epoch_seconds(attempt: Path) -> list[float]:
    """Of each epoch, on the rank that took longest."""
    return [max(rank["epoch_s"] for rank in event["ranks"]) for event in _events(attempt, 0, "reading")]
