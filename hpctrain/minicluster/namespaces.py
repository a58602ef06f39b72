"""Hosts as sets of namespaces: starting one, finding it, entering it, ending it (unshare(1), nsenter(1))."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hpctrain.errors import ConfigError, HangError
from hpctrain.minicluster.daemons import init_environment
from hpctrain.minicluster.files import make_directory
from hpctrain.minicluster.packages import tool_path
from hpctrain.minicluster.spec import HEAD, ClusterSpec

_MODULE = "hpctrain.minicluster.host"
_LAUNCHERS = ("setsid", "unshare")  # what becomes the init, or holds it
_END_TIMEOUT_S = 20.0
_POLL_S = 0.02


SLURM_VARIABLES = (
    "SLURM",
    "SBATCH_",
    "SRUN_",
    "SALLOC_",
    "SCANCEL_",
    "SQUEUE_",
    "SINFO_",
    "SACCT_",
    "SCONTROL_",
)
"""How the environment variables begin that Slurm and its commands read."""


@dataclass(frozen=True)
class Host:
    """A running host: `init` is its first process, seen from outside."""

    name: str
    init: psutil.Process

    def daemons(self, *names: str) -> list[psutil.Process]:
        """The processes of these names that the init would reap; none where the host is down."""
        try:
            children = self.init.children()
        except psutil.NoSuchProcess:
            return []
        return [child for child in children if _lives(child) and _name(child) in names]


def start_host(spec: ClusterSpec, host: str) -> None:
    """Start the init process of `host` in namespaces of its own; it outlives the caller."""
    log = spec.host_dir(host) / "log" / "init.log"
    for directory in (spec.host_dir(host), log.parent):  # users' jobs are spooled in there
        make_directory(directory)
    # Not ip-netns(8): it mounts /sys anew, and slurmd then finds no cgroup filesystem.
    isolate = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
    # Forked away, the host is nobody's child: no caller need wait for it, and none is told of its end.
    away = ["setsid", "--fork"]
    with log.open("ab") as stream:
        subprocess.run(
            [*away, *isolate, "--propagation", "private", sys.executable, "-m", _MODULE, spec.name, host],
            env=init_environment(),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            cwd="/",
            check=True,
        )


def running_hosts(name: str) -> dict[str, Host]:
    """The hosts of cluster `name` that are up, found by their command lines: no file that could be stale."""
    pieces = list(_pieces(name))
    keepers = {process.pid for _, program, process in pieces if program == "unshare"}
    found = {}
    for host, program, process in pieces:
        # The init's own children bear its command line until they run something, so the parent must be asked, too.
        if program not in _LAUNCHERS and _parent(process) in keepers:
            found[host] = Host(host, process)
    return found


def held_hosts(name: str) -> set[str]:
    """Names of the hosts of which anything runs: those that are up, and those that are about to be."""
    return {host for host, _, _ in _pieces(name)}


def running_clusters() -> set[str]:
    """Names of the clusters of which anything runs, whether they have files or not."""
    return {command[-2] for command, _ in _host_processes()}


def end_hosts(name: str, hosts: Sequence[str] | None = None) -> int:
    """End these hosts (None: all) with everything in them, and wait until they are gone; returns how many.

    Raises:
        HangError: some do not end within 20 s.
    """
    deadline_s = time.monotonic() + _END_TIMEOUT_S
    ended: set[str] = set()
    while found := [piece for piece in _pieces(name) if hosts is None or piece[0] in hosts]:
        for host, _, process in found:
            ended.add(host)
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if time.monotonic() > deadline_s:
            pids = ", ".join(str(process.pid) for _, _, process in found)
            raise HangError(
                f"processes {pids} of mini cluster {name} survive SIGKILL for {_END_TIMEOUT_S:g} s"
            )
        time.sleep(_POLL_S)
    return len(ended)


def command_inside(
    host: Host, command: Sequence[str], directory: str | Path = "/", limit_s: float | None = None
) -> list[str]:
    """The command line that runs `command` on a host. It dies with the process that was started from it.

    With a limit it ends by itself, too: where that process is killed in its first moments, before its child has asked
    to die with it, the child would go on.
    """
    enter = ["nsenter", "-t", str(host.init.pid), "-n", "-m", "-u", "-p", "-r", "--"]
    bounded = [] if limit_s is None else ["timeout", "--signal=KILL", f"{limit_s:g}"]
    dying = ["setpriv", "--pdeathsig", "KILL", "--"]
    return [*enter, *bounded, *dying, "env", f"--chdir={directory}", "--", *command]


def environment_inside() -> dict[str, str]:
    """The caller's environment without what belongs to another Slurm, and with a PATH that finds all tools."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(SLURM_VARIABLES)}
    return kept | {"PATH": tool_path()}


def run_inside(
    host: Host, command: Sequence[str], timeout_s: float = 60.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command on a host and return what it said. Raises `HangError` after `timeout_s`."""
    try:
        return subprocess.run(
            command_inside(host, command, options.pop("cwd", "/"), timeout_s + 1),
            timeout=timeout_s,
            capture_output=True,
            text=True,
            check=False,
            **{"env": environment_inside()}
            | ({} if "input" in options else {"stdin": subprocess.DEVNULL})
            | options,
        )
    except subprocess.TimeoutExpired as error:
        raise HangError(f"{' '.join(command)} on {host.name} did not end within {timeout_s:g} s") from error


def require(hosts: dict[str, Host], name: str, host: str) -> Host:
    """The running host of that name; raises `ConfigError` where it is down."""
    if host not in hosts:
        command = "hpctrain minicluster"
        if host == HEAD:
            mend = f"end it with `{command} down --name {name}`, and start it anew with `up`"
        else:
            mend = f"`{command} heal-node --name {name} {host}` switches it on"
        raise ConfigError(f"host {host} of mini cluster {name} is down; {mend}")
    return hosts[host]


def refuse_inside() -> None:
    """Raise `ConfigError` on a host of a mini cluster, which sees neither the others nor the outside."""
    command = psutil.Process(1).cmdline()
    if command[-3:-2] == [_MODULE]:
        raise ConfigError(
            f"this is host {command[-1]} of mini cluster {command[-2]}, which sees no other host: leave its shell first"
        )


def _pieces(name: str) -> list[tuple[str, str, psutil.Process]]:
    """All processes that hold a host, whole or half started: host, program, process."""
    return [
        (command[-1], command[0], process) for command, process in _host_processes() if command[-2] == name
    ]


def _host_processes() -> Iterator[tuple[list[str], psutil.Process]]:
    """Root's only: whoever can fake a command line is not to be entered by root. Zombies are ended already."""
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if command[-3:-2] == [_MODULE] and process.uids().real == 0 and _lives(process):
                yield command, process
        except psutil.Error:
            continue


def _parent(process: psutil.Process) -> int:
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return 0


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""
