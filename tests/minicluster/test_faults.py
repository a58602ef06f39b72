"""Faults on a real cluster: what they do, how Slurm sees it, and that they heal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError, UsageError
from hpctrain.minicluster import faults, network
from hpctrain.minicluster.spec import HEAD, SSD
from tests.minicluster.machine import namespaces_of, processes_in, wait_until
from tests.support import hpctrain

pytestmark = pytest.mark.slurm

_DOWN_TIMEOUT_S = 40  # SlurmdTimeout is 10 s; slurmctld looks now and then


def test_a_node_without_power_and_one_without_link(cluster, on):
    """Both are down for Slurm; but only on the first one everything is gone."""
    shared = cluster.spec.shared_dir
    for node in ("n2", "n3"):
        script = f"while :; do date +%s.%N > {shared}/{node}; sleep 0.05; done"
        on("head", f"srun -w {node} sh -c '{script}' >/dev/null 2>&1 &")
    wait_until(lambda: (shared / "n2").exists() and (shared / "n3").exists(), "the jobs to run")
    was = namespaces_of([cluster.node("n2").init.pid])
    for _ in range(2):
        faults.kill_node(cluster, "n2")
        faults.cut_node(cluster, "n3")
    assert set(cluster.hosts()) == {"head", "n1", "n3"}
    wait_until(lambda: not processes_in(was), "everything on n2 to be gone")
    dead, alive = (shared / "n2").read_text(), (shared / "n3").read_text()
    wait_until(lambda: (shared / "n3").read_text() not in ("", alive), "n3 to go on")
    assert (shared / "n2").read_text() == dead
    assert network.links(cluster.host(HEAD)) == {"n1": "up", "n3": "cut"}
    with pytest.raises(ConfigError, match=rf"host n2 .* is down; .*heal-node --name {cluster.name} n2"):
        faults.cut_node(cluster, "n2")
    cluster.await_states(["n2", "n3"], "down*", timeout_s=_DOWN_TIMEOUT_S)
    assert cluster.node_states()["n1"] == "idle"
    for _ in range(2):
        faults.heal_node(cluster, "n2")
        faults.heal_node(cluster, "n3")
    cluster.await_states(["n2", "n3"], "idle", timeout_s=30)
    assert on("head", "srun -N2 -w n2,n3 hostname | sort").split() == ["n2", "n3"]


def test_a_host_whose_init_dies_loses_everything(cluster, on):
    on("n3", "setsid --fork sleep 1000 > /dev/null 2>&1")
    host = cluster.node("n3")
    was = namespaces_of([host.init.pid])
    assert len(processes_in(was)) >= 3  # init, slurmd, sleep
    host.init.kill()
    wait_until(lambda: not processes_in(was) and "n3" not in cluster.hosts(), "everything on n3 to be gone")
    faults.reboot_node(cluster, "n3")  # which switches on what is off
    cluster.start_node("n3")
    cluster.await_states(["n3"], "idle", timeout_s=_DOWN_TIMEOUT_S)


def test_a_reboot_empties_memory_and_keeps_the_ssd(cluster, on):
    on("n2", f"for place in /tmp /dev/shm {SSD}; do echo here > $place/mark; done")
    before = on("n2", "cat /proc/sys/kernel/random/boot_id")
    answer = hpctrain(["minicluster", "reboot-node", "--name", cluster.name, "n2"])
    assert answer.returncode == 0, answer.stderr
    assert on("n2", "cat /proc/sys/kernel/random/boot_id") != before
    assert on("n2", "ls /tmp/mark /dev/shm/mark || true") == ""
    assert on("n2", f"cat {SSD}/mark") == "here"
    assert on("n2", "hostname") == "n2"
    cluster.await_states(["n2"], "idle", timeout_s=_DOWN_TIMEOUT_S)
    assert on("head", "srun -w n2 hostname") == "n2"


def test_shared_directories_outlive_a_reboot(cluster, tmp_path):
    """The reboot empties the node's /tmp, through which they are seen."""
    for shared in map(Path, cluster.spec.shared):
        assert any(shared.iterdir())
    faults.reboot_node(cluster, "n3")
    for shared in map(Path, cluster.spec.shared):
        assert any(shared.iterdir())
        assert cluster.run("ls", shared, host="n3").stdout


def test_a_drained_node_takes_no_job(cluster, on):
    for reason in ("first reason", "bad memory [/b]"):
        faults.drain_node(cluster, "n2", reason)
    assert cluster.node_states()["n2"] == "drain"
    assert "bad memory" in on("head", "sinfo -R")
    answer = cluster.run("srun", "-w", "n2", "--immediate=1", "hostname")
    assert answer.returncode != 0
    assert "bad memory [/b]" in hpctrain(["minicluster", "status", "--name", cluster.name]).stdout
    answer = hpctrain(["minicluster", "heal-node", "--name", cluster.name, "n2"])
    assert answer.returncode == 0, answer.stderr
    faults.undrain_node(cluster, "n2")
    cluster.await_states(["n2"], "idle", timeout_s=30)


def test_a_full_disk_takes_no_byte(cluster, on):
    for _ in range(2):
        faults.fill_disk(cluster, "n2")
    assert "No space left" in on("n2", f"dd if=/dev/zero of={SSD}/more bs=4096 count=1 2>&1 || true")
    assert on("n2", f"df --output=avail {SSD} | tail -1") == "0"
    on("n1", f"echo fits > {SSD}/more")
    faults.reboot_node(cluster, "n2")
    assert on("n2", f"df --output=avail {SSD} | tail -1") == "0"  # a reboot does not help
    faults.heal_node(cluster, "n2")
    on("n2", f"dd if=/dev/zero of={SSD}/more bs=1M count=100 2>/dev/null; rm {SSD}/more")
    assert faults.FILL_NAME not in on("n2", f"ls {SSD}")


