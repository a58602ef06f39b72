"""Shared memory of ranks that were started as job steps: in directories of their own, so that leftovers are known.

Open MPI puts its segments into /dev/shm, where those of a killed rank stay and hold memory until the node is rebooted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from pathlib import Path

SCRATCH_VARIABLE = "HPCTRAIN_SCRATCH"
"""Environment variable of ranks: the prefix of this run's directories in /dev/shm."""

_PARENT = Path("/dev/shm")
_VARIABLES = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")


def scratch_prefix(run_dir: Path) -> str:
    """What names of this run's directories begin with, on any node."""
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
    return f"hpctrain-{os.getuid()}-{digest}-"


def enter_scratch(attempt: int) -> None:
    """Make this attempt's directory on this node, remove those of others, and tell Open MPI; before MPI starts.

    Does nothing where the launcher has made other arrangements (`SCRATCH_VARIABLE` is not set).
    """
    prefix = os.environ.get(SCRATCH_VARIABLE)
    if not prefix or not os.access(_PARENT, os.W_OK):
        return
    own = _PARENT / f"{prefix}a{attempt:04d}"
    for path in _PARENT.glob(f"{prefix}*"):
        if path != own:
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(FileExistsError):  # the other ranks of this node make it too
        own.mkdir(mode=0o700)
    found = own.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
        os.environ.update(dict.fromkeys(_VARIABLES, str(own)))


def leave_scratch(attempt_directory: Path) -> None:
    """Remove the directory of an attempt on this host, whose ranks have ended; what is not there is no error."""
    run_dir = attempt_directory.parents[1]
    shutil.rmtree(_PARENT / f"{scratch_prefix(run_dir)}{attempt_directory.name}", ignore_errors=True)
