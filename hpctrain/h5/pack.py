"""Packing: source -> packed set. Samples are read and encoded in threads and written in order."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy.typing as npt

from hpctrain.errors import UsageError
from hpctrain.h5.choose_codec import Choice, Trying, choose_codec
from hpctrain.h5.encoding import EncodedChunk, Encoder
from hpctrain.h5.layout import plan_layout
from hpctrain.h5.manifest import MANIFEST
from hpctrain.h5.opening import open_source
from hpctrain.h5.options import AUTO, PackOptions, PackReport, SourceOptions
from hpctrain.h5.publish import check_target, publishing
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import ArraySource, Source
from hpctrain.h5.totals import Totals
from hpctrain.h5.writer import ShardWriter, writing

__all__ = [
    "PackOptions",
    "PackReport",
    "Progress",
    "SourceOptions",
    "pack",
    "pack_arrays",
    "pack_path",
]

Progress = Callable[[int, int, int], None]
"""Called with samples done, samples in all, and raw bytes done."""


def pack(
    source: Source,
    root: Path,
    options: PackOptions | None = None,
    progress: Progress | None = None,
    trying: Trying | None = None,
) -> PackReport:
    """Pack all samples of a source into the directory `root`, which appears whole or not at all.

    The files depend on the source and the options alone, not on the number of threads; but with codec "auto", which is
    chosen by measured rates, on those, too. `trying` is called with each of its trials. Raises `UsageError` for a
    target or options that cannot be used, `DataError` for bad samples, `StorageError` when writing fails (no space
    left).
    """
    options, root = options or PackOptions(), Path(root)
    choice = None
    if options.codec == AUTO:
        check_target(root.absolute(), MANIFEST, options.overwrite)  # before the trials, which take a while
        choice = choose_codec(source, options, trying)
        options = dataclasses.replace(
            options, codec=choice.best.codec, chunk_samples=choice.best.chunk_samples
        )
    return _Packing(source, root, options, progress, choice).run()


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
    how: SourceOptions | None = None,
    progress: Progress | None = None,
    trying: Trying | None = None,
) -> PackReport:
    """Pack what lies at `src` (see `opening.open_source`); errors as for it and for `pack`."""
    target, origin = root.resolve(), src.resolve()
    if target.is_relative_to(origin) or origin.is_relative_to(target):
        raise UsageError(f"{root} and {src} lie within each other; choose a DST apart from SRC")
    return pack(open_source(src, how), root, options, progress, trying)


class _Packing:
    """One run of `pack`."""

    def __init__(
        self,
        source: Source,
        root: Path,
        options: PackOptions,
        progress: Progress | None,
        choice: Choice | None,
    ) -> None:
        self.source, self.root, self.options, self.choice = source, root, options, choice
        self.progress = progress or (lambda done, total, raw_bytes: None)
        self.layout = plan_layout(source, options)
        self.encoder = Encoder(source, self.layout, options)
        self.totals = Totals()

    def run(self) -> PackReport:
        started_s = time.monotonic()
        threads = self.options.threads or len(os.sched_getaffinity(0))
        pool = ThreadPoolExecutor(threads, thread_name_prefix="pack")
        with publishing(self.root, MANIFEST, self.options.overwrite) as partial:
            try:
                self._write_shards(partial, pool, 2 * threads)
            finally:
                pool.shutdown(cancel_futures=True)
            manifest = self.totals.manifest(self.layout, self.source.classes, self.choice)
            with writing(partial, self._needed_bytes):
                (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        return self._report(manifest, time.monotonic() - started_s)

    def _write_shards(self, partial: Path, pool: ThreadPoolExecutor, ahead: int) -> None:
        layout = self.layout
        chunks = _in_order(
            pool, self.encoder.encode, range(0, layout.num_samples, layout.chunk_samples), ahead
        )
        for first in range(0, layout.num_samples, layout.shard_samples):
            path = partial / f"shard-{len(self.totals.shards):05d}.h5"
            self._write_shard(path, min(layout.shard_samples, layout.num_samples - first), chunks, pool)

    def _write_shard(self, path: Path, rows: int, chunks: Iterator[EncodedChunk], pool: Executor) -> None:
        with writing(path.parent, self._needed_bytes):
            writer = ShardWriter(path, self.layout, pool)
        try:
            while writer.num_samples < rows:
                chunk = next(chunks)
                with writing(path.parent, self._needed_bytes):
                    writer.append(chunk.rows, chunk.dense, chunk.ragged)
                self.totals.add(chunk)
                self.progress(self.totals.samples, self.layout.num_samples, self.totals.raw_bytes)
            with writing(path.parent, self._needed_bytes):
                datasets = writer.finish()
                stored_bytes = path.stat().st_size
        except BaseException:
            writer.abandon()
            raise
        self.totals.add_shard(path.name, rows, stored_bytes, datasets)

    def _needed_bytes(self) -> int:
        """Estimate of the stored size of the whole set, from what has been stored so far; raw before that."""
        done = self.totals.samples
        return self.totals.encoded_bytes * self.layout.num_samples // done if done else self.layout.raw_bytes

    def _report(self, manifest: Mapping[str, Any], seconds: float) -> PackReport:
        fields = self.layout.fields
        return PackReport(
            root=self.root,
            num_samples=self.layout.num_samples,
            num_shards=len(self.totals.shards),
            chunk_samples=self.layout.chunk_samples,
            raw_bytes=self.totals.raw_bytes,
            stored_bytes=self.totals.stored_bytes,
            seconds=seconds,
            identity=manifest["identity"],
            warnings=self.source.warnings + self._warnings(),
            codec=self.options.codec,
            keep_bits={name: item.keep_bits for name, item in fields.items() if item.keep_bits is not None},
            choice=self.choice,
        )

    def _warnings(self) -> tuple[str, ...]:
        warnings = [
            f"field {name!r} has values that are not finite: no mean and standard deviation are stored"
            for name in self.totals.not_finite()
        ]
        if all(item.dtype.kind != "f" for item in self.layout.fields.values()):
            given = {"--store": self.options.store, "--keep-bits": self.options.keep_bits}
            warnings += [
                f"{option} {value} changed nothing: no field holds floats"
                for option, value in given.items()
                if value is not None
            ]
        return tuple(warnings)


def _in_order(
    pool: ThreadPoolExecutor, function: Callable[[int], EncodedChunk], items: range, ahead: int
) -> Iterator[EncodedChunk]:
    """Results in order, with at most `ahead` of them under way or waiting: memory stays bounded."""
    waiting: deque[Future[EncodedChunk]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
