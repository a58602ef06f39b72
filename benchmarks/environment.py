"""What a measurement was made on: without it a figure means nothing a month later."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from hpctrain import __version__
from hpctrain.comm.builder.cgroups import cgroup_folders
from hpctrain.errors import ConfigError
from hpctrain.launch.mpi import find_mpi

ROOT: Final = Path(__file__).parents[1]
"""The checkout the benchmarks run from."""

CPU_FLAGS: Final = (
    "avx2", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16",
    "asimd", "fphp", "asimdhp", "bf16", "sve",
)  # fmt: skip
"""CPU flags that decide how fast reduced precision is; x86, then Arm."""

_PACKAGES: Final = (
    "torch",
    "horovod",
    "mpi4py",
    "numpy",
    "h5py",
    "hdf5plugin",
    "numcodecs",
    "isal",
    "xxhash",
)
_GIT_TIMEOUT_S: Final = 10.0


def describe(folder: Path, command: Sequence[str]) -> dict[str, Any]:
    """The machine, the software and the filesystem of `folder`, as JSON values; None where nothing is known."""
    commit, dirty = git_state(ROOT)
    return {
        "started_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "host": socket.gethostname(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu_model": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cpu_flags": cpu_flags(),
        "cores_online": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "cpu_quota_cores": cpu_quota(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_1min_before": round(os.getloadavg()[0], 2),
        "gpu": Path("/proc/driver/nvidia/version").exists(),
        "python": platform.python_version(),
        "hpctrain": __version__,
        "versions": {name: _version(name) for name in _PACKAGES},
        "mpi": _mpi(),
        "git_commit": commit,
        "git_dirty": dirty,
        "filesystem": filesystem(folder),
    }


def cpu_flags() -> list[str]:
    """Those of `CPU_FLAGS` that this CPU has."""
    found = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return [flag for flag in CPU_FLAGS if flag in found]


def cpu_quota(folders: Sequence[Path] | None = None) -> float | None:
    """Cores that the control groups (`folders`, cgroup v2) allow, the least of them; None: no limit, or not known."""
    cores = []
    for folder in cgroup_folders("cpu") if folders is None else folders:
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            cores += [] if quota == "max" else [int(quota) / int(period)]
    return min(cores, default=None)


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """(commit, whether files differ from it) of a checkout; (None, None) where there is none."""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit, bool(_git(root, "status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def filesystem(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> dict[str, Any]:
    """Type, mount point and free space of the filesystem that `folder` lies on."""
    kind, mount = None, None
    target = folder.resolve()
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    for line in lines:
        left, _, right = line.partition(" - ")
        point = Path(_unescaped(left.split()[4]))
        # A later mount lies over an earlier one at the same point.
        if target.is_relative_to(point) and (mount is None or len(point.parts) >= len(mount.parts)):
            kind, mount = right.split()[0], point
    return {
        "folder": str(target),
        "type": kind,
        "mount": None if mount is None else str(mount),
        "free_gib": round(shutil.disk_usage(target).free / 2**30, 1),
    }


def _unescaped(text: str) -> str:
    """The kernel writes blanks and such as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    return answer.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _mpi() -> str | None:
    try:
        return str(find_mpi())
    except ConfigError:
        return None


def _cpuinfo(key: str) -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next((line.partition(":")[2].strip() for line in info if line.startswith(key)), "")
    except OSError:
        return ""
