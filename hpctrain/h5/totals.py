"""What a pack has written so far, and the manifest that comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.h5.choose_codec import Choice
from hpctrain.h5.encoding import EncodedChunk
from hpctrain.h5.fields import Field
from hpctrain.h5.layout import Layout
from hpctrain.h5.manifest import FORMAT, VERSION, manifest_digest
from hpctrain.h5.packed import identity_of
from hpctrain.h5.stats import Moments, channels_of
from hpctrain.h5.writer import DatasetWriter

Dataset = tuple[str, tuple[int, ...], np.dtype[Any], npt.NDArray[np.uint64]]
"""Name, shape, type, and the digests of the chunks."""


@dataclass
class ShardTotals:
    """Sums over the chunks of one shard.

    `encoded_bytes` counts the values of ragged fields raw: they are encoded later.
    """

    number: int
    samples: int = 0
    raw_bytes: int = 0
    encoded_bytes: int = 0
    stored_bytes: int = 0
    entry: dict[str, Any] = field(default_factory=dict)
    datasets: list[Dataset] = field(default_factory=list)
    moments: dict[str, Moments] = field(default_factory=dict)

    def add(self, chunk: EncodedChunk) -> None:
        """Count a chunk that was written."""
        self.samples += chunk.rows
        self.raw_bytes += chunk.raw_bytes
        self.encoded_bytes += sum(len(stored) for stored in chunk.dense.values())
        self.encoded_bytes += sum(rows.values.nbytes for rows in chunk.ragged.values())
        _merge(self.moments, chunk.moments)

    def finish(self, name: str, file_bytes: int, datasets: Sequence[DatasetWriter]) -> None:
        """The shard is written."""
        self.entry = {"file": name, "num_samples": self.samples, "bytes": file_bytes}
        self.stored_bytes = sum(item.stored_bytes for item in datasets)
        self.datasets = [
            (item.name, item.shape, item.dtype, np.array(item.digests, np.uint64)) for item in datasets
        ]


class Totals:
    """Sums over all shards, in their order: sums of floats depend on it, and who wrote which shard must not matter."""

    def __init__(self, shards: Iterable[ShardTotals]) -> None:
        ordered = sorted(shards, key=lambda item: item.number)
        self.raw_bytes = sum(item.raw_bytes for item in ordered)
        self.stored_bytes = sum(item.stored_bytes for item in ordered)
        self.shards = [item.entry for item in ordered]
        self.datasets = [dataset for item in ordered for dataset in item.datasets]
        self.moments: dict[str, Moments] = {}
        for item in ordered:
            _merge(self.moments, item.moments)

    def not_finite(self) -> list[str]:
        """Fields with values that are not finite."""
        return [name for name, moments in self.moments.items() if not np.isfinite(moments.squares).all()]

    def manifest(
        self, layout: Layout, classes: tuple[str, ...] | None, choice: Choice | None
    ) -> dict[str, Any]:
        """The manifest of the finished set, with its own digest."""
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "num_samples": layout.num_samples,
            "chunk_samples": layout.chunk_samples,
            "shards": self.shards,
            "fields": {name: self._field_entry(item) for name, item in layout.fields.items()},
            "classes": None if classes is None else list(classes),
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "identity": identity_of(self.datasets),
        }
        if choice is not None:
            manifest["codec_choice"] = choice.as_json()
        return manifest | {"manifest_digest": manifest_digest(manifest)}

    def _field_entry(self, item: Field) -> dict[str, Any]:
        moments = self.moments.get(item.name)
        return {
            "kind": item.kind,
            "dtype": item.dtype.str,
            "shape": list(item.sample_shape),
            "codec": item.codec,
            "mean": None if moments is None else _number(moments.mean, item),
            "std": None if moments is None else _number(moments.std, item),
            "keep_bits": item.keep_bits,
            "encoding": item.encoding,
        }


def _merge(into: dict[str, Moments], moments: Mapping[str, Moments]) -> None:
    for name, item in moments.items():
        into[name] = into[name].merged(item) if name in into else item


def _number(value: npt.NDArray[np.float64], item: Field) -> list[float] | float | None:
    if not np.isfinite(value).all():
        return None
    return [float(x) for x in value] if channels_of(item.sample_shape) else float(value[0])
