"""Hosts as sets of namespaces: starting one, finding it, running a command in it, ending it (unshare(1), nsenter(1))."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hpctrain.errors import ConfigError, HangError
from hpctrain.minicluster.spec import ClusterSpec

_MODULE = "hpctrain.minicluster.host"
_END_TIMEOUT_S = 20.0
_POLL_S = 0.02


@dataclass(frozen=True)
class Host:
    """A running host: `init` is its first process, seen from outside, and `keeper` the unshare that holds it."""

    name: str
    keeper: psutil.Process
    init: psutil.Process


def start_host(spec: ClusterSpec, host: str) -> None:
    """Start the init process of `host` in namespaces of its own; it outlives the caller."""
    log = spec.host_dir(host) / "log" / "init.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # Not ip-netns(8): it mounts /sys anew, and slurmd then finds no cgroup filesystem.
    isolate = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with log.open("ab") as stream:
        subprocess.Popen(
            [*isolate, "--propagation", "private", sys.executable, "-m", _MODULE, spec.name, host],
            env={**_clean_environment(), "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            cwd="/",
        )


def running_hosts(name: str) -> dict[str, Host]:
    """The hosts of cluster `name` that are up, found by their command lines: no file that could be stale."""
    keepers: dict[str, psutil.Process] = {}
    inits: dict[str, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if command[-3:-1] == [_MODULE, name] and process.status() != psutil.STATUS_ZOMBIE:
                (keepers if command[0] == "unshare" else inits)[command[-1]] = process
        except psutil.Error:
            continue
    return {host: Host(host, keepers[host], inits[host]) for host in inits if host in keepers}


def end_hosts(name: str, hosts: Sequence[str] | None = None) -> int:
    """End these hosts (None: all) with everything in them, and wait until they are gone; returns how many.

    Raises:
        HangError: some do not end within 20 s.
    """
    deadline_s = time.monotonic() + _END_TIMEOUT_S
    ended: set[str] = set()
    while found := [host for host in _pieces(name) if hosts is None or host[0] in hosts]:
        for host, process in found:
            ended.add(host)
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if time.monotonic() > deadline_s:
            pids = ", ".join(str(process.pid) for _, process in found)
            raise HangError(
                f"processes {pids} of mini cluster {name} survive SIGKILL for {_END_TIMEOUT_S:g} s"
            )
        time.sleep(_POLL_S)
    return len(ended)


def command_inside(host: Host, command: Sequence[str], directory: str | Path = "/") -> list[str]:
    """The command line that runs `command` on a host. It dies with the process that was started from it."""
    enter = ["nsenter", "-t", str(host.init.pid), "-n", "-m", "-u", "-p", f"--wd={directory}", "--"]
    return [*enter, "setpriv", "--pdeathsig", "KILL", "--", *command]


def run_inside(
    host: Host, command: Sequence[str], timeout_s: float = 60.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command on a host and return what it said."""
    return subprocess.run(
        command_inside(host, command, options.pop("cwd", "/")),
        timeout=timeout_s,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        **options,
    )


def require(hosts: dict[str, Host], name: str, host: str) -> Host:
    """The running host of that name; raises `ConfigError` where it is down."""
    if host not in hosts:
        raise ConfigError(
            f"host {host} of mini cluster {name} is not up; see `hpctrain minicluster status --name {name}`"
        )
    return hosts[host]


def _pieces(name: str) -> list[tuple[str, psutil.Process]]:
    """All processes that hold a host, whole or half started. Zombies of others do not count."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if command[-3:-1] == [_MODULE, name] and process.status() != psutil.STATUS_ZOMBIE:
                found.append((command[-1], process))
        except psutil.Error:
            continue
    return found


def _clean_environment() -> dict[str, str]:
    """The caller's environment without what would mislead a host (a job's variables, another Python's path)."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM", "PYTHON", "OMPI", "PMIX"))
    }
