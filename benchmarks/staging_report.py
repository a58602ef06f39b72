"""What `staging` says: its figures judged by the bars, tables of the rest, and how it was measured."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.harness import Measurement
from benchmarks.report import Report
from benchmarks.staging_bars import Bar, Judged, bars_table
from benchmarks.staging_cluster import COUNTED_EPOCHS, LIMIT_BYTES_PER_S, ORDERS
from benchmarks.staging_kill_runs import Killed, kills_table
from benchmarks.staging_rates import RATE, name_of
from benchmarks.staging_tables import first_table, jobs_table, rates_table

CHUNK_NAMES: Final = ("1 MiB", "64 KiB")
_LIMIT: Final = f"{LIMIT_BYTES_PER_S / 1e6:g} MB/s"
_NONE: Final = Measurement(())


def fill(report: Report, killed: Sequence[Killed], reasons: Mapping[str, str]) -> None:
    """Judge what was measured; `reasons`: why parts have no figures."""
    judge = _Judge(report.measurements, reasons)
    judged = [
        *judge.rates(),
        *judge.first_batches(),
        *judge.jobs(),
        *judge.epochs(),
        *(item.judged() for item in killed),
        *judge.backups(),
    ]
    report.bars = [item.document() for item in judged]
    report.config["kills_by_kind"] = [
        {
            "kind": item.kind,
            "seed": item.seed,
            "asked": item.asked,
            "right": item.right,
            "reason": item.reason,
        }
        for item in killed
    ]
    report.config["problems_of_kills"] = [
        {"kind": item.kind, "variant": trial.variant, "nth": trial.nth, "problem": trial.problem}
        for item in killed
        for trial in item.trials
        if trial.problem
    ]
    report.config["reasons"] = dict(reasons)
    measured = report.measurements
    report.tables = [bars_table(judged), rates_table(measured), first_table(measured), jobs_table(measured)]
    report.tables += [kills_table(list(killed))] if killed else []
    bars = [item for item in judged if item.bar.relation is not None]
    met = sum(item.is_met is True for item in bars)
    report.advice = [
        f"{met} of {len(bars)} bars are met.",
        *(one.sentence() for one in bars if not one.is_met),
    ]
    report.environment["load_1min_after"] = round(os.getloadavg()[0], 2)
    report.notes = notes(killed)


class _Judge:
    """Bars and the figures that decide them."""

    def __init__(self, measurements: Mapping[str, Measurement], reasons: Mapping[str, str]) -> None:
        self._measurements, self._reasons = measurements, reasons

    def rates(self) -> list[Judged]:
        """Staging against `cp`."""
        found = self._part("rates")
        return [
            Judged(
                Bar("staging rate / cp with fsync", f"{chunks} chunks, {state}", 0.9, "at least"),
                tuple(found.ratios(name_of("staging", chunks, state), name_of("cp", chunks, state), RATE)),
                self._reason("rates") or ("its bytes came from no device" if state == "cold" else ""),
            )
            for chunks in CHUNK_NAMES
            for state in ("warm", "cold")
        ]

    def first_batches(self) -> list[Judged]:
        """Against the full staging time, and against reading without staging."""
        judged = []
        for where, part in (("limited", "first batch, limited"), ("disk", "first batch")):
            found, staging, direct = self._part(part), f"staging, {where}", f"direct, {where}"
            pairs = zip(
                found.values(staging, "first_batch_s"), found.values(staging, "staged_s"), strict=True
            )
            shares = tuple(first_s / staged_s for first_s, staged_s in pairs)
            earlier = tuple(found.ratios(direct, staging, "first_batch_s"))
            opened = tuple(found.ratios(direct, staging, "opened_and_first_batch_s"))
            reason = self._reason(part)
            judged += [
                Judged(Bar("first batch / full staging time", where, 0.05, "at most"), shares, reason),
                Judged(Bar("first batch without staging / with", where, 1.0, "at least"), earlier, reason),
                Judged(Bar("the same, with opening the data path", where), opened, reason),
            ]
        return judged

    def jobs(self) -> list[Judged]:
        """What jobs read from the shared directory."""
        judged = []
        epochs = f"{COUNTED_EPOCHS} epochs"
        for order in ORDERS:
            for part, what, quantity, bound in (
                ("cluster", f"sets read in {epochs}, as the job counts", "counted_sets", 1.02),
                ("cluster", f"sets read in {epochs}, as the kernel counts", "device_sets", 1.02),
                (
                    "cluster",
                    "chunk bytes read by a second run, as the job counts",
                    "again_counted_bytes",
                    0.0,
                ),
                (
                    "cluster",
                    "chunks' worth read by a second run, as the kernel counts",
                    "again_device_chunks",
                    1.0,
                ),
                (
                    "requeued",
                    "chunk bytes read after a requeue, as the job counts",
                    "requeued_counted_bytes",
                    0.0,
                ),
                (
                    "requeued",
                    "chunks' worth read after a requeue, as the kernel counts",
                    "requeued_device_chunks",
                    1.0,
                ),
            ):
                values = tuple(self._part(part).values(order, quantity))
                reason = self._reason(f"{part}, {order}") or self._reason(part) or self._reason("cluster")
                judged.append(Judged(Bar(what, order, bound, "at most", every=True), values, reason))
        return judged

    def epochs(self) -> list[Judged]:
        """Staged against reading the limited shared directory."""
        ratios = self._part("epochs").ratios("reading the shared directory", "staged", "epoch_s")
        bar = Bar(
            "epoch reading the shared directory / staged",
            f"{LIMIT_BYTES_PER_S / 1e6:g} MB/s",
            3.0,
            "at least",
        )
        return [Judged(bar, tuple(ratios), self._reason("epochs") or self._reason("cluster"))]

    def backups(self) -> list[Judged]:
        """What a second generation adds."""
        found, name = self._part("keeping"), "backup, restore"
        reason = self._reason("keeping")
        changed = found.values(name, "changed_share")
        on = f"{changed[0]:.2%} of the chunks changed" if changed else "1 % of the chunks changed"
        return [
            Judged(
                Bar("bytes a backup adds / bytes of the set", on, 0.015, "at most", every=True),
                tuple(found.values(name, "grown_share")),
                reason,
            ),
            Judged(
                Bar("cp -r time / backup time", on),
                tuple(
                    copy_s / backup_s
                    for copy_s, backup_s in zip(
                        found.values("cp -r", "cp_s"), found.values(name, "backup_again_s"), strict=False
                    )
                ),
                reason,
            ),
        ]

    def _part(self, name: str) -> Measurement:
        return self._measurements.get(name, _NONE)

    def _reason(self, part: str) -> str:
        return self._reasons.get(part, "")


def notes(killed: Sequence[Killed]) -> list[str]:
    """What the figures mean."""
    seeds = ", ".join(f"{item.kind} {item.seed}" for item in killed) or "none"
    return [
        "Sets of random bytes, stored as they are: no codec hides a byte.",
        "Staging rate: one node's stager in this process, from the order to stage until everything is written and "
        "synced; starting it and opening the set are not counted. cp: `cp --reflink=never -r` as a process, then fsync "
        "of every file. Both onto the same filesystem, by turns, every second round in the opposite order.",
        "First batch: a process with the objects of a rank (agent, data path, loader) and no model; no mirror, and no "
        "page of the files in memory. The agent has started before, as it has in a run while the model is built. "
        f"`limited`: the files lie on a loop device, which the kernel slows down to {_LIMIT}.",
        "Jobs: `sbatch slurm/train.sbatch` on a mini cluster of three nodes on this machine, one rank each, with so "
        "little memory that no chunk stays in it from epoch to epoch. Each node mounts the shared directory from a "
        "loop device of its own over one image, without read-ahead, and has its files forgotten twice a second: the "
        "kernel counts for each device what the node read, chunks and all else (indexes, digests, directories).",
        "A second run has a run directory of its own. A requeue is Slurm's: a warning, on which the job saves "
        "and requeues itself, to the same three nodes; it is counted from the warning until two epochs of the second "
        "attempt.",
        f"Epochs: with the devices limited to {_LIMIT} in all, a third for each node, and 128 KiB read ahead; shared "
        "files are read past the page cache (O_DIRECT), mirrors through it. The SSD of a node is a file on this "
        "machine.",
        f"Kills: SIGKILL, so that what the kernel holds survives: no power cut. Seeds: {seeds}; the same again: "
        "`python -m benchmarks.staging_kills KIND COUNT SEED EMPTY_FOLDER`.",
        "Backup: bytes are those of all files of the store, before and after the second generation.",
    ]
