"""Packing: source -> packed set. Samples are read and encoded in threads and written in order.

With several processes (see `team`) each opens the source and writes shards of its own, dealt in turns; process 0 puts
the manifest beside them and publishes. The files are those that one process writes: sums are taken shard by shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy.typing as npt

from hpctrain.durable import fsync_path
from hpctrain.errors import UsageError
from hpctrain.h5.choose_codec import Choice, Trying, choose_codec
from hpctrain.h5.cleaning import CLEANING, Checking, CleaningReport, clean
from hpctrain.h5.encoding import EncodedChunk, Encoder
from hpctrain.h5.layout import plan_layout
from hpctrain.h5.manifest import MANIFEST
from hpctrain.h5.mapped import MapFunction, MappedSource
from hpctrain.h5.opening import open_source
from hpctrain.h5.options import AUTO, Opening, PackOptions, PackReport, SourceOptions
from hpctrain.h5.publish import check_target, publishing
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import ArraySource, Source
from hpctrain.h5.team import Alone, Team, check_alike, in_order, working
from hpctrain.h5.totals import ShardTotals, Totals
from hpctrain.h5.writer import ShardWriter, writing
from hpctrain.resilience.faults import fault_point

__all__ = [
    "PackOptions",
    "PackReport",
    "Progress",
    "SourceOptions",
    "Watch",
    "pack",
    "pack_arrays",
    "pack_path",
]

Progress = Callable[[int, int, int], None]
"""Called with samples done, samples in all, and raw bytes done."""


@dataclasses.dataclass(frozen=True)
class Watch:
    """Who is told how far a pack is, on process 0: of the source found, samples judged, codecs tried, chunks packed."""

    packing: Progress = lambda done, total, raw_bytes: None
    trying: Trying | None = None
    checking: Checking | None = None
    opening: Opening = lambda activity, done, total, found: None


def pack(
    source: Source,
    root: Path,
    options: PackOptions | None = None,
    watch: Watch | None = None,
    team: Team | None = None,
) -> PackReport:
    """Pack all samples of a source into the directory `root`, which appears whole or not at all.

    The files depend on the source and the options alone, not on the number of threads or processes; but with codec
    "auto", which is chosen by measured rates, on those, too. With `options.clean`, or a `MappedSource`, the source is
    read twice (see `cleaning`), and `cleaning.json` beside the manifest says what was dropped.

    Raises `UsageError` for a target or options that cannot be used, `DataError` for bad samples, `StorageError` when
    writing fails (no space left).
    """
    options, root, watch, team = options or PackOptions(), Path(root), watch or Watch(), team or Alone()
    check_alike(team, "source", (source.num_samples, tuple(source.fields)))
    cleaning = choice = None
    if team.rank == 0 and (options.clean or options.codec == AUTO or isinstance(source, MappedSource)):
        check_target(root.absolute(), MANIFEST, options.overwrite)  # before what takes a while
    if options.clean or isinstance(source, MappedSource):
        source, cleaning = clean(source, options, team, watch.checking)
    if options.codec == AUTO:
        choice = team.share(choose_codec(source, options, watch.trying) if team.rank == 0 else None)
        options = dataclasses.replace(
            options, codec=choice.best.codec, chunk_samples=choice.best.chunk_samples
        )
    return _Packing(source, root, options, watch.packing, choice, cleaning, team).run()


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
    watch: Watch | None = None,
    team: Team | None = None,
    function: tuple[str, MapFunction] | None = None,
) -> PackReport:
    """Pack what lies at `src` (see `opening.open_source`); errors as for it, for `pack` and for `MappedSource`.

    `function`: name and function that each sample goes through first (see `mapped`).
    """
    target, origin = (Path(os.path.realpath(path)) for path in (root, src))
    if target.is_relative_to(origin) or origin.is_relative_to(target):
        raise UsageError(f"{root} and {src} lie within each other; choose a DST apart from SRC")
    watch, team = watch or Watch(), team or Alone()

    def opening(activity: str, done: int, total: int, found: str) -> None:
        team.tick("opening")  # to be ended where another process has failed
        watch.opening(activity, done, total, found)

    source = open_source(src, dataclasses.replace(how or SourceOptions(), opening=opening))
    if function is not None:
        name, called = function
        source = MappedSource(source, called, name)
    return pack(source, root, options, watch, team)


class _Packing:
    """One run of `pack`; every process has one."""

    def __init__(
        self,
        source: Source,
        root: Path,
        options: PackOptions,
        progress: Progress,
        choice: Choice | None,
        cleaning: CleaningReport | None,
        team: Team,
    ) -> None:
        self.source, self.root, self.options, self.choice = source, root, options, choice
        self.progress, self.cleaning, self.team = progress, cleaning, team
        self.layout = plan_layout(source, options)
        check_alike(team, "layout of the samples", self.layout)
        self.encoder = Encoder(source, self.layout)
        self.shards: list[ShardTotals] = []

    def run(self) -> PackReport:
        started_s = time.monotonic()
        report: PackReport | None = None
        with self._publishing() as partial, self.team.ending_together():
            self._write_shards(partial)
            parts = self.team.gather(self.shards)
            if parts:
                totals = Totals(shard for part in parts for shard in part)
                report = self._finish(partial, totals, started_s)
        shared: PackReport = self.team.share(report)  # once it is published
        return shared

    @contextlib.contextmanager
    def _publishing(self) -> Iterator[Path]:
        """The directory to write into; process 0 makes and publishes it."""
        if self.team.rank:
            yield self.team.share(None)
            return
        with publishing(self.root, MANIFEST, self.options.overwrite) as partial:
            yield self.team.share(partial)

    def _write_shards(self, partial: Path) -> None:
        layout, team = self.layout, self.team
        mine = range(team.rank * layout.shard_samples, layout.num_samples, team.size * layout.shard_samples)
        spans = [range(first, min(first + layout.shard_samples, layout.num_samples)) for first in mine]
        starts = (start for span in spans for start in range(span.start, span.stop, layout.chunk_samples))
        ahead = 2 * (self.options.threads or team.cores)
        with working(team, self.options.threads, "pack") as pool:
            chunks = in_order(pool, self.encoder.encode, starts, ahead, self._tick)
            for span in spans:
                self._write_shard(partial, span, chunks, pool)

    def _write_shard(
        self, partial: Path, span: range, chunks: Iterator[EncodedChunk], pool: Executor
    ) -> None:
        totals = ShardTotals(span.start // self.layout.shard_samples)
        self.shards.append(totals)
        path = partial / f"shard-{totals.number:05d}.h5"
        with writing(partial, self._needed_bytes):
            writer = ShardWriter(path, self.layout, pool)
        try:
            while writer.num_samples < len(span):
                chunk = next(chunks)
                with writing(partial, self._needed_bytes):
                    writer.append(chunk.rows, chunk.dense, chunk.ragged)
                totals.add(chunk)
                done, raw_bytes = self._tick()
                self.progress(done, self.layout.num_samples, raw_bytes)
            with writing(partial, self._needed_bytes):
                datasets = writer.finish()
                if self.team.rank:  # process 0, which makes all durable, may be on another node
                    fsync_path(path)
                totals.finish(path.name, path.stat().st_size, datasets)
        except BaseException:
            writer.abandon()
            raise

    def _tick(self) -> tuple[int, ...]:
        """Samples and raw bytes packed; on process 0 by all."""
        samples = sum(item.samples for item in self.shards)
        return self.team.tick("packing", samples, sum(item.raw_bytes for item in self.shards))

    def _finish(self, partial: Path, totals: Totals, started_s: float) -> PackReport:
        manifest = totals.manifest(self.layout, self.source.classes, self.choice)
        written = {} if self.cleaning is None else {CLEANING: self.cleaning.as_json()}
        written[MANIFEST] = manifest
        with writing(partial, self._needed_bytes):
            for name, content in written.items():
                fault_point("pack.write")
                (partial / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return self._report(totals, manifest["identity"], time.monotonic() - started_s)

    def _needed_bytes(self) -> int:
        """Estimate of the stored size of the whole set, from what has been stored so far; raw before that."""
        done = sum(item.samples for item in self.shards)
        encoded_bytes = sum(item.encoded_bytes for item in self.shards)
        return encoded_bytes * self.layout.num_samples // done if done else self.layout.raw_bytes

    def _report(self, totals: Totals, identity: str, seconds: float) -> PackReport:
        fields = self.layout.fields
        return PackReport(
            root=self.root,
            num_samples=self.layout.num_samples,
            num_shards=len(totals.shards),
            chunk_samples=self.layout.chunk_samples,
            raw_bytes=totals.raw_bytes,
            stored_bytes=totals.stored_bytes,
            seconds=seconds,
            identity=identity,
            warnings=self.source.warnings + self._warnings(totals),
            codec=self.options.codec,
            keep_bits={name: item.keep_bits for name, item in fields.items() if item.keep_bits is not None},
            choice=self.choice,
            cleaning=self.cleaning,
        )

    def _warnings(self, totals: Totals) -> tuple[str, ...]:
        warnings = [
            f"field {name!r} has values that are not finite: no mean and standard deviation are stored"
            for name in totals.not_finite()
        ]
        if self.cleaning is not None:
            warnings += self.cleaning.warnings
        if all(item.dtype.kind != "f" for item in self.layout.fields.values()):
            given = {"--store": self.options.store, "--keep-bits": self.options.keep_bits}
            warnings += [
                f"{option} {value} changed nothing: no field holds floats"
                for option, value in given.items()
                if value is not None
            ]
        return tuple(warnings)
