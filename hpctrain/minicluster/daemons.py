"""How a host's daemons are started: in the foreground, in a session of their own, with nothing of the caller's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hpctrain.minicluster.spec import ClusterSpec

CONTROLLER = ["slurmctld", "-D"]
"""The command of Slurm's controller."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def daemon_environment() -> dict[str, str]:
    """All that daemons are to know. A caller's SLURM_CONF, PYTHONPATH or LD_LIBRARY_PATH would mislead them."""
    return {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8"}


def init_environment() -> dict[str, str]:
    """The same for a host's init, which is hpctrain's own Python and may need the caller's libraries."""
    wanted = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
    python = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # root leaves no files
    return daemon_environment() | wanted | python


def log_file(spec: ClusterSpec, host: str, name: str) -> Path:
    """Where a daemon's own words go (Slurm's daemons write another log beside it)."""
    return spec.host_dir(host) / "log" / f"{name}.out"


def start_daemon(
    command: list[str], spec: ClusterSpec, host: str, name: str, variables: dict[str, str] | None = None
) -> None:
    """Start `command` on this host, under the name `name`."""
    with log_file(spec, host, name).open("ab") as log:
        subprocess.Popen(
            command,
            env=daemon_environment() | (variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
