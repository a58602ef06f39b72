"""Packages that only some sources need, and that are not installed with the rest."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from hpctrain.errors import UsageError


def needed(module: str, path: Path) -> ModuleType:
    """The module that reads what lies at `path`; raises `UsageError`, naming its package, where it is missing."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise UsageError(
            f"{path}: is read with the package {package!r}, which is not installed; "
            f"install it: pip install -c constraints.txt {package}"
        ) from error