_SEND = """
import socket, sys, time
with socket.create_server(("", 7777)) as server:
    server.settimeout(20)
    connection = server.accept()[0]
    connection.sendall(bytes(int(sys.argv[1])))
    connection.close()
"""
_RECEIVE = """
import socket, sys, time
deadline = time.monotonic() + 10
while True:
    try:
        connection = socket.create_connection((sys.argv[1], 7777), timeout=20)
        break
    except OSError:
        assert time.monotonic() < deadline
        time.sleep(0.05)
start = time.monotonic()
while connection.recv(1 << 20):
    pass
print(time.monotonic() - start)
"""


def _transfer_s(cluster, sender: str, receiver: str, num_bytes: int) -> float:
    command = cluster.command([sys.executable, "-c", _SEND, str(num_bytes)], host=sender)
    with subprocess.Popen(command) as sending:
        try:
            answer = cluster.run(
                sys.executable, "-c", _RECEIVE, cluster.spec.address(sender), host=receiver, timeout_s=30
            )
        finally:
            sending.kill()
    assert answer.returncode == 0, answer.stderr
    return float(answer.stdout)


def test_a_slow_link_is_slow_both_ways(cluster):
    num_bytes = 1_500_000
    for _ in range(2):
        faults.slow_link(cluster, "n2", "10mbit")
    least_s = 8 * (num_bytes - (256 << 10)) / 10e6  # less the burst that passes at once
    for sender, receiver in (("n1", "n2"), ("n2", "n1")):
        assert _transfer_s(cluster, sender, receiver, num_bytes) > 0.9 * least_s
    assert network.links(cluster.host(HEAD))["n2"] == "10Mbit"
    for _ in range(2):
        faults.slow_link(cluster, "n2", None)
    assert _transfer_s(cluster, "n1", "n2", num_bytes) < 0.5 * least_s


@pytest.mark.parametrize("rate", ["10", "fast", "0mbit", "10MB", "1mbit; reboot"])
def test_a_rate_without_a_unit_is_refused(cluster, rate):
    with pytest.raises(UsageError, match="such as 10mbit, or `full`"):
        faults.slow_link(cluster, "n2", rate)


def test_an_urgent_job_preempts(cluster, on):
    told = cluster.spec.shared_dir / "told"
    script = f"trap 'echo told > {told}; exit 0' USR1; touch {told}.ready; sleep 60 & wait"
    job = on("head", f'sbatch --parsable -N2 --signal=B:USR1@1 -o /dev/null --wrap "{script}"', cwd="/")
    wait_until(Path(f"{told}.ready").exists, "the job to run")
    nodes = faults.nodes_of_job(cluster, job)
    assert len(nodes) == 2
    answer = hpctrain(["minicluster", "preempt", "--name", cluster.name, "--job", job, "--seconds", "1"])
    assert answer.returncode == 0, answer.stderr
    wait_until(told.exists, "the job to be told")
    urgent = answer.stdout.split()[1]
    wait_until(
        lambda: (
            not on("head", f"squeue -h -j {urgent}").strip()
            or "R" in on("head", f"squeue -h -j {urgent} -o %t")
        ),
        "the urgent job to run",
    )
    with pytest.raises(ConfigError, match="does not run"):
        faults.nodes_of_job(cluster, job)
    with pytest.raises(UsageError, match="name at least one node"):
        faults.preempt(cluster, [])
    twice = faults.preempt(cluster, ["n1", "n1"])
    assert on("head", f"squeue -h -j {twice} -o %D") == "1"
    on("head", "scancel --partition=urgent")
    cluster.await_states(cluster.spec.nodes, "idle", timeout_s=30)


def test_a_controller_comes_back_and_jobs_go_on(cluster, on):
    job = on("head", "sbatch --parsable -w n1 -o /dev/null --wrap 'exec sleep 120'", cwd="/")
    wait_until(lambda: on("head", f"squeue -h -t running -j {job}"), "the job to run")
    (before,) = cluster.host(HEAD).daemons("slurmctld")
    faults.restart_controller(cluster)
    (after,) = cluster.host(HEAD).daemons("slurmctld")
    assert before.pid != after.pid
    assert on("head", f"squeue -h -o %T -j {job}") == "RUNNING"
    for _ in range(2):
        faults.kill_controller(cluster)
    assert not cluster.host(HEAD).daemons("slurmctld", "slurmscriptd")
    faults.restart_controller(cluster)
    assert on("head", f"squeue -h -o %T -j {job}") == "RUNNING"
    on("head", f"scancel {job}")
    cluster.await_states(cluster.spec.nodes, "idle", timeout_s=30)


@pytest.mark.parametrize(
    "fault",
    [
        faults.kill_node,
        faults.reboot_node,
        faults.cut_node,
        faults.heal_node,
        faults.fill_disk,
        faults.drain_node,
        faults.undrain_node,
    ],
)
def test_a_node_that_is_not_there_is_refused(cluster, fault):
    with pytest.raises(UsageError, match="no node 'n9'"):
        fault(cluster, "n9")
    with pytest.raises(UsageError, match="no node 'head'"):
        fault(cluster, "head")
    with pytest.raises(UsageError, match="no node 'n9'"):
        faults.preempt(cluster, ["n9"])
