"""The init process of a host: `python -m hpctrain.minicluster.host CLUSTER HOST`, as PID 1 of new namespaces.

It gives the host its own files and devices, starts its daemons, and reaps whatever is orphaned there. It never ends by
itself: a host goes down when this process is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from hpctrain.minicluster.spec import HEAD, SSD, ClusterSpec, load_spec

_DEADLINE_S = 60.0
_POLL_S = 0.05


def main(arguments: list[str]) -> None:
    """Bring up the host `arguments[1]` of cluster `arguments[0]`, and reap for ever."""
    spec, host = load_spec(arguments[0]), arguments[1]
    Path("/proc/sys/kernel/hostname").write_text(host)
    _make_files(spec, host)
    _await_network(spec, host)
    if host == HEAD:
        _start_head(spec)
    else:
        _start(["slurmd", "-D", "-N", host], spec, host)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(_POLL_S)


def _make_files(spec: ClusterSpec, host: str) -> None:
    """Mounts of this host alone; they end with its mount namespace."""
    directory = spec.host_dir(host)
    for name in ("tmp", "log", "spool"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    (directory / "tmp").chmod(0o1777)
    for path in map(Path, spec.shared):  # before /tmp is covered
        inside = directory / "tmp" / path.relative_to("/tmp")
        inside.mkdir(parents=True, exist_ok=True)
        _run("mount", "--rbind", path, inside)
    _run("mount", "--rbind", directory / "tmp", "/tmp")
    for path, options in (("/run", "mode=755"), ("/mnt", "mode=755"), ("/dev/shm", "mode=1777,size=50%")):
        _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", path)
    _run("mount", "--bind", spec.etc_dir, "/etc/slurm")
    _run("mount", "--bind", spec.etc_dir / "hosts", "/etc/hosts")
    munge = Path("/run/munge")
    munge.mkdir()
    _run("mount", "--bind", spec.munge_dir, munge)
    boot_id = directory / "boot_id"  # a reboot gets another one, as on a machine of its own
    boot_id.write_text(f"{uuid.uuid4()}\n")
    _run("mount", "--bind", boot_id, "/proc/sys/kernel/random/boot_id")
    if host != HEAD:
        _mount_ssd(spec, directory / "ssd.img")


def _mount_ssd(spec: ClusterSpec, image: Path) -> None:
    """A filesystem of limited size: it can be filled up, and outlives a reboot."""
    if not image.exists():
        with image.open("wb") as stream:
            stream.truncate(spec.ssd_mib << 20)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", image)
    SSD.mkdir()
    _run("mount", "-o", "loop", image, SSD)
    SSD.chmod(0o1777)


def _await_network(spec: ClusterSpec, host: str) -> None:
    """Up with the interface that `hpctrain.minicluster.network` pushes into this namespace; the head has the bridge."""
    _run("ip", "link", "set", "lo", "up")
    device = "br0" if host == HEAD else "eth0"
    if host == HEAD:
        _run("ip", "link", "add", device, "type", "bridge")
    _await(Path(f"/proc/sys/net/ipv4/conf/{device}").exists, f"network interface {device}")
    _run("ip", "address", "add", f"{spec.address(host)}/24", "dev", device)
    _run("ip", "link", "set", device, "up")


def _start_head(spec: ClusterSpec) -> None:
    directory = spec.host_dir(HEAD)
    munge = Path("/run/munge")
    for path in (munge, spec.etc_dir / "munge.key"):
        shutil.chown(path, "munge", "munge")
    as_munge = ["setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups"]
    files = ["--key-file", str(spec.etc_dir / "munge.key"), "--log-file", "/run/munge/munged.log"]
    files += ["--seed-file", "/run/munge/munged.seed", "--pid-file", "/run/munge/munged.pid"]
    # The key lies in a directory of root's, which munged calls insecure.
    _start([*as_munge, "munged", "--foreground", "--force", *files], spec, HEAD)
    (directory / "slurmctld").mkdir(exist_ok=True)
    socket = _start_database(spec)
    _start(["slurmdbd", "-D"], spec, HEAD, {"MYSQL_UNIX_PORT": str(socket)})
    _register(spec)
    start_controller(spec)


def start_controller(spec: ClusterSpec) -> None:
    """Start slurmctld on this host."""
    _start(["slurmctld", "-D"], spec, HEAD)


def _start_database(spec: ClusterSpec) -> Path:
    """MariaDB on a socket of its own; returns the socket."""
    directory = spec.host_dir(HEAD)
    data, socket = directory / "mysql", Path("/run/mariadb.socket")
    common = [f"--datadir={data}", "--user=root"]
    if not data.exists():
        log = (directory / "log" / "mariadb-install.log").open("ab")
        command = ["mariadb-install-db", "--no-defaults", "--skip-test-db", *common]
        subprocess.run(command, check=True, stdout=log, stderr=log)
    # Nothing here must survive a power cut, and nobody else is to wait for this disk.
    fast = ["--innodb-flush-log-at-trx-commit=0", "--skip-innodb-doublewrite", "--innodb-log-file-size=16M"]
    network = ["--skip-networking", f"--socket={socket}", "--pid-file=/run/mariadb.pid"]
    _start(["mariadbd", "--no-defaults", *common, *fast, *network], spec, HEAD)
    _await(socket.exists, "MariaDB's socket")  # slurmdbd would try again only after 5 s
    return socket


def _start(command: list[str], spec: ClusterSpec, host: str, variables: dict[str, str] | None = None) -> None:
    """Start a daemon in the foreground of a session of its own, its words in `log/NAME.out`."""
    name = next(word for word in command if word in _DAEMONS)
    with (spec.host_dir(host) / "log" / f"{name}.out").open("ab") as log:
        subprocess.Popen(
            command,
            env=os.environ | (variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


_DAEMONS = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd")


def _register(spec: ClusterSpec) -> None:
    """Tell slurmdbd of this cluster, as soon as it answers."""
    command = ["sacctmgr", "-i", "add", "cluster", spec.name]
    said = ""

    def done() -> bool:
        nonlocal said
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        said = answer.stdout + answer.stderr
        return answer.returncode == 0 or "already exists" in said

    _await(done, "slurmdbd", lambda: said)


def _await(done: Callable[[], bool], what: str, detail: Callable[[], str] = str) -> None:
    deadline_s = time.monotonic() + _DEADLINE_S
    while not done():
        if time.monotonic() > deadline_s:
            sys.exit(f"waited {_DEADLINE_S:g} s for {what}. {detail()}")
        time.sleep(_POLL_S)


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
