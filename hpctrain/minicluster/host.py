"""The init process of a host: `python -m hpctrain.minicluster.host CLUSTER HOST`, as PID 1 of new namespaces.

It gives the host its own files and devices, starts its daemons, and reaps whatever is orphaned there. It never ends by
itself: a host goes down when this process is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from hpctrain.minicluster.daemons import CONTROLLER, daemon_environment, log_file, start_daemon
from hpctrain.minicluster.files import make_directory, remove_tree
from hpctrain.minicluster.spec import COVERED, HEAD, SSD, ClusterSpec, covering, load_spec

_DEADLINE_S = 60.0
_POLL_S = 0.05
_NEIGHBOUR = {
    "mcast_solicit": 2,
    "ucast_solicit": 2,
    "retrans_time_ms": 250,
    "base_reachable_time_ms": 1000,
    "delay_first_probe_time": 1,
}
_NO_LOOP = (
    "; the SSD of a node is a file on a loop device, which this machine does not offer: a container needs /dev/loop* "
    "(docker run --privileged), a kernel the module loop"
)


def main(arguments: list[str]) -> None:
    """Bring up the host `arguments[1]` of cluster `arguments[0]`, and reap for ever."""
    spec, host = load_spec(arguments[0]), arguments[1]
    _forget_caller()
    Path("/proc/sys/kernel/hostname").write_text(host)
    _make_files(spec, host)
    _await_network(spec, host)
    if host == HEAD:
        _start_head(spec)
    else:
        start_daemon(["slurmd", "-D", "-N", host], spec, host, "slurmd")
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(_POLL_S)


def _forget_caller() -> None:
    """Signals that the caller ignored (nohup, a job in the background) are not to be ignored by every job here."""
    for number in (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.umask(0o022)


def _make_files(spec: ClusterSpec, host: str) -> None:
    """Mounts of this host alone; they end with its mount namespace."""
    directory = spec.host_dir(host)
    for name in ("log", "spool"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    _cover(spec, directory)
    for path, options in (("/run", "mode=755"), ("/dev/shm", "mode=1777,size=50%")):
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


def _cover(spec: ClusterSpec, directory: Path) -> None:
    """Directories of its own over /tmp and /mnt, new at every boot; what is shared shows through."""
    own = {cover: directory / cover.name for cover in COVERED}
    for cover, path in own.items():
        remove_tree(path)
        make_directory(path, 0o1777 if cover == Path("/tmp") else 0o755)
    for path in map(Path, spec.shared):  # before it is covered
        cover = covering(path)
        inside = own[cover] / path.relative_to(cover)
        inside.mkdir(parents=True, exist_ok=True)
        _run("mount", "--rbind", path, inside)
    for cover, path in own.items():
        _run("mount", "--rbind", path, cover)


def _mount_ssd(spec: ClusterSpec, image: Path) -> None:
    """A filesystem of limited size: it can be filled up, and outlives a reboot."""
    if not image.exists():
        unfinished = image.with_suffix(".new")
        with unfinished.open("wb") as stream:
            stream.truncate(spec.ssd_mib << 20)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", unfinished)
        unfinished.rename(image)
    SSD.mkdir()
    _run("mount", "-o", "loop", image, SSD, hint=_NO_LOOP)
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
    if host == HEAD:
        _know_dead_nodes_soon(Path(f"/proc/sys/net/ipv4/neigh/{device}"))


def _know_dead_nodes_soon(settings: Path) -> None:
    """Let connections to a node without power or link fail after half a second (arp(7)).

    slurmctld tries again ten times where a connection times out, and then SlurmdTimeout means little.
    """
    for name, value in _NEIGHBOUR.items():
        (settings / name).write_text(str(value))


def _start_head(spec: ClusterSpec) -> None:
    directory = spec.host_dir(HEAD)
    munge = Path("/run/munge")
    for path in (munge, spec.etc_dir / "munge.key"):
        shutil.chown(path, "munge", "munge")
    as_munge = ["setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups"]
    files = ["--key-file", str(spec.etc_dir / "munge.key"), "--log-file", "/run/munge/munged.log"]
    files += ["--seed-file", "/run/munge/munged.seed", "--pid-file", "/run/munge/munged.pid"]
    # The key lies in a directory of root's, which munged calls insecure.
    start_daemon([*as_munge, "munged", "--foreground", "--force", *files], spec, HEAD, "munged")
    (directory / "slurmctld").mkdir(exist_ok=True)
    socket = _start_database(spec)
    start_daemon(["slurmdbd", "-D"], spec, HEAD, "slurmdbd", {"MYSQL_UNIX_PORT": str(socket)})
    _register(spec)
    start_daemon(CONTROLLER, spec, HEAD, CONTROLLER[0])


def _start_database(spec: ClusterSpec) -> Path:
    """MariaDB on a socket of its own; returns the socket."""
    directory = spec.host_dir(HEAD)
    data, socket = directory / "mysql", Path("/run/mariadb.socket")
    common = [f"--datadir={data}", "--user=root"]
    if not data.exists():
        _run("mariadb-install-db", "--no-defaults", "--skip-test-db", *common)
    # Nothing here must survive a power cut, and nobody else is to wait for this disk.
    fast = ["--innodb-flush-log-at-trx-commit=0", "--skip-innodb-doublewrite", "--innodb-log-file-size=16M"]
    network = ["--skip-networking", f"--socket={socket}", "--pid-file=/run/mariadb.pid"]
    start_daemon(["mariadbd", "--no-defaults", *common, *fast, *network], spec, HEAD, "mariadbd")
    _await(socket.exists, "MariaDB's socket")  # slurmdbd would try again only after 5 s
    return socket


def _register(spec: ClusterSpec) -> None:
    """Tell slurmdbd of this cluster, as soon as it answers."""
    command = ["sacctmgr", "-i", "add", "cluster", spec.name]
    said = ""

    def done() -> bool:
        nonlocal said
        answer = subprocess.run(
            command, capture_output=True, text=True, env=daemon_environment(), check=False
        )
        said = answer.stdout + answer.stderr
        return answer.returncode == 0 or "already exists" in said

    def detail() -> str:
        log = log_file(spec, HEAD, "slurmdbd")
        return " ".join(f"{said} slurmdbd says: {''.join(log.read_text().splitlines()[-1:])} ({log})".split())

    _await(done, "slurmdbd", detail)


def _await(done: Callable[[], bool], what: str, detail: Callable[[], str] = str) -> None:
    deadline_s = time.monotonic() + _DEADLINE_S
    while not done():
        if time.monotonic() > deadline_s:
            sys.exit(f"waited {_DEADLINE_S:g} s for {what}. {detail()}")
        time.sleep(_POLL_S)


def _run(*command: str | Path, hint: str = "") -> None:
    """Run a command; where it fails, the host ends with its words as the last line of the log."""
    words = [str(word) for word in command]
    answer = subprocess.run(words, capture_output=True, text=True, env=daemon_environment(), check=False)
    if answer.returncode != 0:
        said = " ".join((answer.stderr or answer.stdout).split())
        sys.exit(f"{' '.join(words)}: {said}{hint}")


if __name__ == "__main__":
    main(sys.argv[1:])
