"""`storage`: how much smaller, how fast to pack, and how fast to read, by codec and chunk size; and what training sees.

The reader alone runs first, over all codecs and chunk sizes. Then the `digits` recipe is trained for real with each
codec at the chunk size that the reader liked best.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks import inputs, reading
from benchmarks.harness import Clock, Ended, Measurement, Repetitions, Say, Values, measure
from benchmarks.report import Report, Table, number, spread, with_interval
from benchmarks.summary import Summary
from benchmarks.training import DigitsTraining, Storage, Training
from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.h5.packed import open_packed

NEAR: Final = 0.95
WORTH_IT: Final = 0.95
"""A codec that stores more than this share of the uncompressed bytes is not worth having."""
RULE: Final = (
    "of the settings that read at least 95 % as fast as the fastest (cold where it was measured, else warm; medians of "
    "ratios within rounds), the one with the fewest stored bytes; but uncompressed, where that is among them and the "
    "codec saves less than 5 %."
)


@dataclass(frozen=True)
class StorageConfig:
    """What is measured, and how long it may take (`budget_s` in all, `reader_s` of it for the reader alone)."""

    codecs: tuple[str, ...] = ("none", "blosc-lz4", "blosc-zstd", "gzip", "lz4", "zstd")
    chunk_samples: tuple[int, ...] = (8, 64, 512)
    num_pictures: int = 5120
    read_s: float = 0.5
    reader_rounds: int = 9
    reader_s: float = 200.0
    training_codecs: tuple[str, ...] = ("none", "blosc-lz4", "blosc-zstd", "gzip", "lz4", "zstd")
    training: Training = field(default_factory=lambda: Training(epochs=2, width=16))
    training_rounds: int = 6
    budget_s: float = 540.0


QUICK: Final = StorageConfig(
    codecs=("none", "blosc-lz4", "blosc-zstd", "gzip"),
    chunk_samples=(64, 512),
    num_pictures=2048,
    read_s=0.15,
    reader_rounds=3,
    reader_s=20.0,
    training_codecs=("none", "blosc-lz4", "gzip"),
    training=Training(epochs=1, width=16),
    training_rounds=3,
    budget_s=112.0,
)


def run_storage(
    config: StorageConfig, folder: Path, report: Report, say: Say, clock: Clock = time.monotonic
) -> None:
    """Measure, and fill `report`; what was measured before an interruption or a failure stays in it."""
    begun_s = clock()
    report.config = dataclasses.asdict(config)
    training = DigitsTraining(folder, config.training, say)
    pictures, description = inputs.pictures(config.num_pictures)
    report.notes = _notes(config, description)
    report.rules = [RULE]
    alone = measure_reader(config, pictures, folder, say, clock)
    report.measurements["reader"] = alone
    report.tables.append(reader_table(alone))
    report.advice.append(advise(alone))
    if alone.ended not in (Ended.COMPLETE, Ended.TIME):
        return
    trained = measure_training(config, training, alone, begun_s, say, clock)
    if not trained.settings:
        report.notes.append("Training was not measured: the reader measured none of its codecs.")
        return
    report.measurements["training"] = trained
    report.tables.append(training_table(trained))
    report.environment["numerics"] = training.numerics


def setting_name(codec: str, chunk_samples: int) -> str:
    """The name of a setting of the reader."""
    return f"{codec}, {chunk_samples} per chunk"


def measure_reader(
    config: StorageConfig,
    pictures: npt.NDArray[np.uint8],
    folder: Path,
    say: Say,
    clock: Clock,
) -> Measurement:
    """Pack and read, for every codec and chunk size, for `reader_s` from now: fetching the data does not count."""
    settings: dict[str, Callable[[int], Values]] = {}
    for chunk in config.chunk_samples:
        for codec in config.codecs:
            options = PackOptions(codec=codec, chunk_samples=chunk)
            settings[setting_name(codec, chunk)] = partial(
                pack_and_read, pictures, folder / "set", options, config.read_s
            )
    repetitions = Repetitions(config.reader_rounds, deadline_s=clock() + config.reader_s)
    return measure(settings, repetitions, lambda text: say(f"reader alone {text}"), clock)


def pack_and_read(
    pictures: npt.NDArray[Any], target: Path, options: PackOptions, read_s: float, _: int = 0
) -> Values:
    """Pack the pictures into `target`, read them cold and warm, and remove it again."""
    packing = pack_arrays({"image": pictures}, target, options)
    try:
        packed = open_packed(target)
        return {
            "stored_share": packing.stored_bytes / packing.raw_bytes,
            "pack_mb_per_s": packing.raw_bytes / 1e6 / packing.seconds,
            **reading.read_cold(packed),
            **reading.read_warm(packed, read_s),
        }
    finally:
        shutil.rmtree(target)


def measure_training(
    config: StorageConfig,
    training: DigitsTraining,
    alone: Measurement,
    begun_s: float,
    say: Say,
    clock: Clock,
) -> Measurement:
    """Train with each codec at its best chunk size."""
    settings: dict[str, Callable[[int], Values]] = {}
    for codec in config.training_codecs:
        chunk = best_chunk(alone, codec, config.chunk_samples)
        if chunk is not None:
            settings[setting_name(codec, chunk)] = partial(_train, training, Storage(codec, chunk))
    repetitions = Repetitions(
        config.training_rounds, warmup=tuple(settings)[:1], deadline_s=begun_s + config.budget_s
    )
    return measure(settings, repetitions, lambda text: say(f"training {text}"), clock)


def _train(training: DigitsTraining, storage: Storage, round_number: int) -> Values:
    return training.run(storage, {}, seed=round_number + 2)


def best_chunk(alone: Measurement, codec: str, chunks: tuple[int, ...]) -> int | None:
    """The chunk size at which the reader alone was fastest (warm); None where none was measured."""
    names = {setting_name(codec, chunk): chunk for chunk in chunks}
    speeds = relative_speeds(alone, list(names), alone.baseline, "warm_gb_per_s")
    return names[max(speeds, key=speeds.__getitem__)] if speeds else None


def relative_speeds(alone: Measurement, names: list[str], other: str, quantity: str) -> dict[str, float]:
    """Median ratio of each setting to `other`, within rounds; settings without a common round are left out."""
    ratios = {name: alone.ratios(name, other, quantity) for name in names}
    return {name: Summary.of(found).median for name, found in ratios.items() if found}


def advise(alone: Measurement) -> str:
    """One sentence, by `RULE`."""
    names = alone.measured()
    if not names:
        return "Nothing was measured, so nothing is recommended."
    quantity, speeds = "cold_gb_per_s", relative_speeds(alone, names, alone.baseline, "cold_gb_per_s")
    if len(speeds) < len(names):
        quantity, speeds = "warm_gb_per_s", relative_speeds(alone, names, alone.baseline, "warm_gb_per_s")
    rates = {name: Summary.of(alone.values(name, quantity)) for name in names}
    shares = {name: Summary.of(alone.values(name, "stored_share")).median for name in names}
    fastest = max(speeds, key=speeds.__getitem__)
    near = [name for name, speed in relative_speeds(alone, names, fastest, quantity).items() if speed >= NEAR]
    chosen = min(near, key=shares.__getitem__)
    plain = [name for name in near if name.startswith("none,")]
    if plain and shares[chosen] > WORTH_IT * min(shares[name] for name in plain):
        chosen = max(plain, key=speeds.__getitem__)
    temperature = "cold" if quantity.startswith("cold") else "warm"
    enough = rates[chosen].interval is not None
    opening = "Pack with" if enough else f"A hint only, from {rates[chosen].n} repetitions: pack with"
    return (
        f"{opening} {chosen}: {shares[chosen]:.2f} of the raw bytes, read {temperature} at "
        f"{number(rates[chosen].median)} GB/s (fastest: {number(rates[fastest].median)} GB/s)."
    )


def reader_table(alone: Measurement) -> Table:
    """The reader alone."""
    columns = (
        "codec and chunk", "n", "stored / raw", "pack MB/s", "warm GB/s [min, max]",
        f"paired ratio to {alone.baseline} (95 %)", "cold GB/s", "CPU s/GB", "read s/GB",
    )  # fmt: skip
    rows = [_reader_row(alone, name) for name in alone.measured()]
    note = (
        "GB are decoded bytes. Where storage delivers less than a setting's warm GB/s to one reader, that setting "
        "gives more decoded bytes per second than uncompressed data. CPU s/GB: the whole process; read s/GB: pread "
        "and digest (warm), summed over threads."
    )
    return Table("Reader alone", columns, rows, note)


def _reader_row(alone: Measurement, name: str) -> tuple[str, ...]:
    def median(quantity: str) -> str:
        found = alone.values(name, quantity)
        return number(Summary.of(found).median) if found else "-"

    ratio = with_interval(alone.ratios(name, alone.baseline, "warm_gb_per_s"))
    return (
        name,
        str(len(alone.values(name, "warm_gb_per_s"))),
        median("stored_share"),
        median("pack_mb_per_s"),
        spread(alone.values(name, "warm_gb_per_s")),
        "1" if name == alone.baseline else ratio,
        median("cold_gb_per_s"),
        median("cpu_s_per_gb"),
        median("io_s_per_gb"),
    )


def training_table(trained: Measurement) -> Table:
    """Real training."""
    rows = []
    for name in trained.measured():
        ratio = with_interval(trained.ratios(name, trained.baseline, "samples_per_s"))
        rows.append(
            (
                name,
                str(len(trained.values(name, "wall_s"))),
                spread(trained.values(name, "samples_per_s")),
                "1" if name == trained.baseline else ratio,
                spread(trained.values(name, "seconds_data")),
            )
        )
    columns = (
        "codec and chunk", "n", "samples/s [min, max]", f"paired ratio to {trained.baseline} (95 %)",
        "s waiting for data, rank 0",
    )  # fmt: skip
    left = f"Left out for want of time: {', '.join(trained.left_out)}." if trained.left_out else ""
    return Table("Training `digits`", columns, rows, left)


def _notes(config: StorageConfig, description: str) -> list[str]:
    training = config.training
    return [
        f"Reader alone: {description}; shuffled batches of {reading.BATCH} through the loader, in one process, "
        f"decoding on all usable cores, shuffle window of {reading.WINDOW_SAMPLES} samples, at least "
        f"{config.read_s:g} s per reading.",
        "Warm: the files are in the page cache, after one epoch that is not counted. Cold: one epoch, the kernel "
        "asked to drop the files before (caches of the device or of a server stay); a dash where they did not come "
        "from a device.",
        f"Training: `hpctrain run` of the `digits` recipe, ranks: {training.ranks}, epochs: {training.epochs}, width: "
        f"{training.width}, its own pictures, warm; samples/s without the first step.",
        "Rounds measure all settings, every second in the opposite order; ratios are taken within rounds; one warm-up "
        "(reader: of every setting; training: of the first) is thrown away. Pack MB/s includes the file sync.",
    ]
