"""The tables of `reader`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness import Measurement
from benchmarks.reader_bars import RATE, Judged
from benchmarks.report import Table, number, with_interval
from benchmarks.summary import Summary


def bars_table(judged: Sequence[Judged]) -> Table:
    """One row per bar."""
    verdicts = {True: "yes", False: "NO", None: "-"}
    rows = [
        (
            item.bar.against,
            item.bar.on,
            str(len(item.values)),
            with_interval(item.values) if item.values else item.reason or "no time",
            with_interval(item.cold),
            f"{item.bar.relation} {item.bar.bound:g}" if item.bar.relation else "-",
            verdicts[item.is_met],
        )
        for item in judged
    ]
    return Table("Bars", ("hpctrain against", "on", "n", "warm (95 %)", "cold (95 %)", "bar", "met"), rows)


def rates_table(warm: Measurement, cold: Measurement, options: Mapping[str, str]) -> Table:
    """One row per side; `options`: the setting that was fastest."""

    def median(part: Measurement, name: str, quantity: str) -> str:
        found = part.values(name, quantity)
        return number(Summary.of(found).median) if found else "-"

    rows = [
        (
            name,
            options.get(name, "") or "-",
            with_interval(warm.values(name, RATE)),
            median(warm, name, "gb_per_core_s"),
            median(cold, name, RATE),
        )
        for name in warm.measured()
    ]
    note = (
        "GB are raw bytes. Per core second: CPU time of all processes and threads of the side. Cold: the kernel was "
        "asked to forget the files; a dash where their bytes did not come from a device."
    )
    columns = ("side", "setting", "warm GB/s (95 %)", "GB per core second", "cold GB/s")
    return Table("Rates", columns, rows, note)


def tried_table(tried: Mapping[str, Mapping[str, float]]) -> Table:
    """One row per side that has settings: what each gave."""
    rows = [
        (name, ", ".join(f"{option}: {number(rate)}" for option, rate in rates.items()))
        for name, rates in tried.items()
        if len(rates) > 1
    ]
    return Table("Settings tried, once each", ("side", "GB/s"), rows)
