"""Whether this machine can hold a real Slurm cluster."""

from __future__ import annotations

import os
import shutil

import pytest

from hpctrain.minicluster.packages import install, missing_packages

_HOW = "run `make test-slurm` as root on Debian or Ubuntu (a privileged container will do)"


def require_minicluster() -> None:
    """Skip where no mini cluster can be; in CI (variable CI) that is a failure. Installs what is missing."""
    if os.geteuid() != 0:
        _cannot("a mini cluster needs root")
    if missing := missing_packages():
        if shutil.which("apt-get") is None:
            _cannot(f"packages {', '.join(missing)} are missing, and there is no apt-get")
        install(missing)


def _cannot(why: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"{why}; in CI a skip is a failure: {_HOW}")
    pytest.skip(f"{why}: {_HOW}")
