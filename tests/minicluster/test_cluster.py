"""A real cluster: what its hosts have of their own, and what they have not of the outside."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError, HangError, UsageError
from hpctrain.minicluster.cluster import Cluster, down, up
from hpctrain.minicluster.spec import SSD, ClusterSpec
from tests.minicluster.machine import wait_until
from tests.support import ROOT, hpctrain

pytestmark = pytest.mark.slurm


_THREE = ("n1", "n2", "n3")
_LOOK = (
    "echo $(hostname) $(ip -4 -o address show eth0 | cut -d' ' -f7) $(stat -c '%d %i' /tmp /mnt/ssd /dev/shm)"
)


def test_a_step_runs_on_three_machines(cluster, on):
    """Host names, addresses, /tmp, SSD and shared memory all differ."""
    (cluster.spec.shared_dir / "look").write_text(_LOOK)
    said = on("head", f"srun -N3 sh {cluster.spec.shared_dir}/look")
    lines = [line.split() for line in said.splitlines()]
    assert sorted(line[0] for line in lines) == list(_THREE)
    assert {line[1] for line in lines} == {f"{cluster.spec.address(node)}/24" for node in _THREE}
    assert len({tuple(line[2:4]) for line in lines}) == 3  # /tmp: a directory each, of one filesystem
    assert len({line[4] for line in lines}) == 3  # the SSD: a filesystem each
    assert len({line[6] for line in lines}) == 3  # /dev/shm


def test_only_the_shared_directory_is_shared(cluster, on):
    for place in ("/tmp", SSD, "/dev/shm", cluster.spec.shared_dir):
        on("n1", f"echo from-n1 > {place}/mark")
    for place in ("/tmp", SSD, "/dev/shm"):
        assert on("n2", f"ls {place}/mark || true") == ""
        assert not Path(place, "mark").exists()
    assert on("n2", f"cat {cluster.spec.shared_dir}/mark") == "from-n1"
    assert (cluster.spec.shared_dir / "mark").read_text() == "from-n1\n"


def test_mpi_starts_by_pmix(on):
    said = on("head", "srun -N3 -n6 --mpi=pmix sh -c 'echo $PMIX_RANK'")
    assert sorted(said.split()) == list("012345")


def test_what_ran_is_accounted(cluster, on):
    job = on("head", "sbatch --parsable -N2 -o /dev/null --wrap 'exit 3'", cwd="/")

    def accounted() -> list[str]:
        return [
            line
            for line in on("head", f"sacct -n -P -X -j {job} -o state,exitcode").splitlines()
            if line != "PENDING|0:0"
        ]

    assert wait_until(lambda: "FAILED|3:0" in accounted(), "sacct to know how the job ended")


def test_python_and_the_package_are_seen_inside(on):
    seen = on("n1", f"PYTHONPATH={ROOT} {sys.executable} -c 'import hpctrain; print(hpctrain.__file__)'")
    assert seen == str(ROOT / "hpctrain" / "__init__.py")


def test_an_init_reaps_orphans(cluster, on):
    on("n1", "for i in 1 2 3; do setsid --fork sleep 1 > /dev/null 2>&1; done")
    init = cluster.host("n1").init
    assert any(child.name() == "sleep" for child in init.children())
    wait_until(lambda: not any(child.name() == "sleep" for child in init.children()), "orphans to be reaped")


def test_hosts_have_nothing_of_the_callers(cluster, monkeypatch, tmp_path):
    """Neither descriptors, terminal and environment, nor ignored signals: another start shows it."""
    monkeypatch.setenv("SLURM_CONF", "/elsewhere/slurm.conf")
    monkeypatch.setenv("PYTHONSTARTUP", "/elsewhere/start.py")
    code = (
        "import os, signal, sys; from hpctrain.minicluster import faults; from hpctrain.minicluster.cluster import "
        "Cluster; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "os.umask(0o077); os.set_inheritable(os.open(sys.argv[2], os.O_RDONLY), True); "
        "faults.reboot_node(Cluster(sys.argv[1]), 'n3')"
    )
    secret = tmp_path / "secret"
    secret.touch()
    main, terminal = pty.openpty()
    command = [sys.executable, "-c", code, cluster.name, str(secret)]
    subprocess.run(command, stdin=terminal, cwd=ROOT, check=True, timeout=60, start_new_session=True)
    host = cluster.host("n3")
    for process in (host.init, *wait_until(lambda: host.daemons("slurmd"), "slurmd")):
        status = dict(line.split(":\t", 1) for line in _lines(process.pid, "status") if ":\t" in line)
        assert {os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()}.isdisjoint(
            {str(secret), os.ttyname(terminal)}
        )
        assert _lines(process.pid, "stat")[0].rsplit(")", 1)[1].split()[4] == "0"  # no terminal
        assert not int(status["SigIgn"], 16) & 0b11  # SIGHUP, SIGINT
        assert status["Umask"].strip() == "0022"
    (slurmd,) = host.daemons("slurmd")
    assert sorted(slurmd.environ()) == ["HOME", "LANG", "PATH"]
    os.close(main)
    os.close(terminal)
    cluster.await_states(["n3"], "idle", timeout_s=30)


def _lines(pid: int, name: str) -> list[str]:
    return Path(f"/proc/{pid}/{name}").read_text().splitlines()


def test_two_clusters_stand_beside_each_other(cluster, on):
    name = f"t-two-{os.getpid()}"
    before = os.umask(0o077)  # whose umask says nothing of what the cluster's users may do
    try:
        second = up(ClusterSpec(name, 1))
    finally:
        os.umask(before)
    try:
        assert second.node_states() == {"n1": "idle"}
        assert second.run("hostname", host="n1").stdout == "n1\n"
        second.run("touch", "/tmp/second", host="n1")
        assert on("n1", "ls /tmp/second || true") == ""
        assert second.spec.shared_dir != cluster.spec.shared_dir
        assert second.run("squeue", "-h").returncode == 0
        somebody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        job = ["sbatch", "--wait", "--output=/dev/null", f"--wrap=id -u > {second.spec.shared_dir}/said"]
        assert second.run(*somebody, *job).returncode == 0
        assert (second.spec.shared_dir / "said").read_text() == "65534\n"
    finally:
        down(name)
    assert set(cluster.node_states()) == set(_THREE)
    with pytest.raises(ConfigError, match="no mini cluster"):
        Cluster(name)


def test_a_cluster_that_is_up_is_not_started_again(cluster):
    with pytest.raises(ConfigError, match=f"{cluster.name} is up; end it with"):
        up(ClusterSpec(cluster.name))


def test_inside_there_is_no_other_cluster(cluster):
    answer = cluster.run(
        sys.executable,
        "-m",
        "hpctrain.cli",
        "minicluster",
        "status",
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert answer.returncode == 78
    assert "leave its shell first" in answer.stderr


def test_a_command_that_does_not_end_is_ended(cluster):
    with pytest.raises(HangError, match=r"sleep 30 on n1 did not end within 0.3 s"):
        cluster.run("sleep", "30", host="n1", timeout_s=0.3)
    wait_until(lambda: "sleep" not in cluster.run("ps", "ax", host="n1").stdout, "the command to end")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["--", "false"], 1),
        (["srun", "-N2", "sh", "-c", "exit 9"], 9),
    ],
)
def test_the_exit_code_of_a_command_is_that_of_shell(cluster, command, code):
    assert hpctrain(["minicluster", "shell", "--name", cluster.name, *command]).returncode == code


def test_a_command_runs_here_with_the_callers_environment(cluster):
    script = "pwd; echo $COLOUR; hostname; env | grep -c elsewhere"
    command = ["minicluster", "shell", "--name", cluster.name, "sh", "-c", script]
    foreign = dict.fromkeys(("SLURM_CONF", "SBATCH_PARTITION", "SQUEUE_FORMAT", "SALLOC_QOS"), "elsewhere")
    answer = hpctrain(command, cwd=ROOT / "tests", env={"COLOUR": "blue", **foreign})
    assert answer.stdout.splitlines() == [str(ROOT / "tests"), "blue", "head", "0"]


def test_a_directory_that_is_not_seen_inside_is_said(cluster, tmp_path):
    answer = hpctrain(["minicluster", "shell", "--name", cluster.name, "pwd"], cwd=tmp_path)
    assert answer.stdout.strip() == str(cluster.spec.shared_dir)
    assert f"{tmp_path} is not shared" in answer.stderr


def test_an_interactive_shell_names_the_cluster_and_survives_ctrl_c(cluster):
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "hpctrain.cli", "minicluster", "shell", "--name", cluster.name]
    shell = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=ROOT,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb", "HOME": "/nonexistent"},
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # becomes its controlling terminal
    )
    try:
        _talk(main, "", f"[{cluster.name}] ")
        _talk(main, "sleep 60\n", "sleep 60")
        time.sleep(0.3)
        _talk(main, "\x03", f"[{cluster.name}] ")
        _talk(main, "echo on $(hostname)\n", "on head")
        _talk(main, "exit 5\n", "")
        assert shell.wait(timeout=20) == 5
    finally:
        shell.kill()
        shell.wait(timeout=20)
        os.close(main)
        os.close(terminal)


def _talk(terminal: int, text: str, answer: str) -> None:
    os.write(terminal, text.encode())
    deadline_s, said = time.monotonic() + 20, ""
    while answer not in said:
        ready, _, _ = select.select([terminal], [], [], deadline_s - time.monotonic())
        assert ready, f"waited for {answer!r} after {text!r}, and saw {said!r}"
        said += os.read(terminal, 4096).decode()


def test_status_shows_everything(cluster, on):
    job = on("head", "sbatch --parsable -w n2 -J sleeper -o /dev/null --wrap 'exec sleep 60'", cwd="/")
    wait_until(lambda: on("head", f"squeue -h -t running -j {job}"), "the job to run")
    found = json.loads(hpctrain(["minicluster", "status", "--name", cluster.name, "--json"]).stdout)
    on("head", f"scancel {job}")
    assert found["up"]
    assert found["answers"]
    assert found["slurm_version"].startswith("slurm")
    assert (found["shared"], found["ssd"]) == (str(cluster.spec.shared_dir), "/mnt/ssd")
    assert [(host["name"], host["up"], host["link"]) for host in found["hosts"]] == [
        (name, True, "up") for name in cluster.spec.hosts
    ]
    assert ("sleeper", "RUNNING", "n2") in [
        (entry["name"], entry["state"], entry["nodes"]) for entry in found["jobs"]
    ]
    short = {"PATH": "/usr/bin:/bin"}  # tc(8) is in /sbin
    shown = hpctrain(["minicluster", "status", "--name", cluster.name], env=short).stdout
    assert all(word in shown for word in ("head", "n3", "10.77.0.4", str(cluster.spec.shared_dir)))


def test_what_is_not_there_is_said(cluster):
    with pytest.raises(UsageError, match=r"no node 'n4'; its nodes are n1, n2, n3"):
        cluster.node("n4")
    assert hpctrain(["minicluster", "status", "--name", "t-none"]).returncode == 78
    answer = hpctrain(["minicluster", "down", "--name", "../etc"])
    assert answer.returncode == 64
    assert "small letters" in answer.stderr
