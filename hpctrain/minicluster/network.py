"""The cables: one bridge in the head's network namespace, one veth pair per node (ip-link(8), tc-tbf(8))."""

from __future__ import annotations

import json
import re
import subprocess

from hpctrain.errors import ConfigError
from hpctrain.minicluster.namespaces import Host, environment_inside

_PORT = "port-"  # the head's end of a node's cable is named after the node
_LIMITED = re.compile(rf"qdisc tbf \S+ dev {_PORT}(?P<node>\S+) .*\brate (?P<rate>\S+)")


def plug_in(head: Host, node: Host) -> None:
    """Lay a cable from the bridge to a node; what is left of an earlier one is removed."""
    port = _port(node.name)
    unplug(head, node.name)
    peer = ["peer", "name", "eth0", "netns", str(node.init.pid)]
    _run(head, "ip", "link", "add", port, "type", "veth", *peer)
    _run(head, "ip", "link", "set", port, "master", "br0", "up")


def unplug(head: Host, node: str) -> None:
    """Remove the cable of a node, where there is one."""
    command = [*_on(head), "ip", "link", "delete", _port(node)]
    subprocess.run(command, capture_output=True, env=environment_inside(), check=False)


def cut(head: Host, node: str) -> None:
    """Take the link down: what runs on the node goes on, alone."""
    _run(head, "ip", "link", "set", _port(node), "down")


def heal(head: Host, node: str) -> None:
    """Bring the link back."""
    _run(head, "ip", "link", "set", _port(node), "up")


def limit_rate(head: Host, node: Host, rate: str | None) -> None:
    """Limit what a node receives and what it sends to `rate` each, such as `100mbit`; None: no limit."""
    for host, device in ((head, _port(node.name)), (node, "eth0")):
        queue = ["tc", "qdisc", "replace", "dev", device, "root"]
        if rate is None:
            _run(host, *queue, "noqueue")  # what these devices have by themselves
        else:
            _run(host, *queue, "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")


def links(head: Host) -> dict[str, str]:
    """Of every node with power what its link is: `up`, `cut`, or the rate it is limited to, such as `10Mbit`."""
    found = {}
    for interface in json.loads(_run(head, "ip", "-json", "link", "show", "type", "veth")):
        found[interface["ifname"].removeprefix(_PORT)] = "up" if "UP" in interface["flags"] else "cut"
    for line in _run(head, "tc", "qdisc", "show").splitlines():
        if (limited := _LIMITED.match(line)) and found.get(limited["node"]) == "up":
            found[limited["node"]] = limited["rate"]
    return found


def _port(node: str) -> str:
    return f"{_PORT}{node}"


def _on(host: Host) -> list[str]:
    """Only the host's network: process numbers must stay those of the outside."""
    return ["nsenter", "-t", str(host.init.pid), "-n", "--"]


def _run(host: Host, *command: str) -> str:
    answer = subprocess.run(
        [*_on(host), *command], capture_output=True, text=True, env=environment_inside(), check=False
    )
    if answer.returncode != 0:
        raise ConfigError(f"{' '.join(command)}: {answer.stderr.strip()}")
    return answer.stdout
