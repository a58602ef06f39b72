"""The Debian and Ubuntu packages that a mini cluster is made of."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpctrain.errors import ConfigError, HangError

_BY_PROGRAM = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "slurmdbd": "slurmdbd",
    "munged": "munge",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "mkfs.ext4": "e2fsprogs",
}
# Slurm's PMIx plugin loads `libpmix.so` at run time; that name without a number comes with the -dev package only.
_PMIX_LIBRARY, _PMIX_PACKAGE = "libpmix.so", "libpmix-dev"
_LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")
_ADMIN_FOLDERS = "/usr/sbin:/sbin"
_INSTALL_TIMEOUT_S = 900.0
_LOCK_PATIENCE_S = 120  # another apt may be at work, such as a fresh machine's upgrade of itself
_HOLD_BACK = """\
#!/bin/sh
# Made by `hpctrain minicluster up --install` for as long as it installs: nothing is started. Remove it if it is left.
exit 101
"""

POLICY = Path("/usr/sbin/policy-rc.d")
"""Asked whether a package may start its services."""


def tool_path() -> str:
    """PATH with the folders of administrators' programs, which not everybody has in it."""
    return f"{os.environ.get('PATH') or os.defpath}:{_ADMIN_FOLDERS}"


def missing_packages() -> list[str]:
    """Packages that would have to be installed; empty: all is there."""
    path = tool_path()
    missing = {
        package for program, package in _BY_PROGRAM.items() if shutil.which(program, path=path) is None
    }
    if not any((Path(folder) / _PMIX_LIBRARY).exists() for folder in _LIBRARY_FOLDERS):
        missing.add(_PMIX_PACKAGE)
    return sorted(missing)


def install_command(packages: Sequence[str]) -> list[str]:
    """What installs them; without the recommended extras, which would bring servers nobody asked for."""
    return ["apt-get", "install", "-y", "--no-install-recommends", *packages]


def missing_message(packages: Sequence[str]) -> str:
    """Which packages are missing, and two ways to get them."""
    return (
        f"a mini cluster needs packages that are not installed: {', '.join(packages)}; run the same command with "
        f"--install, or as root: {' '.join(install_command(packages))}"
    )


def install(packages: Sequence[str]) -> None:
    """Install Debian or Ubuntu packages; their services are not started. Raises `ConfigError`."""
    if shutil.which("apt-get") is None:
        raise ConfigError(
            f"packages {', '.join(packages)} are missing, and there is no apt-get here: a mini cluster needs "
            "Debian or Ubuntu (a container of it will do)"
        )
    with services_held_back():
        command = [*install_command(packages), "-o", f"DPkg::Lock::Timeout={_LOCK_PATIENCE_S}"]
        if _apt(command).returncode == 0:
            return
        # The lists of what there is are missing, as in a fresh container, or so old that files are gone.
        _apt(["apt-get", "update", "-q"])
        answer = _apt(command)
    if answer.returncode != 0:
        said = (answer.stderr or answer.stdout).strip().splitlines()[-5:]
        raise ConfigError(f"{' '.join(command)} failed: {' '.join(said)}")


@contextlib.contextmanager
def services_held_back() -> Iterator[None]:
    """Let packages not start what they bring: the cluster starts its own, and port 3306 may be somebody's already.

    invoke-rc.d(8) and deb-systemd-invoke(1p) ask the program policy-rc.d, where there is one, and 101 means no. A
    machine's own policy stays as it is.
    """
    if POLICY.exists() and POLICY.read_text(errors="replace") != _HOLD_BACK:  # ours: left by a kill
        yield
        return
    POLICY.write_text(_HOLD_BACK)
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)


def _apt(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": tool_path(), "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    try:
        return subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INSTALL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise HangError(f"{' '.join(command)} did not end within {_INSTALL_TIMEOUT_S:g} s") from error
