"""`reader`: our loader against the codec alone, and against what else people read training data with.

Every side runs in processes of its own (`reader_side`), reads the same samples (their digests are compared before
anything is measured) and is measured in turn with all others.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

from benchmarks import inputs, reader_data
from benchmarks.harness import Clock, Ended, Measurement, Repetitions, Say, Values, measure
from benchmarks.reader_bars import RULE, judge_memory, judge_rates, judge_storage, ours
from benchmarks.reader_client import SideError, present, started
from benchmarks.reader_data import DataSet, Reference
from benchmarks.reader_run import Found, Sides
from benchmarks.reader_tables import bars_table, rates_table, tried_table
from benchmarks.report import Report

FIELDS_CHUNK: Final = 8
PICTURES_CHUNK: Final = 256
FIELDS_BATCH: Final = 16
PICTURES_BATCH: Final = 128
FIELDS_WINDOW: Final = 512
PICTURES_WINDOW: Final = 4096


@dataclass(frozen=True)
class ReaderConfig:
    """What is measured, and how long it may take.

    Attributes:
        read_s: a measurement reads as many epochs as take that long.
        choose_s: a trial of a setting reads about that long, and so do measurements of slow sides that can read a part
            of an epoch.
        patience_s: a side that takes longer for one order is given up.
        warm_s, budget_s: when the warm rounds and all of it should be over, from the begin.
        least_s: each has at least that.
    """

    num_fields: int = 4096
    num_pictures: int = 60_000
    workers: tuple[int, ...] = (4, 2, 1, 0)
    read_s: float = 1.0
    choose_s: float = 2.0
    rounds: int = 11
    cold_rounds: int = 6
    memory_epochs: int = 20
    patience_s: float = 600.0
    warm_s: float = 1200.0
    budget_s: float = 1700.0
    least_s: float = 120.0


QUICK: Final = ReaderConfig(
    num_fields=512,
    num_pictures=10_000,
    workers=(2, 0),
    read_s=0.15,
    choose_s=0.2,
    rounds=6,
    cold_rounds=1,
    patience_s=60.0,
    warm_s=98.0,
    budget_s=116.0,
    least_s=10.0,
)


def run_reader(
    config: ReaderConfig, folder: Path, report: Report, say: Say, clock: Clock = time.monotonic
) -> None:
    """Measure, and fill `report`; what was measured before an interruption or a failure stays in it.

    Raises `DataError` where a side does not read the samples that the others read.
    """
    begun_s = clock()

    def said(text: str) -> None:
        say(f"{clock() - begun_s:6.1f} s  {text}")

    report.config, report.rules = dataclasses.asdict(config), [RULE]
    prepared = prepare(config, folder, said)
    families, absent = present()
    said("opening the sides; the peers write their files")
    with started(families, prepared.folders, folder) as clients:
        sides = Sides(clients, config.patience_s, said)
        sides.found.reasons |= absent
        sides.prepare(config.choose_s, prepared.references)
        deadline_s = begun_s + config.warm_s
        warm = measure_sides(config, sides, report, say, clock, "warm", config.rounds, deadline_s)
        if warm.ended in (Ended.COMPLETE, Ended.TIME):
            measure_memory(config, prepared, sides.found, said)
            deadline_s = begun_s + config.budget_s
            measure_sides(config, sides, report, say, clock, "cold", config.cold_rounds, deadline_s)
    fill(report, prepared, sides.found)


@dataclass(frozen=True)
class Prepared:
    """The data, by name; `capacity`: raw bytes of the fields for each stored one, with Blosc-LZ4."""

    sets: tuple[DataSet, ...]
    references: dict[str, Reference]
    capacity: float
    words: list[str]

    @property
    def folders(self) -> list[Path]:
        """Where the sets lie."""
        return [data.folder for data in self.sets]


def prepare(config: ReaderConfig, folder: Path, say: Say) -> Prepared:
    """Make the samples, and write the packed sets and the user's files."""
    say("making fields and pictures")
    fields = reader_data.rounded_fields(config.num_fields)
    pictures, words = inputs.pictures(config.num_pictures)
    say("packing them, and writing a user's gzip files")
    of_fields = DataSet.of(
        "fields", folder, fields, FIELDS_CHUNK, FIELDS_BATCH, FIELDS_WINDOW, config.workers
    )
    of_pictures = DataSet.of(
        "pictures", folder, pictures, PICTURES_CHUNK, PICTURES_BATCH, PICTURES_WINDOW, config.workers
    )
    stored = reader_data.write_packed(of_fields, fields)
    reader_data.write_packed(of_pictures, pictures)
    for shuffle in (False, True):
        reader_data.write_user_file(of_fields, fields, shuffle)
    shape = " x ".join(map(str, fields.shape))
    return Prepared(
        (of_fields, of_pictures),
        {"fields": Reference.of(fields), "pictures": Reference.of(pictures)},
        fields.nbytes / stored["blosc-lz4"],
        [
            f"Fields: {shape} float32, Gaussian, amplitudes falling as |f|^{reader_data.FIELD_SLOPE:.2f}, "
            f"{reader_data.KEEP_BITS} bits of mantissa; {FIELDS_CHUNK} a chunk.",
            f"Pictures: {words}, uint8; {PICTURES_CHUNK} a chunk.",
        ],
    )


