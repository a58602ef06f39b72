"""Run descriptions that ship with the package, their Tasks, and what fetches their data.

`emoji` (contrastive pictures and words) and `digits` (MNIST). Each has three files: `NAME.toml`, the run
description; `NAME.py`, the Task; `NAME_data.py`, what `hpctrain data NAME DIR` does. `demo` runs one of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hpctrain.errors import UsageError

RECIPES: Final = ("emoji", "digits")


def recipe_path(name: str) -> Path:
    """The run description of a recipe; raises `UsageError` naming the recipes there are."""
    if name not in RECIPES:
        raise UsageError(f"there is no recipe {name!r}; choose one of: {', '.join(RECIPES)}")
    return Path(__file__).with_name(f"{name}.toml")
