"""A mini cluster as a whole: up, down, and commands on its hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import ConfigError, HangError
from hpctrain.minicluster import network
from hpctrain.minicluster.configuration import write_configuration
from hpctrain.minicluster.namespaces import (
    Host,
    command_inside,
    end_hosts,
    require,
    run_inside,
    running_hosts,
    start_host,
)
from hpctrain.minicluster.packages import missing_packages, missing_message
from hpctrain.minicluster.spec import HEAD, ClusterSpec, load_spec

_UP_TIMEOUT_S = 120.0
_POLL_S = 0.1


class Cluster:
    """A cluster that exists (see `up`)."""

    def __init__(self, name: str) -> None:
        self.spec = load_spec(name)

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self.spec.name

    def hosts(self) -> dict[str, Host]:
        """The hosts that are up."""
        return running_hosts(self.name)

    def host(self, name: str) -> Host:
        """One of them; raises `ConfigError` where it is down."""
        return require(self.hosts(), self.name, name)

    def command(self, arguments: Sequence[str], host: str = HEAD, cwd: str | Path = "/") -> list[str]:
        """The command line that runs `arguments` on a host."""
        return command_inside(self.host(host), arguments, cwd)

    def run(
        self, *arguments: str | Path, host: str = HEAD, timeout_s: float = 60.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host (the head: sbatch, squeue ...) and return what it said."""
        return run_inside(self.host(host), [str(word) for word in arguments], timeout_s, **options)

    def start_node(self, node: str) -> None:
        """Switch a node on."""
        start_host(self.spec, node)
        self.await_hosts([node])
        network.plug_in(self.host(HEAD), self.host(node))

    def await_hosts(self, names: Sequence[str]) -> None:
        """Wait until these hosts have their init process."""
        _wait(lambda: set(names) <= set(self.hosts()), f"hosts {', '.join(names)} to start", self.spec)

    def node_states(self) -> dict[str, str]:
        """State of every node as Slurm says, such as `idle` or `down*`; empty while slurmctld does not answer."""
        answer = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t", timeout_s=30)
        pairs = (line.split() for line in answer.stdout.splitlines())
        return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}

    def await_states(self, nodes: Sequence[str], *states: str, timeout_s: float = _UP_TIMEOUT_S) -> None:
        """Wait until Slurm says one of `states` of all these nodes; raises `HangError`."""
        wanted = set(nodes)

        def reached() -> bool:
            found = self.node_states()
            return all(found.get(node) in states for node in wanted)

        _wait(reached, f"nodes {', '.join(nodes)} to be {' or '.join(states)}", self.spec, timeout_s)


def up(spec: ClusterSpec, say: Callable[[str], None] = lambda text: None) -> Cluster:
    """Start a cluster and wait until all its nodes are idle.

    Raises:
        ConfigError: not root, packages are missing, or a cluster of that name is up.
        HangError: it does not come up; the message names the logs. Nothing is left running then.
    """
    if os.geteuid() != 0:
        raise ConfigError(
            "a mini cluster needs root, for namespaces and mounts: run it with sudo, or in a container"
        )
    if missing := missing_packages():
        raise ConfigError(missing_message(missing))
    if running_hosts(spec.name):
        raise ConfigError(
            f"mini cluster {spec.name} is up; end it with `hpctrain minicluster down --name {spec.name}`, "
            "or choose another --name"
        )
    down(spec.name)
    spec.shared_dir.mkdir(parents=True)
    spec.shared_dir.chmod(0o1777)
    spec.save()
    with _undone_on_failure(spec):
        write_configuration(spec)
        cluster = Cluster(spec.name)
        say(f"starting {HEAD} (munge, MariaDB, slurmdbd, slurmctld) and {spec.num_nodes} nodes")
        for host in spec.hosts:
            start_host(spec, host)
        cluster.await_hosts(spec.hosts)
        _await_bridge(cluster)
        hosts = cluster.hosts()
        for node in spec.nodes:
            network.plug_in(hosts[HEAD], require(hosts, spec.name, node))
        say("waiting for the nodes to register")
        cluster.await_states(spec.nodes, "idle")
    return cluster


def down(name: str) -> bool:
    """End a cluster, whole or half started, and remove its files; False where there was nothing.

    Raises:
        HangError: a process does not end.
    """
    ended = end_hosts(name)
    state_dir = ClusterSpec(name).state_dir
    existed = state_dir.exists()
    if existed:
        shutil.rmtree(state_dir)
        with contextlib.suppress(OSError):  # other clusters are in there
            state_dir.parent.rmdir()
    return bool(ended) or existed


def _await_bridge(cluster: Cluster) -> None:
    def there() -> bool:
        return cluster.run("ip", "link", "show", "br0").returncode == 0

    _wait(there, "the bridge", cluster.spec)


@contextlib.contextmanager
def _undone_on_failure(spec: ClusterSpec) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:  # a host ended
        end_hosts(spec.name)
        raise ConfigError(f"{error}{_last_words(spec)}") from error
    except BaseException:
        end_hosts(spec.name)  # the files stay: they hold the logs that say why
        raise


def _last_words(spec: ClusterSpec) -> str:
    """What the init processes said before they ended."""
    lines = []
    for host in spec.hosts:
        log = spec.host_dir(host) / "log" / "init.log"
        if log.exists() and (said := log.read_text(errors="replace").strip()):
            lines.append(f"; {host} says: {said.splitlines()[-1]} ({log})")
    return "".join(lines)


def _wait(done: Callable[[], bool], what: str, spec: ClusterSpec, timeout_s: float = _UP_TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline_s:
            logs = spec.host_dir(HEAD).parent
            raise HangError(f"waited {timeout_s:g} s for {what}: see the logs in {logs}/*/log")
        time.sleep(_POLL_S)
