"""What hosts must see of the outside, because /tmp and /mnt are their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from hpctrain.errors import UsageError
from hpctrain.minicluster.spec import COVERED


def needed_shares(asked: Iterable[Path] = ()) -> list[str]:
    """Directories to share so that a run works: Python, hpctrain, the current one, and those `asked` for.

    Only those below what the hosts have of their own; all others are seen anyway.

    Raises:
        UsageError: one of those `asked` for is not a directory, or is one that hosts have of their own.
    """
    asked = list(asked)
    for path in asked:
        if not path.is_dir():
            raise UsageError(f"--share {path}: there is no such directory")
        if path.resolve() in COVERED:
            raise UsageError(f"--share {path}: every host has its own; name a directory below it")
    package = Path(__file__).parents[2]
    found: set[Path] = set()
    for path in (Path(sys.prefix), Path(sys.base_prefix), package, Path.cwd(), *asked):
        # Scripts name their interpreter by the path that the environment was made under, which may be a link.
        found |= {Path(os.path.abspath(path)), path.resolve()}
    covered = {path for path in found if any(cover in path.parents for cover in COVERED)}
    return sorted(str(path) for path in covered if covered.isdisjoint(path.parents))
