"""Names of checkpoints: `step-000000120-a0002` is the state after 120 steps, written by attempt 2.

Apart from the store, because login nodes read names too and must not load torch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{9,})-a(\d{4,})")


class CheckpointName(NamedTuple):
    """What the name of a checkpoint says; sorts by step, then by attempt."""

    step: int
    attempt: int

    def __str__(self) -> str:
        """The name of the directory."""
        return f"step-{self.step:09d}-a{self.attempt:04d}"

    @classmethod
    def parse(cls, name: str) -> CheckpointName | None:
        """The parts of a name; None for anything that is no checkpoint's name."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match else None


def committed_checkpoints(directory: Path) -> list[CheckpointName]:
    """The checkpoints in `directory` that were renamed into place with a manifest, the newest first."""
    try:
        paths = list(directory.iterdir())
    except FileNotFoundError:
        return []
    found = [
        name for path in paths if (path / MANIFEST).exists() and (name := CheckpointName.parse(path.name))
    ]
    return sorted(found, reverse=True)


def newest_step(names: list[str]) -> int:
    """The highest step among names of checkpoints; 0 where there are none."""
    return max((parsed.step for name in names if (parsed := CheckpointName.parse(name))), default=0)
