"""Whatever becomes of `up`, `down` leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError
from hpctrain.minicluster.cluster import Cluster, down, up
from hpctrain.minicluster.lock import locked
from hpctrain.minicluster.namespaces import held_hosts, running_clusters, running_hosts
from hpctrain.minicluster.spec import ClusterSpec, cluster_names
from tests.minicluster.machine import namespaces_of, processes_in, traces, wait_until
from tests.slurm_support import require_minicluster
from tests.support import ROOT, hpctrain

pytestmark = pytest.mark.slurm


@pytest.fixture
def name() -> Iterator[str]:
    require_minicluster()
    name = f"t-life-{os.getpid()}"
    yield name
    down(name)


def _begun(name: str) -> subprocess.Popen[bytes]:
    """`up` as a process of its own."""
    command = [sys.executable, "-m", "hpctrain.cli", "minicluster", "up", "--name", name, "--nodes", "2"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _nothing_is_left(name: str, namespaces: set[str]) -> None:
    wait_until(lambda: not traces(name), f"no trace of {name}; there is {traces(name)}", 10)
    assert not processes_in(namespaces)
    assert name not in cluster_names()
    assert name not in running_clusters()


def test_down_leaves_nothing(name):
    before = set(os.listdir("/run")), set(os.listdir("/mnt")), Path("/proc/self/mountinfo").read_text()
    answer = hpctrain(["minicluster", "up", "--name", name, "--nodes", "2"], cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    assert f"hpctrain minicluster shell --name {name}" in answer.stdout
    cluster = Cluster(name)
    assert cluster.node_states() == {"n1": "idle", "n2": "idle"}
    namespaces = namespaces_of([host.init.pid for host in cluster.hosts().values()])
    assert len(processes_in(namespaces)) >= 9
    assert len([line for line in traces(name) if "loop" in line]) == 2
    outside = os.lstat(cluster.spec.state_dir)
    assert (outside.st_uid, outside.st_mode & 0o777) == (0, 0o755)
    # What a person has running in there goes, too.
    busy = subprocess.Popen(cluster.command(["sh", "-c", "cd /mnt/ssd && sleep 1000"], host="n1"))
    answer = hpctrain(["minicluster", "down", "--name", name])
    assert answer.stdout == f"{name}: ended\n", answer.stderr
    assert busy.wait(timeout=10) != 0
    _nothing_is_left(name, namespaces)
    assert (
        set(os.listdir("/run")),
        set(os.listdir("/mnt")),
        Path("/proc/self/mountinfo").read_text(),
    ) == before
    assert hpctrain(["minicluster", "down", "--name", name]).stdout == f"{name}: nothing there\n"


def _first_file(name: str) -> bool:
    return ClusterSpec(name).state_dir.exists()


def _first_host(name: str) -> bool:
    return bool(held_hosts(name))


def _all_hosts(name: str) -> bool:
    return set(running_hosts(name)) == {"head", "n1", "n2"}


def _registering(name: str) -> bool:
    return _all_hosts(name) and bool(running_hosts(name)["head"].daemons("slurmctld"))


@pytest.mark.parametrize(
    ("moment", "damaged"),
    [(_first_file, False), (_first_host, True), (_all_hosts, False), (_registering, True)],
)
def test_down_mends_an_up_that_was_killed(name, moment: Callable[[str], bool], damaged):
    begun = _begun(name)
    try:
        wait_until(lambda: moment(name), moment.__name__, 30)
    finally:
        begun.kill()
        begun.communicate(timeout=20)
    namespaces = namespaces_of([host.init.pid for host in running_hosts(name).values()])
    if damaged:
        (ClusterSpec(name).state_dir / "spec.json").write_text('{"name": ')
    assert down(name)
    _nothing_is_left(name, namespaces)


def test_ctrl_c_leaves_nothing(name):
    begun = _begun(name)
    try:
        wait_until(lambda: _registering(name), "the controller", 30)
        begun.send_signal(signal.SIGINT)
        said = begun.communicate(timeout=20)[1].decode()
    finally:
        begun.kill()
    assert begun.returncode != 0
    assert "Traceback" not in said
    _nothing_is_left(name, set())


def test_files_of_a_machine_that_was_switched_off_are_removed(name):
    """State without processes: `status` says so, `up` starts anew."""
    spec = ClusterSpec(name, 1)
    spec.shared_dir.mkdir(parents=True)
    (spec.shared_dir / "old").touch()
    spec.save()
    answer = hpctrain(["minicluster", "status", "--name", name])
    assert answer.returncode == 0, answer.stderr
    assert f"down; `hpctrain minicluster down --name {name}` removes" in answer.stdout
    up(spec)
    assert not (spec.shared_dir / "old").exists()


def test_a_machine_without_loop_devices_says_so(name):
    """In a mount namespace where there are none, as in a container without privileges."""
    hide = "for device in /dev/loop*; do mount --bind /dev/null $device; done"
    command = f"{hide} && exec {sys.executable} -m hpctrain.cli minicluster up --name {name} --nodes 1"
    answer = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 78, answer.stdout + answer.stderr
    assert "n1 says: mount -o loop" in answer.stderr
    assert "docker run --privileged" in answer.stderr
    assert not held_hosts(name)


def test_one_at_a_time(name, monkeypatch):
    monkeypatch.setattr("hpctrain.minicluster.lock._PATIENCE_S", 0.2)
    with locked(name), locked(f"{name}-x"), pytest.raises(ConfigError, match="at work"):
        down(name)
    assert not down(name)


def test_what_is_mounted_is_not_removed(name, tmp_path):
    """Below a host's /tmp lie mounts of people's directories; only the host should ever see them."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "work").touch()
    (tmp_path / "state" / "a mount").mkdir(parents=True)
    code = (
        "import sys, pathlib; from hpctrain.minicluster.files import remove_tree; "
        "remove_tree(pathlib.Path(sys.argv[1]))"
    )
    script = 'mount --bind "$1/precious" "$1/state/a mount" && exec "$2" -c "$3" "$1/state"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable, code]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "something is mounted there" in answer.stderr
    assert (tmp_path / "precious" / "work").exists()
