"""A mini cluster as a whole: up, down, and commands on its hosts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import ConfigError, HangError, HpctrainError
from hpctrain.minicluster import network
from hpctrain.minicluster.configuration import write_configuration
from hpctrain.minicluster.files import make_directory, remove_tree
from hpctrain.minicluster.lock import locked
from hpctrain.minicluster.namespaces import (
    Host,
    command_inside,
    end_hosts,
    held_hosts,
    refuse_inside,
    require,
    run_inside,
    running_hosts,
    start_host,
)
from hpctrain.minicluster.packages import missing_message, missing_packages
from hpctrain.minicluster.spec import HEAD, STATE_ROOT, ClusterSpec, load_spec

_UP_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 10.0  # without a slurmctld, Slurm's commands try for longer
_POLL_S = 0.1


class Cluster:
    """A cluster that exists (see `up`)."""

    def __init__(self, name: str) -> None:
        require_root()
        refuse_inside()
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

    def node(self, name: str) -> Host:
        """A compute node; raises `UsageError` where there is none of that name, `ConfigError` where it is down."""
        self.spec.check_node(name)
        return self.host(name)

    def start_node(self, node: str) -> None:
        """Switch a node on where it is off, and wait until its slurmd runs; Slurm learns of it a little later."""
        self.spec.check_node(node)
        if node not in self.hosts():
            start_host(self.spec, node)
            with _last_words(self.spec, [node]):
                self.await_hosts([node])
                network.plug_in(self.host(HEAD), self.host(node))
        with _last_words(self.spec, [node]):
            _wait(lambda: bool(self.host(node).daemons("slurmd")), f"slurmd on {node}", self.spec)

    def await_hosts(self, names: Sequence[str]) -> None:
        """Wait until these hosts have their init process; raises `ConfigError` where one ends instead."""
        lost: set[str] = set()

        def there() -> bool:
            nonlocal lost
            lost, before = set(names) - held_hosts(self.name), lost
            for name in (
                lost & before
            ):  # twice: a process that is just about to run another program has no name
                raise ConfigError(f"host {name} of mini cluster {self.name} ended as it started")
            return set(names) <= set(self.hosts())

        _wait(there, f"hosts {', '.join(names)} to start", self.spec)

    def node_states(self) -> dict[str, str]:
        """State of every node as Slurm says, such as `idle` or `down*`; empty while slurmctld does not answer."""
        try:
            answer = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t", timeout_s=_ANSWER_TIMEOUT_S)
        except HangError:
            return {}
        pairs = (line.split() for line in answer.stdout.splitlines())
        return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}

    def await_states(self, nodes: Sequence[str], *states: str, timeout_s: float = _UP_TIMEOUT_S) -> None:
        """Wait until Slurm says one of `states` of all these nodes; raises `HangError`."""
        found: dict[str, str] = {}

        def reached() -> bool:
            found.update(dict.fromkeys(nodes, "unknown") | self.node_states())
            return all(found[node] in states for node in nodes)

        try:
            _wait(reached, f"nodes {', '.join(nodes)} to be {' or '.join(states)}", self.spec, timeout_s)
        except HangError as error:
            said = ", ".join(f"{node} is {found[node]}" for node in nodes if found[node] not in states)
            raise HangError(f"{error}; {said}") from None


def up(spec: ClusterSpec, say: Callable[[str], None] = lambda text: None) -> Cluster:
    """Start a cluster and wait until all its nodes are idle.

    Raises:
        ConfigError: not root, packages are missing, a cluster of that name is up, or this machine cannot hold one.
        HangError: it does not come up. The message names the logs. Nothing is left running then.
    """
    require_root()
    refuse_inside()
    if missing := missing_packages():
        raise ConfigError(missing_message(missing))
    with locked(spec.name):
        if running_hosts(spec.name):
            raise ConfigError(
                f"mini cluster {spec.name} is up; end it with `hpctrain minicluster down --name {spec.name}`, "
                "or choose another --name"
            )
        _remove(spec.name)
        with _undone_on_failure(spec), _last_words(spec, spec.hosts):
            _prepare(spec)
            return _start(spec, say)


def down(name: str) -> bool:
    """End a cluster, whole or half started, and remove its files; False where there was nothing.

    Raises:
        HangError: a process does not end.
    """
    require_root()
    refuse_inside()
    with locked(name):
        return _remove(name)


def require_root() -> None:
    """Raise `ConfigError` for everyone else."""
    if os.geteuid() != 0:
        raise ConfigError(
            "a mini cluster needs root, for namespaces and mounts: run it with sudo, or in a container"
        )


def _prepare(spec: ClusterSpec) -> None:
    """Files; only what hosts write for everyone is open to all."""
    for directory in (STATE_ROOT, spec.state_dir, spec.host_dir(HEAD).parent):
        make_directory(directory)
    make_directory(spec.shared_dir, 0o1777)
    spec.save()
    write_configuration(spec)


def _start(spec: ClusterSpec, say: Callable[[str], None]) -> Cluster:
    cluster = Cluster(spec.name)
    say(f"starting {HEAD} (munge, MariaDB, slurmdbd, slurmctld) and {spec.num_nodes} nodes")
    for host in spec.hosts:
        start_host(spec, host)
    cluster.await_hosts(spec.hosts)
    _await_bridge(cluster)
    hosts = cluster.hosts()
    for node in spec.nodes:
        network.plug_in(require(hosts, spec.name, HEAD), require(hosts, spec.name, node))
    say("waiting for the nodes to register")

    def ready() -> bool:
        for host in spec.hosts:
            cluster.host(host)  # a host that ended will not register
        return cluster.node_states() == dict.fromkeys(spec.nodes, "idle")

    _wait(ready, "all nodes to be idle", spec)
    return cluster


def _remove(name: str) -> bool:
    """End and remove everything; needs no file of the cluster to be there, or whole."""
    state_dir = ClusterSpec(name).state_dir
    ended = end_hosts(name)
    existed = state_dir.exists()
    remove_tree(state_dir)
    with contextlib.suppress(OSError):  # other clusters are in there, or it is gone
        STATE_ROOT.rmdir()
    return bool(ended) or existed


def _await_bridge(cluster: Cluster) -> None:
    def there() -> bool:
        return cluster.run("ip", "link", "show", "br0").returncode == 0

    _wait(there, "the bridge", cluster.spec)


@contextlib.contextmanager
def _undone_on_failure(spec: ClusterSpec) -> Iterator[None]:
    """After an error the files stay, for they hold the logs that say why; after Ctrl-C nothing does."""
    try:
        yield
    except HpctrainError:
        end_hosts(spec.name)
        raise
    except BaseException:
        _remove(spec.name)
        raise


@contextlib.contextmanager
def _last_words(spec: ClusterSpec, hosts: Sequence[str]) -> Iterator[None]:
    """An error says what the init processes of these hosts said before they ended."""
    try:
        yield
    except HpctrainError as error:
        lines = [str(error)]
        for host in hosts:
            log = spec.host_dir(host) / "log" / "init.log"
            if log.exists() and (said := log.read_text(errors="replace").strip()):
                lines.append(f"{host} says: {said.splitlines()[-1]} ({log})")
        raise type(error)("; ".join(lines)) from error


def _wait(done: Callable[[], bool], what: str, spec: ClusterSpec, timeout_s: float = _UP_TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline_s:
            logs = spec.host_dir(HEAD).parent
            raise HangError(f"waited {timeout_s:g} s for {what}: see the logs in {logs}/*/log")
        time.sleep(_POLL_S)
