"""The configured directories, as they are on this node."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from hpctrain.config import StagingPlace
from hpctrain.errors import ConfigError
from hpctrain.staging.node import Place

_GIB: Final = 1 << 30


def places_here(configured: Iterable[StagingPlace]) -> list[Place]:
    """`staging.dirs` with environment variables and `~` expanded on this node.

    Raises `ConfigError` for a variable that is not set here: its name would become a folder somewhere else; and for a
    directory that is there twice.
    """
    places: dict[Path, Place] = {}
    for place in configured:
        directory = staging_directory(place.path)
        if directory.resolve() in places:
            raise ConfigError(
                f"staging.dirs: {place.path} is {directory} on this node, which is there already"
            )
        quota_bytes = None if place.quota_gib is None else int(place.quota_gib * _GIB)
        places[directory.resolve()] = Place(directory, quota_bytes)
    return list(places.values())


def staging_directory(configured: Path) -> Path:
    """One of them. Raises `ConfigError`."""
    expanded = Path(os.path.expandvars(configured)).expanduser()
    if "$" in str(expanded) or not expanded.is_absolute():
        raise ConfigError(
            f"staging.dirs: {configured} is {expanded} on this node; a variable is not set, or the path is not absolute"
        )
    return expanded
