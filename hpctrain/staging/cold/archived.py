"""`archived.json`, beside an archived set: what it was, so that it can be had again as it was.

A set is known by the digests of its stored chunks, and a run goes on only with the set it began with. Recompressing
makes another set of the same values. So the manifest of the original is kept here, with the versions of the libraries
that encode: the same versions give the same bytes again.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.codecs import CODECS
from hpctrain.h5.layout import plan_layout
from hpctrain.h5.manifest import MANIFEST, manifest_digest, read_manifest
from hpctrain.h5.options import PackOptions
from hpctrain.h5.sources import Source
from hpctrain.staging.cold.copying import FileKeys, bytes_of, keys_of

SIDECAR: Final = "archived.json"
FORMAT: Final = "hpctrain-archived"
VERSION: Final = 1
_ENCODERS: Final = ("hpctrain", "h5py", "imagecodecs", "isal", "numcodecs")


@dataclass(frozen=True)
class Archived:
    """The sidecar.

    Attributes:
        source: where the set was.
        manifest: of the original set.
        codec: that the archived copy was packed with; None: it is the original, byte for byte.
        content_digest: over the values (`staging.cold.content`), with blocks of the manifest's `chunk_samples`; None
            where the copy is the original.
        versions: of the libraries that packed the copy. They say nothing of those that packed the original.
    """

    source: str
    manifest: dict[str, Any]
    codec: str | None
    content_digest: str | None
    versions: dict[str, str]

    def to_bytes(self) -> bytes:
        """The file's content."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return (json.dumps(content | {"digest": _digest(content)}, indent=1) + "\n").encode()


def read_sidecar(root: Path) -> Archived | None:
    """That of an archived set; None where there is none. Raises `DataError` where it is damaged, and `StorageError`."""
    path = root / SIDECAR
    try:
        content = json.loads(path.read_bytes())
        digest = content.pop("digest")
        if (content.pop("format"), content["version"]) != (FORMAT, VERSION):
            raise DataError(
                f"{path}: not of version {VERSION} of the format {FORMAT!r}; use a newer hpctrain, or remove the file: "
                "the set is then taken as it lies here"
            )
        if digest != _digest({"format": FORMAT, **content}):
            raise ValueError("its digest does not match")
        if content["manifest"]["manifest_digest"] != manifest_digest(content["manifest"]):
            raise ValueError("the digest of the manifest in it does not match")
        del content["version"]
        return Archived(**content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path}: damaged: {error}; copy it anew from a good copy, or remove it: the set is then taken as it is"
        ) from error


@dataclass(frozen=True)
class Found:
    """What lies where a move begins: the files of a set without the sidecar; `extras` are not the set's.

    `keys`: of all that lies there, by name, to tell later whether anything was changed.
    """

    root: Path
    manifest: dict[str, Any]
    sidecar: Archived | None
    paths: list[Path]
    extras: list[Path]
    keys: FileKeys
    num_bytes: int

    @classmethod
    def at(cls, root: Path) -> Found:
        """Raises `DataError` for what is no packed set, `UsageError` for files that cannot be moved, `StorageError`."""
        manifest, sidecar = read_manifest(root), read_sidecar(root)
        keys = keys_of(root)
        paths = [root / name for name in keys if name != SIDECAR]
        known = {MANIFEST, *(str(entry["file"]) for entry in manifest["shards"])}
        extras = [path for path in paths if path.name not in known]
        return cls(root, manifest, sidecar, paths, extras, keys, bytes_of(paths))

    @property
    def original(self) -> dict[str, Any]:
        """The manifest of the set as it was before it was archived."""
        return self.manifest if self.sidecar is None else self.sidecar.manifest

    @property
    def codec_before(self) -> str | None:
        """The codec it had then; None where this is still the original, byte for byte."""
        return None if self.sidecar is None or self.sidecar.codec is None else codec_of(self.original)


def encoder_versions() -> dict[str, str]:
    """Versions of what decides the bytes that are packed."""
    found: dict[str, str] = {}
    for name in _ENCODERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout that was never installed
            continue
    return found


def codec_of(manifest: dict[str, Any]) -> str:
    """The codec of a set; that of the first field, `pack` gives all the same."""
    return next((str(entry["codec"]) for entry in manifest["fields"].values()), "none")


def options_like(source: Source, manifest: Mapping[str, Any], codec: str) -> PackOptions:
    """How to pack a source into the chunks and shards of a set."""
    chunk_samples = int(manifest["chunk_samples"])
    first = int(manifest["shards"][0]["num_samples"])
    plan = plan_layout(
        source, PackOptions(codec=codec if codec in CODECS else "none", chunk_samples=chunk_samples)
    )
    # The middle between two numbers of chunks per shard, so that rounding does not matter.
    chunks = -(-first // chunk_samples) + 0.5
    chunk_bytes = max(1.0, plan.raw_bytes / plan.num_samples * chunk_samples)
    return PackOptions(codec=codec, chunk_samples=chunk_samples, shard_mib=chunks * chunk_bytes / (1 << 20))


def _digest(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
