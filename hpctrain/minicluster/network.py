"""The cables: one bridge in the head's network namespace, one veth pair per node (ip-link(8), tc-tbf(8))."""

from __future__ import annotations

import subprocess

from hpctrain.errors import ConfigError
from hpctrain.minicluster.namespaces import Host


def plug_in(head: Host, node: Host) -> None:
    """Lay a cable from the bridge to a node; what is left of an earlier one is removed."""
    port = _port(node.name)
    subprocess.run([*_on(head), "ip", "link", "delete", port], capture_output=True, check=False)
    peer = ["peer", "name", "eth0", "netns", str(node.init.pid)]
    _run(head, "ip", "link", "add", port, "type", "veth", *peer)
    _run(head, "ip", "link", "set", port, "master", "br0", "up")


def cut(head: Host, node: str) -> None:
    """Take the link down: what runs on the node goes on, alone."""
    _run(head, "ip", "link", "set", _port(node), "down")


def heal(head: Host, node: str) -> None:
    """Bring the link back."""
    _run(head, "ip", "link", "set", _port(node), "up")


def limit_rate(head: Host, node: str, rate: str | None) -> None:
    """Limit what a node receives to `rate`, such as `100mbit`; None: no limit."""
    if rate is None:
        subprocess.run(
            [*_on(head), "tc", "qdisc", "delete", "dev", _port(node), "root"],
            capture_output=True,
            check=False,
        )
        return
    queue = ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
    _run(head, "tc", "qdisc", "replace", "dev", _port(node), "root", *queue)


def _port(node: str) -> str:
    return f"port-{node}"


def _on(head: Host) -> list[str]:
    """Only the head's network: process numbers must stay those of the outside."""
    return ["nsenter", "-t", str(head.init.pid), "-n", "--"]


def _run(head: Host, *command: str) -> None:
    answer = subprocess.run([*_on(head), *command], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise ConfigError(f"{' '.join(command)}: {answer.stderr.strip()}")
