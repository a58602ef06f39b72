"""`precision`: number formats of compute, of the wire and of storage: speed and quality of real training runs.

The three are chosen independently, so all combinations are trained (with `--quick`, each change alone). The effect of
one format is the ratio of two runs of the same round that differ in nothing else; the ratios of a round are not
independent of each other, so their geometric mean counts as one. The same seed is used for all
settings of a round and another one in the next, so that differences of quality have a spread too.
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
from benchmarks.precision_report import (
    RULE,
    Formats,
    advise,
    advise_storage,
    alone,
    combined,
    effects_table,
    has_bf16,
    reader_table,
    training_table,
)
from benchmarks.report import Report
from benchmarks.training import DigitsTraining, Storage, Training
from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.h5.packed import open_packed


@dataclass(frozen=True)
class PrecisionConfig:
    """What is measured, and how long it may take (`budget_s` in all, `reader_s` of it for the reader alone).

    Fewer formats rather than fewer than `min_training_rounds`: advice takes six rounds.
    """

    formats: tuple[Formats, ...] = combined()
    training: Training = field(default_factory=Training)
    training_rounds: int = 6
    min_training_rounds: int = 6
    num_fields: int = 2048
    field_side: int = 64
    read_s: float = 0.5
    reader_rounds: int = 15
    reader_s: float = 40.0
    budget_s: float = 540.0


QUICK: Final = PrecisionConfig(
    formats=alone(),
    training=Training(epochs=1, width=16),
    training_rounds=3,
    min_training_rounds=2,
    num_fields=512,
    read_s=0.2,
    reader_rounds=8,
    reader_s=10.0,
    budget_s=112.0,
)


def run_precision(
    config: PrecisionConfig, folder: Path, report: Report, say: Say, clock: Clock = time.monotonic
) -> None:
    """Measure, and fill `report`; what was measured before an interruption or a failure stays in it."""
    begun_s = clock()
    report.config = dataclasses.asdict(config)
    report.notes, report.rules = _notes(config), [RULE]
    training = DigitsTraining(folder, config.training, say)
    reader = measure_reader(config, folder, say, clock)
    report.measurements["reader"] = reader
    trained = Measurement(())
    if reader.ended in (Ended.COMPLETE, Ended.TIME):
        trained = measure_training(config, training, begun_s, say, clock)
        report.measurements["training"] = trained
        report.tables += [training_table(trained), effects_table(trained)]
    report.tables.append(reader_table(reader))
    report.advice = [advise("compute", trained), advise("wire", trained), advise_storage(trained, reader)]
    if "bf16" in {formats.compute for formats in config.formats} and not has_bf16(
        report.environment["cpu_flags"]
    ):
        report.advice.append(
            "This CPU has neither AMX nor AVX512-BF16 nor Arm's BF16: bf16 is emulated, expect it to be slower."
        )
    report.environment["numerics"] = training.numerics


def measure_training(
    config: PrecisionConfig, training: DigitsTraining, begun_s: float, say: Say, clock: Clock
) -> Measurement:
    """Train with each combination of formats."""
    settings: dict[str, Callable[[int], Values]] = {
        str(formats): partial(_train, training, formats) for formats in config.formats
    }
    repetitions = Repetitions(
        config.training_rounds,
        config.min_training_rounds,
        warmup=tuple(settings)[:1],
        deadline_s=begun_s + config.budget_s,
    )
    return measure(settings, repetitions, lambda text: say(f"training {text}"), clock)


def _train(training: DigitsTraining, formats: Formats, round_number: int) -> Values:
    precision = {"compute": formats.compute, "wire": formats.wire}
    return training.run(Storage(dtype=formats.storage), precision, seed=round_number + 2)


def measure_reader(config: PrecisionConfig, folder: Path, say: Say, clock: Clock) -> Measurement:
    """Read smooth float fields stored as float32 and as float16, for `reader_s` once they are made."""
    fields = inputs.smooth_fields(config.num_fields, config.field_side)
    settings: dict[str, Callable[[int], Values]] = {
        store: partial(pack_and_read, fields, folder / "fields", PackOptions(store=store), config.read_s)
        for store in ("float32", "float16")
    }
    repetitions = Repetitions(config.reader_rounds, deadline_s=clock() + config.reader_s)
    return measure(settings, repetitions, lambda text: say(f"reader alone {text}"), clock)


def pack_and_read(
    fields: npt.NDArray[np.float32], target: Path, options: PackOptions, read_s: float, _: int = 0
) -> Values:
    """Pack fields into `target`, read them warm, and remove it again."""
    packing = pack_arrays({"field": fields}, target, options)
    try:
        return {
            "stored_mb": packing.stored_bytes / 1e6,
            "relative_error": relative_error(fields, np.dtype(options.store)),
            **reading.read_warm(open_packed(target), read_s),
        }
    finally:
        shutil.rmtree(target)


def relative_error(values: npt.NDArray[np.float32], dtype: np.dtype[Any]) -> float:
    """Root mean square of what is lost by storing as `dtype`, over the root mean square of the values."""
    lost = values.astype(dtype).astype(np.float64) - values
    return float(np.sqrt(np.square(lost).mean() / np.square(values, dtype=np.float64).mean()))


def _notes(config: PrecisionConfig) -> list[str]:
    training = config.training
    return [
        f"Training: `hpctrain run` of the `digits` recipe on its own pictures divided by 255, ranks: {training.ranks}, "
        f"epochs: {training.epochs}, width: {training.width}; samples/s without the first step; files warm.",
        f"Reader alone: {config.num_fields} synthetic smooth fields of {config.field_side} x {config.field_side} "
        "(amplitudes 1/f^2), default codec, shuffled batches through the loader in one process, page cache warm.",
        "Rounds measure all settings, every second in the opposite order, with a seed per round; ratios are taken "
        "within rounds; one warm-up (reader: of every setting; training: of the baseline) is thrown away.",
    ]
