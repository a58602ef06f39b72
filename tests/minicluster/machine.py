"""What a machine shows of a mini cluster: what must be there while it is up, and gone when it is down."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from hpctrain.minicluster.namespaces import held_hosts
from hpctrain.minicluster.spec import ClusterSpec

_KINDS = ("net", "mnt", "uts", "pid")


def wait_until(done: Callable[[], Any], what: str, timeout_s: float = 30) -> Any:
    """What `done` returns, once that is true."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := done()):
        assert time.monotonic() < deadline_s, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.05)
    return found


def namespaces_of(pids: Iterable[int]) -> set[str]:
    """The namespaces that these processes do not share with this one."""
    own = {os.readlink(f"/proc/self/ns/{kind}") for kind in _KINDS}
    return {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in pids for kind in _KINDS} - own


def processes_in(namespaces: set[str]) -> list[int]:
    """Living processes that are in any of these namespaces."""
    found = []
    for process in psutil.process_iter():
        try:
            if namespaces & namespaces_of([process.pid]) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (OSError, psutil.Error):
            continue
    return found


def traces(name: str) -> list[str]:
    """All that this machine shows of a cluster: processes, mounts, loop devices, interfaces, locks, files."""
    state = str(ClusterSpec(name).state_dir)
    found = [f"host {host}" for host in held_hosts(name)]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"{state}/" in line]
    found += [line for line in _output("losetup", "-a") if f"{state}/" in line]
    found += [line for line in _output("ip", "-o", "link") if "port-n" in line]
    found += [
        line for line in Path("/proc/net/unix").read_text().splitlines() if f"minicluster-{name}" in line
    ]
    return found + [state] * Path(state).exists()


def _output(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
