"""Where the control groups of this process state their limits: Slurm and systemd put them far below the root."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def cgroup_folders(controller: str, root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> list[Path]:
    """Folders of this process' control group and of all above it: the tightest of their limits is the one that holds.

    Of cgroup v2, and of version 1 where it has the `controller` ("memory", "cpu"); not all folders need exist (in a
    container the path is the host's, and only the root is there). The format of `own`: man 7 cgroups, /proc/PID/cgroup.
    """
    folders = [root, root / controller]
    try:
        lines = own.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return folders
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            place = PurePosixPath(path.lstrip("/"))
            # A group outside this container's view begins with "..": what lies there cannot be seen.
            if ".." not in place.parts:
                top = root if number == "0" else root / controller
                folders += [top / part for part in (place, *place.parents) if part.parts]
    return folders
