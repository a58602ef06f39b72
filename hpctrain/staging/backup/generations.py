"""Generations: the manifests that say which files a set had at a backup."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hpctrain.durable import fsync_path, replace_file
from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.resilience.faults import fault_point
from hpctrain.staging.backup.recipe import PAGE_CHUNKS, REST_BYTES, Recipe
from hpctrain.staging.backup.store import Store
from hpctrain.staging.backup.work import read_file, storage

_NAME: Final = re.compile(r"[^./@\x00-\x1f\x7f][^/@\x00-\x1f\x7f]*")
_MAX_NAME_BYTES: Final = 200
_FILE: Final = re.compile(r"(\d{6,})\.json")


@dataclass(frozen=True)
class Generation:
    """What a set was at one backup.

    `created_s`: seconds since 1970, UTC; `source`: where the set lay; `identity`: of the set; `manifest_digest`:
    SHA-256 of its dataset.json; `added_bytes`: what the backup added to the segments.
    """

    name: str
    number: int
    created_s: float
    source: str
    identity: str
    manifest_digest: str
    added_bytes: int
    files: tuple[Recipe, ...]

    @property
    def label(self) -> str:
        """NAME@NUMBER."""
        return f"{self.name}@{self.number}"

    @property
    def num_bytes(self) -> int:
        """Of all its files."""
        return sum(item.num_bytes for item in self.files)

    @property
    def created(self) -> str:
        """When, in UTC, for people."""
        return datetime.datetime.fromtimestamp(self.created_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def check_name(name: str) -> str:
    """The name of a set, or `UsageError`: it becomes that of a directory."""
    if not _NAME.fullmatch(name) or len(name.encode("utf-8", "replace")) > _MAX_NAME_BYTES:
        raise UsageError(
            f"{name!r} cannot name a set in a backup store: a name has at most {_MAX_NAME_BYTES} bytes, no '/', '@' or "
            "control character, and begins with no '.'; give one with --name"
        )
    return name


def manifest_path(store: Store, name: str, number: int) -> Path:
    """Where the manifest of a generation lies."""
    return store.sets / name / f"{number:06d}.json"


def numbers_of(store: Store, name: str) -> list[int]:
    """Numbers of the generations of a set, readable or not, ascending; raises `StorageError`."""
    folder = store.sets / name
    if not folder.is_dir():
        return []
    with storage(folder, "listing"):
        matches = [_FILE.fullmatch(entry.name) for entry in folder.iterdir()]
    return sorted(int(match[1]) for match in matches if match)


def set_names(store: Store) -> list[str]:
    """Names of the sets in a store; raises `StorageError`."""
    if not store.sets.is_dir():
        return []
    with storage(store.sets, "listing"):
        return sorted(entry.name for entry in store.sets.iterdir() if _NAME.fullmatch(entry.name))


def write_generation(store: Store, generation: Generation) -> int:
    """Publish a generation whose objects are durable; returns the bytes of its manifest. Raises `StorageError`."""
    entry = asdict(generation)
    for item in entry["files"]:
        item["pages"] = [name.hex() for name in item["pages"]]
        item["rest"] = [name.hex() for name in item["rest"]]
    content = json.dumps(entry | {"digest": _digest(entry)}, separators=(",", ":")).encode() + b"\n"
    path = manifest_path(store, generation.name, generation.number)
    with storage(path, "writing"):
        fault_point("backup.write")
        path.parent.mkdir(exist_ok=True)
        fsync_path(store.sets)
        fault_point("backup.write")
        replace_file(path, content)
    return len(content)


def _digest(entry: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest in canonical JSON, without the digest itself."""
    content = {key: value for key, value in entry.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_generation(store: Store, name: str, number: int) -> Generation:
    """One generation; raises `DataError` for a damaged manifest, `StorageError` when it cannot be read."""
    path = manifest_path(store, name, number)
    try:
        entry = json.loads(read_file(path))
        generation = _generation_from(entry)
        if entry["digest"] != _digest(entry) or (generation.name, generation.number) != (name, number):
            raise ValueError("its digest does not match, or it is another generation's")
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise DataError(
            f"{path}: the manifest of {name}@{number} is damaged: {error}; this generation is lost (remove the file), "
            "others are not touched"
        ) from error
    return generation


def _generation_from(entry: Any) -> Generation:
    return Generation(
        name=check_name(entry["name"]),
        number=int(entry["number"]),
        created_s=float(entry["created_s"]),
        source=str(entry["source"]),
        identity=str(entry["identity"]),
        manifest_digest=str(entry["manifest_digest"]),
        added_bytes=int(entry["added_bytes"]),
        files=tuple(_recipe_from(item) for item in entry["files"]),
    )


def _recipe_from(item: Any) -> Recipe:
    """A recipe; raises `ValueError` for a file that would lie elsewhere, or numbers that do not fit."""
    recipe = Recipe(
        name=str(item["name"]),
        num_bytes=int(item["num_bytes"]),
        num_chunks=int(item["num_chunks"]),
        rest_bytes=int(item["rest_bytes"]),
        pages=tuple(bytes.fromhex(name) for name in item["pages"]),
        rest=tuple(bytes.fromhex(name) for name in item["rest"]),
    )
    if recipe.name in ("", ".", "..") or "/" in recipe.name or "\0" in recipe.name:
        raise ValueError(f"a file named {recipe.name!r} would lie outside the set")
    counts = (-(-recipe.num_chunks // PAGE_CHUNKS), -(-recipe.rest_bytes // REST_BYTES))
    sizes = (recipe.num_bytes, recipe.num_chunks, recipe.rest_bytes)
    if min(sizes) < 0 or max(sizes) >= 2**63 or counts != (len(recipe.pages), len(recipe.rest)):
        raise ValueError(f"the recipe of {recipe.name!r} has numbers that do not fit")
    if any(len(name) != 32 for name in (*recipe.pages, *recipe.rest)):
        raise ValueError(f"the recipe of {recipe.name!r} has names that are none")
    return recipe


def list_generations(store: Store) -> tuple[list[Generation], list[str]]:
    """All generations by set and number, and in words what cannot be read."""
    found: list[Generation] = []
    problems: list[str] = []
    for name in set_names(store):
        for number in numbers_of(store, name):
            try:
                found.append(read_generation(store, name, number))
            except (DataError, StorageError) as error:
                problems.append(str(error))
    return found, problems


def find_generation(store: Store, which: str) -> Generation:
    """The generation named `NAME@NUMBER`, or the newest of `NAME`; raises `UsageError` naming those there are."""
    name, _, number = which.partition("@")
    known = numbers_of(store, name) if name in set_names(store) else []
    if not known:
        raise UsageError(
            f"{store.path} holds no set {name!r}; it holds: {', '.join(set_names(store)) or 'none'}"
        )
    if not number:
        return read_generation(store, name, known[-1])
    if not number.isdecimal() or int(number) not in known:
        raise UsageError(
            f"{store.path} holds no generation {number!r} of {name!r}; it holds: {', '.join(map(str, known))}"
        )
    return read_generation(store, name, int(number))
