"""What a mini cluster looks like: names, addresses, sizes and the files that hold its state."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpctrain.durable import replace_file
from hpctrain.errors import ConfigError, UsageError
from hpctrain.resilience.attempts import read_json

STATE_ROOT = Path("/var/lib/hpctrain-minicluster")
"""Not below /tmp: every host has a /tmp of its own, and the shared directory lies in here."""

HEAD = "head"
SSD = Path("/mnt/ssd")
"""Where a node finds its own SSD; it outlives a reboot of the node."""

COVERED = (Path("/tmp"), Path("/mnt"))
"""Where every host has a directory of its own; what lies below them outside is seen only if it is shared."""

OWN_PARTITIONS = ("main", "urgent")
"""Those that every cluster has, with all nodes; jobs of `urgent` preempt others."""

MAX_NODES = 200
_MIN_SSD_MIB = 8  # a smaller ext4 has no journal
_NAME = re.compile(r"[a-z][a-z0-9-]{0,15}")


@dataclass(frozen=True)
class ClusterSpec:
    """One cluster. All clusters use the same addresses: no host sees anything but its own cluster's bridge.

    Args:
        name: letters, digits and dashes.
        num_nodes: compute nodes, `n1` and on.
        cpus_per_node: what Slurm is told; it may be more than this machine has.
        ssd_mib: size of a node's SSD.
        partitions: further partitions, by name the node names; `main` and `urgent` always have all nodes.
        shared: directories below /tmp or /mnt that every host is to see as they are outside.
        requeue: whether jobs may be requeued (`JobRequeue` of slurm.conf).
    """

    name: str = "mini"
    num_nodes: int = 3
    cpus_per_node: int = 4
    ssd_mib: int = 512
    partitions: dict[str, list[str]] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)
    requeue: bool = True

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"cluster name {self.name!r}: use up to 16 small letters, digits and dashes, a letter first"
            )
        if not isinstance(self.num_nodes, int) or not 1 <= self.num_nodes <= MAX_NODES:
            raise UsageError(f"{self.num_nodes!r} nodes: a mini cluster has 1 to {MAX_NODES}")
        for value, least, what in (
            (self.cpus_per_node, 1, "CPUs per node"),
            (self.ssd_mib, _MIN_SSD_MIB, "MiB of SSD per node"),
        ):
            if not isinstance(value, int) or value < least:
                raise UsageError(f"{value!r} {what}: a whole number, at least {least}")
        for partition, members in self.partitions.items():
            self._check_partition(partition, members)
        for path in self.shared:
            covering(Path(path))

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

    def _check_partition(self, partition: str, members: list[str]) -> None:
        if not _NAME.fullmatch(partition) or partition in OWN_PARTITIONS:
            raise UsageError(
                f"partition {partition!r}: use up to 16 small letters, digits and dashes, and a name other than "
                f"{', '.join(OWN_PARTITIONS)}"
            )
        if not members:
            raise UsageError(f"partition {partition} has no nodes: name some of {', '.join(self.nodes)}")
        for node in members:
            self.check_node(node)

    def check_node(self, node: str) -> None:
        """Raise `UsageError` unless the cluster has this compute node."""
        if node not in self.nodes:
            raise UsageError(
                f"cluster {self.name} has no node {node!r}; its nodes are {', '.join(self.nodes)}"
            )

    def save(self) -> None:
        """Write the description into the state directory."""
        replace_file(self.state_dir / "spec.json", (json.dumps(asdict(self), indent=1) + "\n").encode())


def load_spec(name: str) -> ClusterSpec:
    """The description of an existing cluster; raises `ConfigError` where there is none, or a damaged one."""
    directory = ClusterSpec(name).state_dir
    if not directory.exists():
        known = cluster_names()
        raise ConfigError(
            f"no mini cluster {name!r} (there is: {', '.join(known) or 'none'}); start one with "
            f"`hpctrain minicluster up --name {name}`" + (", or name one of them by --name" if known else "")
        )
    damaged = ConfigError(
        f"{directory}/spec.json is damaged, missing or of another version; "
        f"`hpctrain minicluster down --name {name}` removes what is left of this cluster"
    )
    raw = read_json(directory / "spec.json")
    if raw is None:
        raise damaged
    try:
        return ClusterSpec(**raw)
    except (TypeError, ValueError, AttributeError) as error:
        raise damaged from error


def cluster_names() -> list[str]:
    """Names of the clusters that have a state directory."""
    try:
        return sorted(
            path.name for path in STATE_ROOT.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)
        )
    except FileNotFoundError:
        return []


def covering(path: Path) -> Path:
    """Which of `COVERED` hides `path` from the hosts. Raises `UsageError` where none does: it is seen anyway."""
    for cover in COVERED:
        if cover in path.parents and ".." not in path.parts:
            return cover
    places = " or ".join(map(str, COVERED))
    raise UsageError(f"shared directory {path}: give a path below {places}; hosts see all others anyway")
