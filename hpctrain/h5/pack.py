"""Packing: source -> packed set. Samples are read and encoded in threads and written in order."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.layout import chunk_pipeline, plan_layout
from hpctrain.h5.options import PackOptions, PackReport
from hpctrain.h5.packed import FORMAT, MANIFEST, VERSION, Field, identity_of, manifest_digest
from hpctrain.h5.publish import publishing
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import ArraySource, Source, open_source
from hpctrain.h5.stats import Moments, channels_of
from hpctrain.h5.writer import ShardWriter, padded, writing

__all__ = ["PackOptions", "PackReport", "Progress", "pack", "pack_arrays", "pack_path"]

Progress = Callable[[int, int, int], None]
"""Called with samples done, samples in all, and raw bytes done."""


def pack(
    source: Source, root: Path, options: PackOptions | None = None, progress: Progress | None = None
) -> PackReport:
    """Pack all samples of a source into the directory `root`, which appears whole or not at all.

    The files depend on the source and the options alone, not on the number of threads. Raises `UsageError`
    for a target or options that cannot be used, `DataError` for bad samples, `StorageError` when writing
    fails (no space left).
    """
    return _Packing(source, Path(root), options or PackOptions(), progress).run()


def pack_arrays(
    arrays: Mapping[str, npt.NDArray[Any] | Ragged],
    root: Path,
    options: PackOptions | None = None,
    classes: tuple[str, ...] | None = None,
) -> PackReport:
    """Pack arrays of equal first dimension, and `Ragged` ones; errors as for `pack`."""
    return pack(ArraySource(arrays, classes), root, options)


def pack_path(
    src: Path,
    root: Path,
    options: PackOptions | None = None,
    size: int | None = None,
    gray: bool = False,
    progress: Progress | None = None,
) -> PackReport:
    """Pack what lies at `src` (see `sources.open_source`); errors as for it and for `pack`."""
    target, origin = root.resolve(), src.resolve()
    if target.is_relative_to(origin) or origin.is_relative_to(target):
        raise UsageError(f"{root} and {src} lie within each other; choose a DST apart from SRC")
    return pack(open_source(src, size, gray), root, options, progress)


@dataclass(frozen=True)
class _Encoded:
    """One sample chunk, ready to be written."""

    rows: int
    dense: dict[str, bytes]
    ragged: dict[str, Ragged]
    moments: dict[str, Moments]


@dataclass
class _Totals:
    """What has been written so far."""

    samples: int = 0
    encoded_bytes: int = 0
    stored_bytes: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)
    datasets: list[tuple[str, tuple[int, ...], np.dtype[Any], npt.NDArray[np.uint64]]] = field(
        default_factory=list
    )
    moments: dict[str, Moments] = field(default_factory=dict)


class _Packing:
    """One run of `pack`."""

    def __init__(self, source: Source, root: Path, options: PackOptions, progress: Progress | None) -> None:
        self.source, self.root, self.options = source, root, options
        self.progress = progress or (lambda done, total, raw_bytes: None)
        self.layout = plan_layout(source, options)
        self.pipelines = {
            name: chunk_pipeline(item, (self.layout.chunk_samples, *item.sample_shape))
            for name, item in self.layout.fields.items()
            if item.kind == "dense"
        }
        self.totals = _Totals()

    def run(self) -> PackReport:
        started_s = time.monotonic()
        threads = self.options.threads or len(os.sched_getaffinity(0))
        pool = ThreadPoolExecutor(threads, thread_name_prefix="pack")
        with publishing(self.root, MANIFEST, self.options.overwrite) as partial:
            try:
                self._write_shards(partial, pool, 2 * threads)
            finally:
                pool.shutdown(cancel_futures=True)
            manifest = self._manifest()
            with writing(partial, self._needed_bytes):
                (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        return self._report(manifest, time.monotonic() - started_s)

    def _write_shards(self, partial: Path, pool: ThreadPoolExecutor, ahead: int) -> None:
        layout = self.layout
        chunks = _in_order(pool, self._encode, range(0, layout.num_samples, layout.chunk_samples), ahead)
        for first in range(0, layout.num_samples, layout.shard_samples):
            path = partial / f"shard-{len(self.totals.shards):05d}.h5"
            self._write_shard(path, min(layout.shard_samples, layout.num_samples - first), chunks)

    def _write_shard(self, path: Path, rows: int, chunks: Iterator[_Encoded]) -> None:
        with writing(path.parent, self._needed_bytes):
            writer = ShardWriter(path, self.layout)
        try:
            while writer.num_samples < rows:
                chunk = next(chunks)
                with writing(path.parent, self._needed_bytes):
                    writer.append(chunk.rows, chunk.dense, chunk.ragged)
                self._count(chunk)
            with writing(path.parent, self._needed_bytes):
                datasets = writer.finish()
                stored_bytes = path.stat().st_size
        except BaseException:
            writer.abandon()
            raise
        self.totals.shards.append({"file": path.name, "num_samples": rows, "bytes": stored_bytes})
        self.totals.stored_bytes += sum(item.stored_bytes for item in datasets)
        self.totals.datasets += [
            (item.name, item.shape, item.dtype, np.array(item.digests, np.uint64)) for item in datasets
        ]

    def _count(self, chunk: _Encoded) -> None:
        self.totals.samples += chunk.rows
        self.totals.encoded_bytes += sum(len(stored) for stored in chunk.dense.values())
        self.totals.encoded_bytes += sum(rows.values.nbytes for rows in chunk.ragged.values())
        for name, moments in chunk.moments.items():
            before = self.totals.moments.get(name)
            self.totals.moments[name] = moments if before is None else before.merged(moments)
        done, total = self.totals.samples, self.layout.num_samples
        self.progress(done, total, self.layout.raw_bytes * done // total)

    def _encode(self, start: int) -> _Encoded:
        """Read and encode one sample chunk; runs in the pool."""
        stop = min(start + self.layout.chunk_samples, self.layout.num_samples)
        columns = self.source.read(start, stop)
        dense, ragged, moments = {}, {}, {}
        for name, item in self.layout.fields.items():
            values = columns[name]
            if isinstance(values, Ragged):
                ragged[name] = values
                continue
            values = _converted(values, item, start)
            moments[name] = Moments.of(values, channels_of(item.sample_shape))
            dense[name] = self.pipelines[name].encode(padded(values, self.layout.chunk_samples))
        return _Encoded(stop - start, dense, ragged, moments)

    def _needed_bytes(self) -> int:
        """Estimate of the stored size of the whole set, from what has been stored so far; raw before that."""
        done = self.totals.samples
        return self.totals.encoded_bytes * self.layout.num_samples // done if done else self.layout.raw_bytes

    def _manifest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "num_samples": self.layout.num_samples,
            "chunk_samples": self.layout.chunk_samples,
            "shards": self.totals.shards,
            "fields": {name: self._field_entry(item) for name, item in self.layout.fields.items()},
            "classes": None if self.source.classes is None else list(self.source.classes),
            "raw_bytes": self.layout.raw_bytes,
            "stored_bytes": self.totals.stored_bytes,
            "identity": identity_of(self.totals.datasets),
        }
        return manifest | {"manifest_digest": manifest_digest(manifest)}

    def _field_entry(self, item: Field) -> dict[str, Any]:
        moments = self.totals.moments.get(item.name)
        return {
            "kind": item.kind,
            "dtype": item.dtype.str,
            "shape": list(item.sample_shape),
            "codec": item.codec,
            "mean": None if moments is None else _number(moments.mean, item),
            "std": None if moments is None else _number(moments.std, item),
        }

    def _report(self, manifest: Mapping[str, Any], seconds: float) -> PackReport:
        warnings = self.source.warnings + tuple(
            f"field {name!r} has values that are not finite: no mean and standard deviation are stored"
            for name, moments in self.totals.moments.items()
            if not np.isfinite(moments.squares).all()
        )
        if self.options.store and all(item.dtype.kind != "f" for item in self.layout.fields.values()):
            warnings += (f"--store {self.options.store} changed nothing: no field holds floats",)
        return PackReport(
            root=self.root,
            num_samples=self.layout.num_samples,
            num_shards=len(self.totals.shards),
            chunk_samples=self.layout.chunk_samples,
            raw_bytes=self.layout.raw_bytes,
            stored_bytes=self.totals.stored_bytes,
            seconds=seconds,
            identity=manifest["identity"],
            warnings=warnings,
        )


def _converted(values: npt.NDArray[Any], item: Field, start: int) -> npt.NDArray[Any]:
    """`values` in the stored type; refuses finite values that it cannot hold. `start`: id of the first sample."""
    if values.dtype == item.dtype:
        return values
    with np.errstate(over="ignore"):
        stored = values.astype(item.dtype)
    lost = np.isinf(stored) & np.isfinite(values)
    if lost.any():
        where = np.argwhere(lost)[0]
        raise DataError(
            f"field {item.name!r}, sample {start + where[0]}: {values[tuple(where)]} is beyond {item.dtype.name} "
            f"(largest {np.finfo(item.dtype).max}); scale the field or leave out --store"
        )
    return stored


def _number(value: npt.NDArray[np.float64], item: Field) -> list[float] | float | None:
    if not np.isfinite(value).all():
        return None
    return [float(x) for x in value] if channels_of(item.sample_shape) else float(value[0])


def _in_order(
    pool: ThreadPoolExecutor, function: Callable[[int], _Encoded], items: range, ahead: int
) -> Iterator[_Encoded]:
    """Results in order, with at most `ahead` of them under way or waiting: memory stays bounded."""
    waiting: deque[Future[_Encoded]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
