"""A cluster of three nodes for the tests of a module."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from hpctrain.minicluster.cluster import Cluster, down, up
from hpctrain.minicluster.shares import needed_shares
from hpctrain.minicluster.spec import ClusterSpec
from tests.slurm_support import require_minicluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    require_minicluster()
    name = f"t-{os.getpid()}"
    try:
        yield up(ClusterSpec(name, shared=needed_shares()))
    finally:
        down(name)


@pytest.fixture
def on(cluster: Cluster) -> Callable[..., str]:
    """Run a shell command on a host, and return what it printed; it must succeed."""

    def run(host: str, command: str, **options: object) -> str:
        answer = cluster.run("sh", "-c", command, host=host, timeout_s=60, **options)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.strip()

    return run
