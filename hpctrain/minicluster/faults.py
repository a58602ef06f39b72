"""What can be done to a running mini cluster: nodes that die, links that are cut, disks that are full, preemption.

Every fault can be made twice with the effect of once, and `heal_node` undoes all that was done to a node. None waits
for Slurm to notice, which takes up to SlurmdTimeout (10 s): `Cluster.await_states` does that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from hpctrain.errors import ConfigError, HangError, UsageError
from hpctrain.minicluster import network
from hpctrain.minicluster.cluster import Cluster
from hpctrain.minicluster.daemons import CONTROLLER, daemon_environment, log_file
from hpctrain.minicluster.namespaces import end_hosts
from hpctrain.minicluster.spec import HEAD, SSD

FILL_NAME = "filled-by-minicluster"
"""The file in a node's SSD that `fill_disk` makes."""

_RATE = re.compile(r"[1-9][0-9]*[kmg]bit")
_FIRST_FILL_BYTES, _LAST_FILL_BYTES = 1 << 30, 4096  # down to one block of ext4
_CONTROLLER_TIMEOUT_S = 30.0
_POLL_S = 0.05


def kill_node(cluster: Cluster, node: str) -> None:
    """Cut the power: what ran on the node is gone, and nobody is told."""
    cluster.spec.check_node(node)
    if node in cluster.hosts():
        # The link first: a kernel that ends processes would close their connections, and their peers would know.
        network.cut(cluster.host(HEAD), node)
        end_hosts(cluster.name, [node])
        # Half-closed connections keep a network namespace for minutes after its last process.
        network.unplug(cluster.host(HEAD), node)


def reboot_node(cluster: Cluster, node: str) -> None:
    """Cut the power, and switch the node on again: another boot id, /tmp and /dev/shm empty, the SSD as it was.

    Its link is as new: a cut or slow one is mended. Slurm does not notice that a node was gone for a second only; jobs
    learn it from their connections.
    """
    kill_node(cluster, node)
    cluster.start_node(node)


def cut_node(cluster: Cluster, node: str) -> None:
    """Pull the network cable of a node: what runs there goes on, alone."""
    cluster.node(node)
    network.cut(cluster.host(HEAD), node)


def slow_link(cluster: Cluster, node: str, rate: str | None) -> None:
    """Limit what a node sends and what it receives to `rate` each, such as `10mbit`; None: no limit.

    Raises:
        UsageError: a rate that is not a number of kbit, mbit or gbit (per second).
    """
    if rate is not None and not _RATE.fullmatch(rate):
        raise UsageError(
            f"rate {rate!r}: give a whole number of kbit, mbit or gbit (per second), such as 10mbit, or `full`"
        )
    network.limit_rate(cluster.host(HEAD), cluster.node(node), rate)


def fill_disk(cluster: Cluster, node: str) -> None:
    """Fill the SSD of a node with one file, to the last block; who writes next gets ENOSPC."""
    path = _fill_path(cluster, node)
    size, step = 0, _FIRST_FILL_BYTES
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while step >= _LAST_FILL_BYTES:
            try:
                os.posix_fallocate(descriptor, size, step)  # takes the blocks, and writes nothing
                size += step
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                step //= 2
    finally:
        os.close(descriptor)


def drain_node(cluster: Cluster, node: str, reason: str = "drained by hand") -> None:
    """Let no job start on a node any more; those that run go on."""
    cluster.spec.check_node(node)
    _slurm(cluster, "scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")


def undrain_node(cluster: Cluster, node: str) -> None:
    """Let jobs start on a node again, whoever drained it."""
    cluster.spec.check_node(node)
    if "DRAIN" in _state_flags(cluster, node):  # Slurm refuses to resume another one
        _slurm(cluster, "scontrol", "update", f"NodeName={node}", "State=RESUME")


def heal_node(cluster: Cluster, node: str) -> None:
    """Undo all faults of a node: power, link, disk and drain."""
    cluster.start_node(node)
    network.heal(cluster.host(HEAD), node)
    slow_link(cluster, node, None)
    _register(cluster, node)
    _fill_path(cluster, node).unlink(missing_ok=True)
    undrain_node(cluster, node)


