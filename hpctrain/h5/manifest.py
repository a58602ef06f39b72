"""`dataset.json`, the manifest of a packed set: what it must say, and nothing else is believed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.codecs import CODECS
from hpctrain.h5.fields import Field
from hpctrain.h5.index import REPACK
from hpctrain.h5.rounding import MANTISSA_BITS, mantissa_bits

MANIFEST: Final = "dataset.json"
FORMAT: Final = "hpctrain-packed"
VERSION: Final = 1


def read_manifest(root: Path) -> dict[str, Any]:
    """The manifest of a packed set, with its own digest checked; errors as for `open_packed`."""
    path = root / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(
            f"{path}: there is no such file, so {root} is not a packed set; make one with `hpctrain pack SRC {root}`"
        ) from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}; {REPACK}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path}: not the manifest of a packed set (format {FORMAT!r}); {REPACK}")
    if manifest.get("version") != VERSION:
        raise DataError(
            f"{path}: version {manifest.get('version')!r} of the format is unknown, "
            f"this hpctrain reads version {VERSION}; read it with a newer hpctrain, or pack the source again"
        )
    if manifest.get("manifest_digest") != manifest_digest(manifest):
        raise DataError(f"{path}: changed since it was packed (its digest does not match); {REPACK}")
    return manifest


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """xxh3_128 (hex) of the manifest in canonical JSON, without the entry that holds the digest."""
    content = {key: value for key, value in manifest.items() if key != "manifest_digest"}
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def field_from(name: str, entry: Mapping[str, Any]) -> Field:
    """A field from its entry; raises `KeyError`, `TypeError`, `ValueError` or `SyntaxError` for what is none."""
    dtype = np.dtype(entry["dtype"])
    native = dtype.newbyteorder("=")
    bits = [None, *range(1, 1 + mantissa_bits(native))] if native in MANTISSA_BITS else [None]
    return Field(
        name,
        _one_of(name, "kind", entry["kind"], ["dense", "ragged"]),
        dtype,
        tuple(int(extent) for extent in entry["shape"]),
        _one_of(name, "codec", entry["codec"], CODECS),
        _number_from(entry["mean"]),
        _number_from(entry["std"]),
        # Absent in sets packed before there was rounding, and before pictures were kept encoded.
        _one_of(name, "keep_bits", entry.get("keep_bits"), bits),
        _one_of(name, "encoding", entry.get("encoding"), [None, "image"]),
    )


def _one_of(name: str, key: str, value: Any, known: Sequence[Any]) -> Any:
    if value not in known:
        raise ValueError(f"field {name!r}: {key} {value!r}")
    return known[known.index(value)]  # 9.0 equals 9, but is no number of bits


def _number_from(value: Any) -> tuple[float, ...] | float | None:
    """A number, one per channel, or none; raises `ValueError` for one that is not finite."""
    if value is None:
        return None
    if not np.isfinite(np.asarray(value, np.float64)).all():
        raise ValueError(f"a mean or standard deviation of {value}")
    return tuple(map(float, value)) if isinstance(value, list) else float(value)


def classes_from(value: Any) -> tuple[str, ...] | None:
    """The names of the classes; raises `ValueError` for anything else."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"classes {value!r}")
    return tuple(value)
