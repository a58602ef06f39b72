"""A person's shell on the head of a mini cluster, and single commands there."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hpctrain.minicluster.cluster import Cluster
from hpctrain.minicluster.configuration import SHELL_RC
from hpctrain.minicluster.namespaces import environment_inside
from hpctrain.minicluster.spec import HEAD


def become_shell(cluster: Cluster, arguments: Sequence[str], directory: Path) -> NoReturn:
    """Become `arguments` on the head, or an interactive shell where there are none; the exit code is theirs.

    The caller's environment goes along, without what belongs to another Slurm. Ctrl-C reaches the command only.
    """
    interactive = ["bash", "--rcfile", str(SHELL_RC)]
    # nsenter(1), which this process becomes, must outlive a Ctrl-C that the command handles. A shell that found the
    # signal ignored at its start could never handle it, so it gets it back.
    restored = ["env", "--default-signal=INT,QUIT", "--", *(arguments or interactive)]
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    command = cluster.command(restored, HEAD, directory)
    os.execvpe(command[0], command, environment_inside())


def directory_inside(cluster: Cluster, directory: Path) -> Path | None:
    """`directory`, where the head sees the same one under that path; else None."""
    inside = Path(f"/proc/{cluster.host(HEAD).init.pid}/root") / directory.relative_to("/")
    try:
        return directory if os.path.samestat(inside.stat(), directory.stat()) else None
    except OSError:
        return None
