"""The first of two passes over a source: every sample is read and judged, and the second, which packs, leaves some out.

How many samples are left, and how long their rows are, decides the layout; so nothing can be written before all are
judged. Which are dropped depends on the samples alone, not on threads or processes: of duplicates the lowest number
stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError
from hpctrain.h5.blocks import joined
from hpctrain.h5.judging import MAP, Finding, Judge, Judged, fatal_words
from hpctrain.h5.mapped import MappedSource
from hpctrain.h5.options import KINDS, PackOptions
from hpctrain.h5.sources import Columns, Source
from hpctrain.h5.team import Team, in_order, working

CLEANING: Final = "cleaning.json"
FORMAT: Final = "hpctrain-cleaning"
VERSION: Final = 1
Checking = Callable[[int, int], None]
"""Called with samples judged, and samples in all."""
_BLOCK_BYTES: Final = 4 << 20
_BLOCK_SAMPLES: Final = 4096
_MAPPED_SAMPLES: Final = 16  # a function of the user may take its time, and Ctrl-C waits for it
_BLOCKS: Final = 64
_SHOWN: Final = 3


@dataclass(frozen=True)
class CleaningReport:
    """What was found in how many samples, ascending by number and kind, and what was done about each kind."""

    num_samples: int
    num_kept: int
    actions: Mapping[str, str]
    found: tuple[Finding, ...]
    warnings: tuple[str, ...] = ()

    def of(self, kind: str) -> list[Finding]:
        """What was found of one kind."""
        return [item for item in self.found if item.kind == kind]

    def lines(self) -> list[str]:
        """The report in words: a line in all, and one for each kind that was looked for."""
        lines = [f"cleaning: {self.num_kept} of {self.num_samples} samples kept"]
        for kind, action in self.actions.items():
            found = self.of(kind)
            done = {"drop": "dropped", "keep": "kept", "fatal": "found"}[action]
            first = "".join(f"; sample {item.sample}: {item.words}" for item in found[:_SHOWN])
            lines.append(f"  {kind}: {len(found)} {done}{first}{'; ...' if len(found) > _SHOWN else ''}")
        return lines

    def as_json(self) -> dict[str, Any]:
        """What `cleaning.json` holds: counts by kind, and every dropped sample, by its number in the source."""
        reasons: dict[int, dict[str, str]] = {}
        for item in self.found:
            if self.actions[item.kind] == "drop":
                reasons.setdefault(item.sample, {})[item.kind] = item.words
        return {
            "format": FORMAT,
            "version": VERSION,
            "num_samples": self.num_samples,
            "num_kept": self.num_kept,
            "actions": dict(self.actions),
            "counts": {kind: len(self.of(kind)) for kind in self.actions},
            "dropped": [{"sample": sample, "reasons": why} for sample, why in reasons.items()],
        }


class CleanedSource:
    """Those samples of a source that are kept; `numbers` are theirs in the source, ascending."""

    def __init__(self, source: Source, numbers: npt.NDArray[np.int64], num_values: Mapping[str, int]) -> None:
        self._source, self.numbers, self._num_values = source, numbers, num_values
        self.fields = source.fields
        self.classes = source.classes
        self.num_samples = len(numbers)
        self.warnings = source.warnings

    def read(self, start: int, stop: int) -> Columns:
        """Samples [start, stop) of those kept, read in runs that are whole in the source."""
        numbers = self.numbers[start:stop]
        ends = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        parts = [
            self._source.read(int(numbers[begin]), int(numbers[end - 1]) + 1)
            for begin, end in itertools.pairwise(ends)
        ]
        return {name: joined([part[name] for part in parts]) for name in self.fields}

    def num_values(self, name: str) -> int:
        """Values of a ragged field over all samples that are kept."""
        return self._num_values.get(name, 0)


def sample_numbers(source: Source, start: int, stop: int) -> npt.NDArray[np.int64]:
    """The numbers by which messages call the samples [start, stop): those in what the user gave."""
    return source.numbers[start:stop] if isinstance(source, CleanedSource) else np.arange(start, stop)


def clean(
    source: Source, options: PackOptions, team: Team, checking: Checking | None = None
) -> tuple[CleanedSource, CleaningReport]:
    """Judge all samples, each process its part, and give the source of those that are kept.

    Raises `DataError` for what is fatal, and where nothing is kept.
    """
    judge = Judge(source, options)
    mine = _judge_mine(source, judge, options, team, checking or (lambda done, total: None))
    parts = team.gather(mine)
    verdict = team.share(_decide(Judged.joined(parts), source, judge, options) if parts else None)
    if isinstance(source, MappedSource):
        source = source.settled(verdict.extents)
    return CleanedSource(source, verdict.numbers, verdict.num_values), verdict.report


@dataclass(frozen=True)
class _Verdict:
    """What all processes must know; `extents`: of the ragged fields whose kept rows are all of one length."""

    numbers: npt.NDArray[np.int64]
    num_values: dict[str, int]
    extents: dict[str, int]
    report: CleaningReport


def _judge_mine(source: Source, judge: Judge, options: PackOptions, team: Team, checking: Checking) -> Judged:
    total, block = source.num_samples, _block_samples(source)
    starts = range(0, total, block)
    first, last = (len(starts) * rank // team.size for rank in (team.rank, team.rank + 1))
    spans = (range(start, min(start + block, total)) for start in starts[first:last])
    parts, done = [judge.judge(range(0))], 0

    def tick() -> int:
        return team.tick("checking", done)[0]

    with working(team, options.threads, "check") as pool:
        for part in in_order(pool, judge.judge, spans, 2 * (options.threads or team.cores), tick):
            parts.append(part)
            done += part.num_judged
            checking(tick(), total)
    return Judged.joined(parts)


def _block_samples(source: Source) -> int:
    """Samples that are judged at a time: a few MiB, and a small part of the set, so that all threads have some."""
    if isinstance(source, MappedSource):
        return min(_MAPPED_SAMPLES, _block_samples(source.base))
    values = {name: item.dtype.itemsize for name, item in source.fields.items() if item.kind == "ragged"}
    raw_bytes = sum(source.num_values(name) * size for name, size in values.items())
    raw_bytes += source.num_samples * sum(item.sample_bytes for item in source.fields.values())
    fitting = _BLOCK_BYTES * source.num_samples // max(1, raw_bytes)
    return max(1, min(fitting, source.num_samples // _BLOCKS, _BLOCK_SAMPLES))


def _decide(judged: Judged, source: Source, judge: Judge, options: PackOptions) -> _Verdict:
    found = sorted([*judged.found, *_duplicates(judged)], key=lambda item: (item.sample, _order(item.kind)))
    if options.clean.get("duplicates") == "fatal":
        for item in found:
            if item.kind == "duplicates":
                raise DataError(fatal_words(item))
    actions = {kind: options.clean[kind] for kind in KINDS if kind in options.clean}
    if isinstance(source, MappedSource):
        actions[MAP] = "drop"
    dropped = {item.sample for item in found if actions[item.kind] == "drop"}
    kept = ~np.isin(judged.samples, np.fromiter(dropped, np.int64, len(dropped)))
    numbers = judged.samples[kept]
    report = CleaningReport(source.num_samples, len(numbers), actions, tuple(found), judge.warnings())
    if source.num_samples and not len(numbers):
        raise DataError("\n".join(["there is nothing to pack: all samples are dropped", *report.lines()]))
    lengths = {name: values[kept] for name, values in judged.lengths.items()}
    return _Verdict(
        numbers,
        {name: int(values.sum()) for name, values in lengths.items()},
        {name: int(values[0]) for name, values in lengths.items() if values[0] and np.ptp(values) == 0},
        report,
    )


def _order(kind: str) -> int:
    return (*KINDS, MAP).index(kind)


def _duplicates(judged: Judged) -> list[Finding]:
    """All but the first of each group of equal samples."""
    if not len(judged.digests):
        return []
    order = np.lexsort((judged.samples, judged.digests[:, 1], judged.digests[:, 0]))
    digests, samples = judged.digests[order], judged.samples[order]
    equal = np.concatenate([[False], (digests[1:] == digests[:-1]).all(axis=1)])
    firsts = samples[np.maximum.accumulate(np.where(equal, 0, np.arange(len(samples))))]
    return [
        Finding(int(sample), "duplicates", f"equals sample {first}")
        for sample, first in zip(samples[equal].tolist(), firsts[equal].tolist(), strict=True)
    ]
