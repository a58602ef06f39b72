"""A folder of prepared input: made whole or not at all, and recognised when it is asked for again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hpctrain.errors import StorageError, UsageError
from hpctrain.h5.publish import publishing
from hpctrain.recipes.fetch import Package

SOURCE_FILE: Final = "source.json"
ATTRIBUTION_FILE: Final = "ATTRIBUTION.txt"


@dataclass(frozen=True)
class Prepared:
    """What lies in the folder: samples to train on and to test on. `fresh`: made just now."""

    root: Path
    train_samples: int
    test_samples: int
    fresh: bool


def prepare(
    root: Path,
    recipe: str,
    version: int,
    packages: tuple[Package, ...],
    write: Callable[[Path], tuple[int, int]],
) -> Prepared:
    """Let `write` fill a temporary folder, then rename it to `root`.

    `write` returns the numbers of training and of test samples. Nothing is done where `root` holds the same
    recipe at the same version already. Raises `UsageError` where it holds anything else, `StorageError` where
    it cannot be written.
    """
    source: dict[str, Any] = {
        "recipe": recipe,
        "version": version,
        "packages": {item.file_name: item.sha256 for item in packages},
    }
    there = _read(root / SOURCE_FILE)
    if there is not None:
        counts = there.pop("samples", None)
        if there != source or not isinstance(counts, dict):
            raise UsageError(
                f"{root} holds other prepared data ({there.get('recipe')}, version {there.get('version')}), "
                f"not {recipe}, version {version}; choose another folder, or delete this one"
            )
        return Prepared(root, counts["train"], counts["test"], fresh=False)
    try:
        with publishing(root, marker=SOURCE_FILE) as partial:
            train_samples, test_samples = write(partial)
            source["samples"] = {"train": train_samples, "test": test_samples}
            (partial / SOURCE_FILE).write_text(json.dumps(source, indent=1) + "\n", encoding="ascii")
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"{root}: cannot be written: {error}; make room, or choose another folder"
        ) from error
    return Prepared(root, train_samples, test_samples, fresh=True)


def _read(path: Path) -> dict[str, Any] | None:
    """The source file's content; None where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}
