"""What a mini cluster looks like: names, addresses, sizes and the files that hold its state."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpctrain.errors import ConfigError, UsageError
from hpctrain.resilience.attempts import read_json

STATE_ROOT = Path("/var/lib/hpctrain-minicluster")
"""Not below /tmp: every host has a /tmp of its own, and the shared directory lies in here."""

HEAD = "head"
SSD = Path("/mnt/ssd")
"""Where a node finds its own SSD; it outlives a reboot of the node."""

MAX_NODES = 200
_NAME = re.compile(r"[a-z][a-z0-9-]{0,15}")


@dataclass(frozen=True)
class ClusterSpec:
    """One cluster. All clusters use the same addresses: no host sees anything but its own cluster's bridge.

    Args:
        name: letters, digits and dashes.
        num_nodes: compute nodes, `n1` and on.
        cpus_per_node: what Slurm is told; it may be more than this machine has.
        memory_mib: memory per node that Slurm is told.
        ssd_mib: size of a node's SSD.
        partitions: further partitions, by name the node names; `main` and `urgent` always have all nodes.
        shared: directories below /tmp that every host is to see as they are outside.
        requeue: whether jobs may be requeued (`JobRequeue` of slurm.conf).
    """

    name: str = "mini"
    num_nodes: int = 3
    cpus_per_node: int = 4
    memory_mib: int = 4096
    ssd_mib: int = 512
    partitions: dict[str, list[str]] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)
    requeue: bool = True

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"cluster name {self.name!r}: use up to 16 small letters, digits and dashes, a letter first"
            )
        if not 1 <= self.num_nodes <= MAX_NODES:
            raise UsageError(f"{self.num_nodes} nodes: a mini cluster has 1 to {MAX_NODES}")

    @property
    def nodes(self) -> list[str]:
        """Names of the compute nodes."""
        return [f"n{number}" for number in range(1, self.num_nodes + 1)]

    @property
    def hosts(self) -> list[str]:
        """Names of all hosts, the head first."""
        return [HEAD, *self.nodes]

    def address(self, host: str) -> str:
        """IPv4 address of a host on the cluster's bridge (a /24)."""
        return f"10.77.0.{1 if host == HEAD else 1 + int(host[1:])}"

    @property
    def state_dir(self) -> Path:
        """All files of the cluster."""
        return STATE_ROOT / self.name

    @property
    def shared_dir(self) -> Path:
        """The directory that stands for the parallel filesystem: the same path on every host and outside."""
        return self.state_dir / "shared"

    @property
    def etc_dir(self) -> Path:
        """Configuration files; every host sees slurm's at /etc/slurm."""
        return self.state_dir / "etc"

    @property
    def munge_dir(self) -> Path:
        """Where munged's socket is; every host sees it at /run/munge."""
        return self.state_dir / "munge"

    def host_dir(self, host: str) -> Path:
        """What belongs to one host: its /tmp, logs, spool and SSD."""
        return self.state_dir / "hosts" / host

    def check_node(self, node: str) -> None:
        """Raise `UsageError` unless the cluster has this compute node."""
        if node not in self.nodes:
            raise UsageError(
                f"cluster {self.name} has no node {node!r}; its nodes are {', '.join(self.nodes)}"
            )

    def save(self) -> None:
        """Write the description into the state directory."""
        (self.state_dir / "spec.json").write_text(json.dumps(asdict(self), indent=1) + "\n")


def load_spec(name: str) -> ClusterSpec:
    """The description of an existing cluster; raises `ConfigError` where there is none of that name."""
    raw = read_json(STATE_ROOT / name / "spec.json")
    if raw is None:
        known = ", ".join(cluster_names()) or "none"
        raise ConfigError(
            f"no mini cluster {name!r} (there is: {known}); start one with `hpctrain minicluster up --name {name}`"
        )
    return ClusterSpec(**raw)


def cluster_names() -> list[str]:
    """Names of the clusters that have a state directory."""
    try:
        return sorted(path.name for path in STATE_ROOT.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
