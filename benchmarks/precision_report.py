"""What `precision` makes of its figures: effects of single formats, tables, and one sentence of advice for each."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from benchmarks.harness import Measurement
from benchmarks.report import Table, number, spread, with_interval
from benchmarks.summary import Summary

MAX_LOSS_OF_ACCURACY: Final = 0.005
RULE: Final = (
    "a reduced format is recommended only if the 95 % interval of its paired speed ratio lies above 1 (compute and "
    "wire: training; storage: the reader alone, and training not slower) and the median paired accuracy falls by at "
    f"most {100 * MAX_LOSS_OF_ACCURACY:g} percentage points, one ratio per round; without an interval (fewer than 6 "
    "rounds) the wider format stays."
)


@dataclass(frozen=True)
class Formats:
    """One setting."""

    compute: Literal["fp32", "bf16"] = "fp32"
    wire: Literal["fp32", "fp16"] = "fp32"
    storage: Literal["float32", "float16"] = "float32"

    def __str__(self) -> str:
        """Compute, wire, storage: the name of the setting."""
        return f"{self.compute} / {self.wire} / {self.storage}"

    def reduced(self, axis: str) -> Formats:
        """The same with the reduced format of `axis`: compute, wire or storage."""
        chosen: dict[str, Any] = {axis: REDUCED[axis]}
        return replace(self, **chosen)


REDUCED: Final = {"compute": "bf16", "wire": "fp16", "storage": "float16"}
BASELINE: Final = Formats()


def alone() -> tuple[Formats, ...]:
    """The baseline, and each reduced format alone."""
    return (BASELINE, Formats(compute="bf16"), Formats(wire="fp16"), Formats(storage="float16"))


def combined() -> tuple[Formats, ...]:
    """All eight, those of `alone` first: the last ones are left out where time is short."""
    every = itertools.product(("fp32", "bf16"), ("fp32", "fp16"), ("float32", "float16"))
    rest = [formats for formats in itertools.starmap(Formats, every) if formats not in alone()]
    return (*alone(), *rest)


def has_bf16(cpu_flags: list[str]) -> bool:
    """Whether the CPU multiplies bf16 in hardware."""
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(cpu_flags)


def effect(trained: Measurement, axis: str, quantity: str) -> list[list[tuple[float, float]]]:
    """Round by round, (reduced, wide) values of `quantity` of all runs that differ in nothing but `axis`."""
    found: dict[int, list[tuple[float, float]]] = {}
    for formats in combined():
        if getattr(formats, axis) != REDUCED[axis]:
            pairs = trained.pairs_by_round(str(formats.reduced(axis)), str(formats), quantity)
            for number, pair in pairs.items():
                found.setdefault(number, []).append(pair)
    return [found[number] for number in sorted(found)]


def speed_ratios(trained: Measurement, axis: str) -> list[float]:
    """Samples/s of the reduced format over those of the wide one: the geometric mean of each round's pairs.

    One figure per round, because the pairs of a round share its moment and its seed: an interval over all pairs as if
    they were independent would be too narrow.
    """
    rounds = effect(trained, axis, "samples_per_s")
    return [statistics.geometric_mean([reduced / wide for reduced, wide in pairs]) for pairs in rounds]


def changes_of(trained: Measurement, axis: str, quantity: str) -> list[float]:
    """`quantity` with the reduced format less that with the wide one: the mean of each round's pairs."""
    rounds = effect(trained, axis, quantity)
    return [statistics.fmean([reduced - wide for reduced, wide in pairs]) for pairs in rounds]


def advise(axis: str, trained: Measurement) -> str:
    """One sentence on compute or wire, by `RULE`."""
    ratios = speed_ratios(trained, axis)
    wide, reduced = getattr(BASELINE, axis), REDUCED[axis]
    if not ratios:
        return f"{axis.capitalize()}: keep {wide}; {reduced} was not measured."
    found, words = Summary.of(ratios), f"{reduced} trains at {with_interval(ratios)} x the speed of {wide}"
    changes = changes_of(trained, axis, "accuracy")
    if found.interval is None:
        return f"{axis.capitalize()}: keep {wide}: {words}, too few rounds to tell."
    if found.interval.high < 1:
        return f"{axis.capitalize()}: keep {wide}: {words}, it is slower here."
    if found.interval.low <= 1:
        return f"{axis.capitalize()}: keep {wide}: {words}, no gain that can be told from noise."
    if not keeps_accuracy(changes):
        return (
            f"{axis.capitalize()}: keep {wide}: {words}, but accuracy changes by {_points(changes)} points."
        )
    return f"{axis.capitalize()}: use {reduced}: {words}, accuracy changes by {_points(changes)} points."