def preempt(cluster: Cluster, nodes: Sequence[str], duration_s: int = 30) -> str:
    """Submit a job of the partition `urgent` that needs these nodes, whole, for that long; returns its id.

    Jobs of other partitions that are in its way get the signal they asked for, and after the partition's GraceTime
    (60 s) they are ended and requeued.
    """
    nodes = list(dict.fromkeys(nodes))  # Slurm counts a node once, however often it is named
    for node in nodes:
        cluster.spec.check_node(node)
    if not nodes or duration_s < 1:
        raise UsageError(
            f"preempt {len(nodes)} nodes for {duration_s} s: name at least one node, and one second"
        )
    where = ["--partition=urgent", "--exclusive", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}"]
    quiet = ["--job-name=preempt", "--no-requeue", "--output=/dev/null", "--chdir=/"]
    limit = f"--time={duration_s // 60 + 1}"
    return _slurm(
        cluster, "sbatch", "--parsable", *where, *quiet, limit, f"--wrap=exec sleep {duration_s}"
    ).strip()


def nodes_of_job(cluster: Cluster, job: str) -> list[str]:
    """The nodes on which a job runs. Raises `ConfigError` where it does not run."""
    names = _slurm(cluster, "squeue", "-h", "-j", job, "-t", "running", "-o", "%N").strip()
    if not names:
        raise ConfigError(f"job {job} does not run; see `hpctrain minicluster status --name {cluster.name}`")
    return _slurm(cluster, "scontrol", "show", "hostnames", names).split()


def kill_controller(cluster: Cluster) -> None:
    """End slurmctld as a crash does. The nodes and what runs there go on."""
    _end_controller(cluster, "kill")


def restart_controller(cluster: Cluster) -> None:
    """End slurmctld in good order where it runs, start it (again), and wait until it answers.

    Raises:
        HangError: it does not end, or does not answer.
    """
    _end_controller(cluster, "terminate")
    command = cluster.command(["setsid", "--fork", *CONTROLLER])
    with log_file(cluster.spec, HEAD, CONTROLLER[0]).open("ab") as log:
        subprocess.run(
            command, env=daemon_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True
        )
    deadline_s = time.monotonic() + _CONTROLLER_TIMEOUT_S
    while not cluster.node_states():
        _check_deadline(deadline_s, "answer", cluster)


def _register(cluster: Cluster, node: str) -> None:
    """Let slurmd register: slurmctld asks a node that it calls down only once in a minute."""
    for slurmd in cluster.node(node).daemons("slurmd"):
        if _catches_hangup(slurmd):
            slurmd.send_signal(signal.SIGHUP)


def _catches_hangup(process: psutil.Process) -> bool:
    """False for a slurmd that is still starting, which registers anyway, and which the signal would end."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (signal.SIGHUP - 1) & 1)


def _end_controller(cluster: Cluster, how: str) -> None:
    deadline_s = time.monotonic() + _CONTROLLER_TIMEOUT_S
    head = cluster.host(HEAD)
    told: set[int] = set()
    # With its helper slurmscriptd, which is the init's child once slurmctld is gone.
    while running := head.daemons("slurmctld", "slurmscriptd"):
        for process in running:
            if process.pid not in told:
                told.add(process.pid)
                with contextlib.suppress(psutil.NoSuchProcess):
                    getattr(process, how)()
        _check_deadline(deadline_s, "end", cluster)


def _check_deadline(deadline_s: float, what: str, cluster: Cluster) -> None:
    if time.monotonic() > deadline_s:
        log = cluster.spec.host_dir(HEAD) / "log" / "slurmctld.log"
        raise HangError(f"slurmctld does not {what} within {_CONTROLLER_TIMEOUT_S:g} s: see {log}")
    time.sleep(_POLL_S)


def _fill_path(cluster: Cluster, node: str) -> Path:
    """The fill file as seen from outside, through the node's own view of the files."""
    return Path(f"/proc/{cluster.node(node).init.pid}/root") / SSD.relative_to("/") / FILL_NAME


def _state_flags(cluster: Cluster, node: str) -> set[str]:
    """State of a node with its flags, such as {IDLE, DRAIN}."""
    said = _slurm(cluster, "scontrol", "-o", "show", "node", node)
    found = re.search(r" State=(\S+)", said)
    return set(found[1].split("+")) if found else set()


def _slurm(cluster: Cluster, *command: str) -> str:
    answer = cluster.run(*command, timeout_s=30)
    if answer.returncode != 0:
        raise ConfigError(f"{' '.join(command)}: {(answer.stderr or answer.stdout).strip()}")
    return answer.stdout
