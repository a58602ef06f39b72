"""The tables of `staging`, besides that of the bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmarks.harness import Measurement
from benchmarks.report import Table, spread, with_interval
from benchmarks.staging_rates import RATE

_NONE: Final = Measurement(())


def rates_table(measurements: Mapping[str, Measurement]) -> Table:
    """Everything in MB/s."""
    rates: dict[str, list[float]] = {}
    staging = measurements.get("rates", _NONE)
    rates |= {name: staging.values(name, RATE) for name in staging.measured()}
    keeping = measurements.get("keeping", _NONE)
    for setting, quantity in (
        ("verify", "verify_mb_per_s"),
        ("backup, restore", "backup_mb_per_s"),
        ("backup, restore", "backup_again_mb_per_s"),
        ("backup, restore", "restore_mb_per_s"),
        ("archive, recall", "archive_mb_per_s"),
        ("archive, recall", "recall_mb_per_s"),
        ("cp -r", "cp_mb_per_s"),
    ):
        rates[quantity.removesuffix("_mb_per_s").replace("_", " ")] = keeping.values(setting, quantity)
    note = (
        "Warm: the source is in the page cache; cold: the kernel was asked to forget it. All from `verify` on: warm. "
        "Backup again: the second generation, of which little is written. cp: with fsync of the copies."
    )
    rows = [(name, str(len(values)), with_interval(values)) for name, values in rates.items()]
    return Table("Rates", ("what", "n", "MB/s (95 %)"), rows, note)


def first_table(measurements: Mapping[str, Measurement]) -> Table:
    """Where the time goes until the first batch."""
    quantities = {
        "first batch s": "first_batch_s", "opening s": "open_s", "all staged s": "staged_s",
    }  # fmt: skip
    parts = [measurements.get(name, _NONE) for name in ("first batch, limited", "first batch")]
    rows = [
        (name, *(spread(part.values(name, key)) for key in quantities.values()))
        for part in parts
        for name in part.measured()
    ]
    note = (
        "Median [min, max]. First batch: from the loader's start. Opening: of the data path before it, with the word "
        "to the agent to begin to stage. All staged: from that opening until the map has every chunk."
    )
    return Table("First batch", ("how", *quantities), rows, note)


def jobs_table(measurements: Mapping[str, Measurement]) -> Table:
    """What jobs read, and how long their epochs take."""
    parts = {name: measurements.get(name, _NONE) for name in ("cluster", "requeued", "epochs")}
    quantities = {
        "sets read": "device_sets", "sets from peers": "peer_sets", "chunks' worth, second run": "again_device_chunks",
        "chunks' worth, requeued": "requeued_device_chunks", "epoch s": "epoch_s",
    }  # fmt: skip
    rows = [
        (
            f"{name}, {label}" if label == "requeued" else name,
            *(spread(part.values(name, key)) for key in quantities.values()),
        )
        for label, part in parts.items()
        for name in part.measured()
    ]
    note = "Median [min, max]; sets and chunks read from the shared directory, as the kernel counts."
    return Table("Jobs on three nodes", ("order, or how", *quantities), rows, note)
