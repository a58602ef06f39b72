"""Whether a supervisor is at work in a run directory, as seen by one who only looks.

The lock itself (`hpctrain.resilience.lease`) is not tried: a supervisor that starts in that moment would find it taken.
`owner.json` is there while a supervisor lives, and is written again with every heartbeat.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpctrain.resilience.attempts import read_json
from hpctrain.resilience.lease import HEARTBEAT_S, boot_id

_SILENT_S = 6 * HEARTBEAT_S
"""Half a minute: the clocks of two hosts, and what a shared filesystem says of a file's time, need not agree."""
_REUSE_S = 2.0
"""The time of a file and that of a process come from clocks of different grain."""


@dataclass(frozen=True)
class Owner:
    """A supervisor that is alive."""

    host: str
    pid: int
    boot_id: str


def read_owner(run_dir: Path, now_unix_s: float) -> Owner | None:
    """The live supervisor of a run, or None.

    On its own host the process decides, elsewhere the age of its heartbeat.
    """
    path = run_dir / "owner.json"
    raw = read_json(path)
    try:
        if raw is None:
            return None
        owner = Owner(str(raw["host"]), int(raw["pid"]), str(raw["boot_id"]))
        beaten_unix_s = path.stat().st_mtime
    except (KeyError, TypeError, ValueError, OSError):  # damaged, or released just now
        return None
    if owner.host == socket.gethostname() and owner.boot_id == boot_id():
        return owner if _is_alive(owner.pid, beaten_unix_s) else None
    return owner if now_unix_s - beaten_unix_s < _SILENT_S else None


def _is_alive(pid: int, beaten_unix_s: float) -> bool:
    """Whether `pid` is a living process that is older than its heartbeat: numbers are used again."""
    try:
        process = psutil.Process(pid)
        older = float(process.create_time()) < beaten_unix_s + _REUSE_S
        return older and str(process.status()) != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