def advise_storage(trained: Measurement, reader: Measurement) -> str:
    """One sentence on storage, by `RULE`."""
    ratios = reader.ratios("float16", "float32", "warm_samples_per_s")
    if not ratios:
        return "Storage: keep float32; float16 was not measured."
    words = f"float16 reads {with_interval(ratios)} x the samples/s of float32"
    interval, trains = Summary.of(ratios).interval, speed_ratios(trained, "storage")
    if interval is None:
        return f"Storage: keep float32: {words}, too few rounds to tell."
    if interval.low <= 1:
        return f"Storage: keep float32: {words}, no gain that can be told from noise."
    if not trains:
        return f"Storage: keep float32: {words}, but training with it was not measured."
    slower, changes = Summary.of(trains).interval, changes_of(trained, "storage", "accuracy")
    if (slower is not None and slower.high < 1) or not keeps_accuracy(changes):
        what = f"training runs at {with_interval(trains)} x and accuracy changes by {_points(changes)} points"
        return f"Storage: keep float32: {words}, but {what}."
    return (
        f"Storage: use float16: {words}; training runs at {with_interval(trains)} x, accuracy changes by "
        f"{_points(changes)} points."
    )


def keeps_accuracy(changes: list[float]) -> bool:
    """Whether the median accuracy falls by no more than is allowed."""
    return bool(changes) and Summary.of(changes).median >= -MAX_LOSS_OF_ACCURACY


def _points(changes: list[float]) -> str:
    return f"{100 * Summary.of(changes).median:+.2f}" if changes else "unknown"


def training_table(trained: Measurement) -> Table:
    """Every setting."""
    columns = (
        "compute / wire / storage", "n", "samples/s [min, max]", "paired ratio (95 %)", "compute s",
        "exchange + reduce s", "last loss", "test accuracy [min, max]",
    )  # fmt: skip
    rows = []
    for name in trained.measured():
        exchange = zip(
            trained.values(name, "seconds_exchange"), trained.values(name, "seconds_reduce"), strict=True
        )
        ratio = with_interval(trained.ratios(name, trained.baseline, "samples_per_s"))
        rows.append(
            (
                name,
                str(len(trained.values(name, "wall_s"))),
                spread(trained.values(name, "samples_per_s")),
                "1" if name == trained.baseline else ratio,
                _median(trained.values(name, "seconds_compute")),
                _median([sum(pair) for pair in exchange]),
                _median(trained.values(name, "loss")),
                spread(trained.values(name, "accuracy")),
            )
        )
    left = f"Left out for want of time: {', '.join(trained.left_out)}. " if trained.left_out else ""
    return Table(
        "Training `digits`", columns, rows, f"{left}Ratios of samples/s to {BASELINE}. Seconds are of rank 0."
    )


def effects_table(trained: Measurement) -> Table:
    """The effect of each reduced format, the others held fixed."""
    rows = []
    for axis, reduced in REDUCED.items():
        ratios, changes = speed_ratios(trained, axis), changes_of(trained, axis, "accuracy")
        if ratios:
            lost = changes_of(trained, axis, "loss")
            rows.append(
                (
                    f"{axis} {reduced}",
                    str(len(ratios)),
                    with_interval(ratios),
                    _points(changes),
                    _median(lost),
                )
            )
    columns = ("format", "rounds", "speed ratio (95 %)", "accuracy, points", "last loss")
    return Table(
        "Effect of one format, the others held fixed",
        columns,
        rows,
        "Medians over rounds; of each round, the mean of all paired ratios and differences.",
    )


def reader_table(reader: Measurement) -> Table:
    """Storage formats, the reader alone."""
    columns = (
        "storage", "n", "stored MB", "samples/s [min, max]", "paired ratio (95 %)", "decoded GB/s", "relative error",
    )  # fmt: skip
    rows = []
    for name in reader.measured():
        ratio = with_interval(reader.ratios(name, reader.baseline, "warm_samples_per_s"))
        rows.append(
            (
                name,
                str(len(reader.values(name, "stored_mb"))),
                _median(reader.values(name, "stored_mb")),
                spread(reader.values(name, "warm_samples_per_s")),
                "1" if name == reader.baseline else ratio,
                _median(reader.values(name, "warm_gb_per_s")),
                _median(reader.values(name, "relative_error")),
            )
        )
    return Table(
        "Reader alone, float fields",
        columns,
        rows,
        "Relative error: root mean square, of storing the values.",
    )


def _median(values: list[float]) -> str:
    return number(Summary.of(values).median) if values else "-"
