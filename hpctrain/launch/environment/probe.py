"""What an environment says about itself. Run by its own interpreter, by path: it imports nothing but the library.

Which directory an editable package comes from is known to the import system alone (each build tool has its own
finder), so the interpreter that has them installed is asked.
"""

from __future__ import annotations

import json
import platform
import sys
import sysconfig
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """The running interpreter, its base, its package directories and its editable packages, as JSON takes it."""
    sites = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    return {
        "python_version": platform.python_version(),
        "soabi": str(sysconfig.get_config_var("SOABI")),
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "base_executable": getattr(sys, "_base_executable", sys.executable),
        "sites": sites,
        "has_hpctrain": find_spec("hpctrain") is not None,
        "editable": [_editable(found) for found in distributions(path=sites) if _is_editable(found)],
    }


def _is_editable(distribution: Distribution) -> bool:
    """Whether pip or another installer noted it as such (PEP 610)."""
    url = json.loads(distribution.read_text("direct_url.json") or "{}")
    return bool(url.get("dir_info", {}).get("editable"))


def _editable(distribution: Distribution) -> dict[str, Any]:
    """Its name, the .pth files that lead to it, and where each of its top-level names is."""
    files = [str(distribution.locate_file(file)) for file in distribution.files or []]
    names = (distribution.read_text("top_level.txt") or "").split()
    return {
        "name": distribution.metadata["Name"],
        "pth_files": [file for file in files if file.endswith(".pth")],
        "modules": {name: _locations(find_spec(name)) for name in names},
    }


def _locations(spec: ModuleSpec | None) -> list[str]:
    """Directories of a package, or the file of a module."""
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:  # a namespace may list placeholders of a finder
        return [path for path in spec.submodule_search_locations if Path(path).is_dir()]
    return [spec.origin] if spec.origin and Path(spec.origin).is_file() else []


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe()))
