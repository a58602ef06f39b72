"""What a mini cluster is doing, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.errors import HangError
from hpctrain.minicluster import network
from hpctrain.minicluster.cluster import Cluster
from hpctrain.minicluster.spec import HEAD, SSD

_SEPARATOR = "\x1f"  # in no name or reason
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class HostStatus:
    """One host. `link` is up, cut, off, or a rate; `state` and `reason` are Slurm's, empty while it does not answer."""

    name: str
    up: bool
    address: str
    link: str
    state: str = ""
    reason: str = ""


@dataclass(frozen=True)
class JobStatus:
    """One job as squeue shows it; `nodes` is a host list, `reason` says why it waits."""

    job: str
    partition: str
    name: str
    state: str
    time: str
    nodes: str
    reason: str


@dataclass(frozen=True)
class ClusterStatus:
    """The whole. `answers` is whether slurmctld does; `ssd` is the path on every node."""

    name: str
    up: bool
    answers: bool
    slurm_version: str
    shared: str
    ssd: str
    hosts: list[HostStatus]
    jobs: list[JobStatus]


def cluster_status(cluster: Cluster) -> ClusterStatus:
    """Look at a cluster, whatever state it is in."""
    running = cluster.hosts()
    up = HEAD in running
    states = (
        _rows(cluster, "sinfo", "-h", "-N", "-p", "main", "-o", _columns("%N", "%T", "%E")) if up else None
    )
    jobs = (
        _rows(cluster, "squeue", "-h", "-o", _columns("%i", "%P", "%j", "%T", "%M", "%N", "%r"))
        if states
        else None
    )
    version = cluster.run("slurmctld", "-V").stdout.strip() if up else ""
    return ClusterStatus(
        name=cluster.name,
        up=up,
        answers=states is not None,
        slurm_version=version,
        shared=str(cluster.spec.shared_dir),
        ssd=str(SSD),
        hosts=_hosts(cluster, set(running), states or []),
        jobs=[JobStatus(*row) for row in jobs or []],
    )


def _hosts(cluster: Cluster, running: set[str], states: list[list[str]]) -> list[HostStatus]:
    links = network.links(cluster.host(HEAD)) | {HEAD: "up"} if HEAD in running else {}
    said = {node: (state, "" if reason == "none" else reason) for node, state, reason in states}
    return [
        HostStatus(
            host,
            host in running,
            cluster.spec.address(host),
            links.get(host, "off") if host in running else "off",
            *said.get(host, ("", "")),
        )
        for host in cluster.spec.hosts
    ]


def _columns(*fields: str) -> str:
    return _SEPARATOR.join(fields)


def _rows(cluster: Cluster, *command: str) -> list[list[str]] | None:
    """The lines of one of Slurm's commands; None where it gets no answer."""
    try:
        answer = cluster.run(*command, timeout_s=_TIMEOUT_S)
    except HangError:
        return None
    if answer.returncode != 0:
        return None
    return [line.split(_SEPARATOR) for line in answer.stdout.splitlines()]
