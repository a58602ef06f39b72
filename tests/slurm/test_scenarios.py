"""Jobs of the shipped scripts on a real Slurm cluster, and what can happen to them (`scenarios.py`)."""

from __future__ import annotations

import faulthandler
from concurrent.futures import Future

import pytest

from hpctrain.minicluster.cluster import Cluster
from tests.slurm.scenarios import SCENARIOS

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(autouse=True)
def no_stacks_of_a_long_wait() -> None:
    """pytest prints all stacks after 150 s in a test; here a test waits that long for others that are being played."""
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_ends_with_the_weights_it_would_have_had(name: str, played: dict[str, Future[None]]) -> None:
    played[name].result(timeout=1100)


def test_every_node_is_idle_afterwards(cluster: Cluster, played: dict[str, Future[None]]) -> None:
    for future in played.values():
        future.exception(timeout=1100)
    cluster.await_states(cluster.spec.nodes, "idle", timeout_s=120)
