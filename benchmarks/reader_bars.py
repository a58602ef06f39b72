"""The bars of `reader`: what is compared with what, by which figure, and whether it is met."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from benchmarks.harness import Measurement
from benchmarks.report import number
from benchmarks.summary import Summary

RATE: Final = "gb_per_s"
RULE: Final = (
    "a bar is met where the median is; rates are compared by their ratio within a round, warm: the files are in the "
    "page cache."
)
FLAT_FROM_EPOCH: Final = 2
"""Epochs after which resident memory must be flat: before, buffers and caches are filled."""

Relation = Literal["at least", "above", "at most"]


@dataclass(frozen=True)
class Bar:
    """What must hold of a figure; `relation` None: a second figure, with nothing to hold.

    Attributes:
        mine, other: settings whose rates are compared; empty where the figure is no ratio of rates.
        family: that of `other`.
    """

    against: str
    on: str
    bound: float = 0.0
    relation: Relation | None = "at least"
    mine: str = ""
    other: str = ""
    family: str = ""


@dataclass(frozen=True)
class Judged:
    """A bar and what was found, round by round; `reason` says why nothing was."""

    bar: Bar
    values: tuple[float, ...]
    cold: tuple[float, ...] = ()
    reason: str = ""

    @property
    def is_met(self) -> bool | None:
        """None where nothing was measured, or nothing must hold."""
        if not self.values or self.bar.relation is None:
            return None
        median, bound = Summary.of(self.values).median, self.bar.bound
        return {"at least": median >= bound, "above": median > bound, "at most": median <= bound}[
            self.bar.relation
        ]

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **dataclasses.asdict(self.bar),
            "met": self.is_met,
            "warm": dataclasses.asdict(Summary.of(self.values)) if self.values else None,
            "cold": dataclasses.asdict(Summary.of(self.cold)) if self.cold else None,
            "reason": self.reason,
        }

    def sentence(self) -> str:
        """Whether it is met, with the number."""
        bar = self.bar
        words = f"{bar.against}, {bar.on}"
        if not self.values:
            return f"Not measured: {words}: {self.reason or 'no time'} (bar: {bar.relation} {bar.bound:g})."
        verdict = "Met" if self.is_met else "MISSED"
        return f"{verdict}: {words}: {number(Summary.of(self.values).median)}, bar: {bar.relation} {bar.bound:g}."


def ours(kind: str, on: str) -> str:
    """The name of a side of hpctrain."""
    return f"hpctrain {kind}, {on}"


def rate_bars() -> list[Bar]:
    """Those on ratios of rates."""
    return [*_codec_bars(), *_h5py_bars(), *_peer_bars()]


def _codec_bars() -> list[Bar]:
    bars = []
    for on, bound in (("fields", 0.75), ("pictures", 0.6)):
        for codec in ("blosc-lz4", "blosc-zstd"):
            mine, memory, file = (
                f"{side}, {on}" for side in (f"hpctrain {codec}", f"{codec} in memory", f"{codec} by pread")
            )
            bars.append(Bar(f"bare loop, {codec}", on, bound, "at least", mine, memory, "codec"))
            bars.append(Bar(f"bare loop by pread, {codec}", on, 0, None, mine, file, "codec"))
        anew, file = f"hpctrain blosc-lz4 anew, {on}", f"blosc-lz4 by pread, {on}"
        bars.append(Bar("bare loop by pread, read anew each epoch", on, 0, None, anew, file, "codec"))
    return bars


def _h5py_bars() -> list[Bar]:
    bars = [
        Bar(
            "h5py, random, gzip-4", "fields", 30, "at least",
            "hpctrain gzip, fields", "h5py random, gzip, fields", "h5py",
        ),
        Bar(
            "h5py, random, gzip-4 with shuffle", "fields", 0, None,
            "hpctrain gzip with shuffle, fields", "h5py random, gzip with shuffle, fields", "h5py",
        ),
    ]  # fmt: skip
    for on in ("fields", "pictures"):
        mine, single, batches = (
            f"{side}, {on}"
            for side in ("hpctrain blosc-lz4", "h5py DataLoader", "h5py DataLoader by batches")
        )
        bars.append(Bar("h5py + DataLoader", on, 8, "at least", mine, single, "h5py"))
        bars.append(Bar("h5py + DataLoader by batches", on, 0, None, mine, batches, "h5py"))
    return bars


def _peer_bars() -> list[Bar]:
    bars = [
        Bar(
            "hidefix, whole read",
            "fields",
            1,
            "above",
            "hpctrain whole, fields",
            "hidefix, fields",
            "hidefix",
        )
    ]
    for peer, family in (
        ("MosaicML Streaming", "mosaicml"),
        ("WebDataset", "webdataset"),
        ("zarr 3", "zarr"),
    ):
        for on in ("fields", "pictures"):
            bars.append(Bar(peer, on, 2, "at least", f"hpctrain blosc-lz4, {on}", f"{peer}, {on}", family))
    return bars


def judge_rates(warm: Measurement, cold: Measurement, reasons: Mapping[str, str]) -> list[Judged]:
    """Every bar on rates; `reasons`: why a setting, or a family, has none."""
    judged = []
    for bar in rate_bars():
        why = [reasons[name] for name in (bar.other, bar.family, bar.mine, "hpctrain") if name in reasons]
        ratios = [tuple(part.ratios(bar.mine, bar.other, RATE)) for part in (warm, cold)]
        judged.append(Judged(bar, ratios[0], ratios[1], next(iter(why), "")))
    return judged


def judge_memory(resident_bytes: Mapping[str, list[int]], reasons: Mapping[str, str]) -> list[Judged]:
    """How much the resident memory varies from the third epoch on, as a share of its least."""
    judged = []
    for on in ("fields", "pictures"):
        name = ours("blosc-lz4", on)
        flat = resident_bytes.get(name, [])[FLAT_FROM_EPOCH:]
        bar = Bar("resident memory, spread over the epochs", on, 0.05, "at most")
        judged.append(Judged(bar, (max(flat) / min(flat) - 1,) if flat else (), reason=reasons.get(name, "")))
    return judged


def judge_storage(ratio: float, warm: Measurement, cores: int) -> list[Judged]:
    """What 10 kept bits with Blosc-LZ4 give: capacity, and raw bytes decoded per second and core."""
    rates = warm.values("hpctrain blosc-lz4, fields", RATE)
    return [
        Judged(Bar("raw float32, capacity", "fields", 1.6), (ratio,)),
        Judged(
            Bar("GB/s per usable core, hpctrain blosc-lz4", "fields", 1.0),
            tuple(rate / cores for rate in rates),
        ),
    ]