def measure_sides(
    config: ReaderConfig,
    sides: Sides,
    report: Report,
    say: Say,
    clock: Clock,
    label: Literal["warm", "cold"],
    rounds: int,
    deadline_s: float,
) -> Measurement:
    """Rounds of all sides, as time allows."""
    settings: dict[str, Callable[[int], Values]] = {
        name: partial(sides.rate, name, seconds=config.read_s, cold=label == "cold") for name in sides.names
    }
    deadline_s = max(deadline_s, clock() + config.least_s)
    repetitions = Repetitions(rounds, min_rounds=1, warmup=(), deadline_s=deadline_s)
    part = report.measurements[label] = measure(
        settings, repetitions, lambda text: say(f"{label} {text}"), clock
    )
    return part


def measure_memory(config: ReaderConfig, prepared: Prepared, found: Found, say: Say) -> None:
    """The resident memory of one run over each set, in processes that do nothing else; both at once."""
    say("resident memory")

    def measured(data: DataSet) -> None:
        name = ours("blosc-lz4", data.name)
        order = {"do": "memory", "side": name, "epochs": config.memory_epochs}
        try:
            with started(["hpctrain"], [data.folder], data.folder) as (client,):
                found.resident_bytes[name] = client.ask(order, config.patience_s)["resident_bytes"]
        except SideError as error:
            found.reasons[name] = str(error)

    with ThreadPoolExecutor(len(prepared.sets)) as pool:
        list(pool.map(measured, prepared.sets))


def fill(report: Report, prepared: Prepared, found: Found) -> None:
    """Judge, and say how it was measured."""
    none = Measurement(())
    warm, cold = report.measurements.get("warm", none), report.measurements.get("cold", none)
    cores = len(os.sched_getaffinity(0))
    judged = [
        *judge_rates(warm, cold, found.reasons),
        *judge_memory(found.resident_bytes, found.reasons),
        *judge_storage(prepared.capacity, warm, cores),
    ]
    report.bars = [item.document() for item in judged]
    report.tables = [bars_table(judged), rates_table(warm, cold, found.options), tried_table(found.tried)]
    bars = [item for item in judged if item.bar.relation is not None]
    met = sum(item.is_met is True for item in bars)
    others = [item.sentence() for item in bars if not item.is_met]
    report.advice = [f"{met} of {len(bars)} bars are met.", *others]
    report.notes = [*prepared.words, *notes()]
    report.config["sides"] = dataclasses.asdict(found)


def notes() -> list[str]:
    """What the figures mean."""
    return [
        "Every side runs in processes of its own, with one thread for torch and OpenMP, reads the same samples and is "
        "measured in turn with all others, every second round in the opposite order. Before that the digests of all "
        "samples it gives are compared with those of the data.",
        f"hpctrain: shuffled epochs, one lane, batches of {FIELDS_BATCH} fields or {PICTURES_BATCH} pictures as torch "
        f"tensors, window of {FIELDS_WINDOW} fields or {PICTURES_WINDOW} pictures, decoding on all usable cores, in "
        "the middle of a run: the first epoch and the batches made ahead are not counted. Warm: chunks stay in the "
        "loader's memory (1 GiB) from epoch to epoch, fields as stored, pictures decoded; `anew`: each epoch by a "
        "loader that begins with nothing in memory, so that all chunks are read from the page cache and decoded.",
        "Codec: chunks of the same size, encoded anew with the block size that decodes fastest, one thread per core "
        "and one buffer per thread.",
        "h5py random: single samples of the user's file, of which a random part is read; hpctrain reads the same file "
        "in window order, and warm from its memory, where the chunks stay decoded; cold they are read and decoded.",
        "DataLoader: workers live on from epoch to epoch. h5py: every sample by itself in random order, as usually "
        "written; by whole batches: one ascending selection each. MosaicML Streaming and WebDataset: a Blosc-LZ4 frame "
        "per sample, decoded in the workers. zarr: Blosc-LZ4 chunks of the same size in random order, shuffled in the "
        "same window.",
        "Warm: after epochs that are not counted. Sides that cannot read a whole epoch in the time of a measurement "
        "read a random part of it, where they can.",
    ]
