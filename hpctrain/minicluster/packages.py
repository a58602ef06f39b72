"""The Debian and Ubuntu packages that a mini cluster is made of."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import ConfigError

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
    "mount": "mount",
    "mkfs.ext4": "e2fsprogs",
}
# Slurm's PMIx plugin loads `libpmix.so` at run time; that name without a number comes with the -dev package only.
_PMIX_LIBRARY, _PMIX_PACKAGE = "libpmix.so", "libpmix-dev"
_LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")
_INSTALL_TIMEOUT_S = 900.0


def missing_packages() -> list[str]:
    """Packages that would have to be installed; empty: all is there."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
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
    # RUNLEVEL=1: invoke-rc.d(8) starts no service in single-user mode. The cluster starts its own.
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (["apt-get", "update", "-q"], install_command(packages)):
        answer = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False
        )
        if answer.returncode != 0:
            said = (answer.stderr or answer.stdout).strip().splitlines()[-5:]
            raise ConfigError(f"{' '.join(command)} failed: {' '.join(said)}")
