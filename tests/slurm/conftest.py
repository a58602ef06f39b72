"""The cluster of the scenarios, and the scenarios under way: several at once, because most of their time is waiting."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from hpctrain.minicluster import cluster as clusters
from hpctrain.minicluster.cluster import Cluster
from hpctrain.minicluster.shares import needed_shares
from hpctrain.minicluster.spec import ClusterSpec
from tests.slurm.lab import Lab
from tests.slurm.scenarios import SCENARIOS, local_digest
from tests.slurm_support import require_minicluster
from tests.toy import toy_data

ALONE = "slurmctld_restarts"
"""Takes slurmctld away from everybody, so it has a cluster of its own."""
_GENTLE_NODES = 6
_SIDE_BY_SIDE = int(os.environ.get("HPCTRAIN_TEST_SCENARIOS", "5"))


@pytest.fixture(scope="session")
def selected(request: pytest.FixtureRequest) -> list[str]:
    """The selected scenarios, in order."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    return [
        call.params["name"] for call in calls if call is not None and call.params.get("name") in SCENARIOS
    ]


@pytest.fixture(scope="session")
def cluster(selected: list[str]) -> Iterator[Cluster]:
    """Nodes that the gentle scenarios share, and a partition of their own for those that break nodes."""
    require_minicluster()
    partitions = {"gentle": [f"n{number}" for number in range(1, _GENTLE_NODES + 1)]}
    last = _GENTLE_NODES
    for name in selected:
        if count := SCENARIOS[name].nodes * (name != ALONE):
            partitions[_partition(name)] = [f"n{number}" for number in range(last + 1, last + count + 1)]
            last += count
    yield from _running(
        ClusterSpec(f"s-{os.getpid()}", last, 8, partitions=partitions, shared=needed_shares())
    )


@pytest.fixture(scope="session")
def second_cluster(selected: list[str]) -> Iterator[Cluster]:
    """For the scenario that takes the controller away."""
    require_minicluster()
    count = SCENARIOS[ALONE].nodes
    nodes = {_partition(ALONE): [f"n{number}" for number in range(1, count + 1)]}
    yield from _running(ClusterSpec(f"c-{os.getpid()}", count, 8, partitions=nodes, shared=needed_shares()))


def _running(spec: ClusterSpec) -> Iterator[Cluster]:
    try:
        yield clusters.up(spec)
    finally:
        clusters.down(spec.name)


@pytest.fixture(scope="session")
def played(
    selected: list[str], cluster: Cluster, request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[None]]]:
    """The selected scenarios, by name, begun in order and played several at a time."""
    homes = dict.fromkeys(selected, cluster)
    if ALONE in homes:
        homes[ALONE] = request.getfixturevalue("second_cluster")
    data = {home.name: toy_data(home.spec.shared_dir).root for home in set(homes.values())}
    digest = local_digest(Lab(cluster, "undisturbed", data[cluster.name], "gentle"))
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        futures = {
            name: pool.submit(SCENARIOS[name].play, Lab(home, name, data[home.name], _home(name)), digest)
            for name, home in homes.items()
        }
        yield futures
        pool.shutdown(cancel_futures=True)


def _home(name: str) -> str:
    return _partition(name) if SCENARIOS[name].nodes else "gentle"


def _partition(name: str) -> str:
    return f"own-{list(SCENARIOS).index(name)}"
