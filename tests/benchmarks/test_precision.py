from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness import Ended, Measurement, Observation
from benchmarks.precision import QUICK, PrecisionConfig, relative_error, run_precision
from benchmarks.precision_report import (
    BASELINE,
    Formats,
    advise,
    advise_storage,
    alone,
    changes_of,
    combined,
    effect,
    effects_table,
    has_bf16,
    speed_ratios,
    training_table,
)
from benchmarks.report import Report
from benchmarks.summary import Summary
from benchmarks.training import Training

NOISE = (0.97, 1.0, 1.03, 1.01, 0.99, 1.02, 0.98, 1.0)


def a_training(
    rounds: int,
    formats: tuple[Formats, ...] = combined(),
    bf16: float = 1.0,
    fp16: float = 1.0,
    float16: float = 1.0,
    accuracy_lost: float = 0.0,
) -> Measurement:
    """Speeds that are a product of one factor per reduced format, and of the round's own (a drifting machine)."""
    observations = []
    for number in range(rounds):
        for i, item in enumerate(formats):
            speed = 1000.0 / (1 + number) * NOISE[(3 * number + i) % len(NOISE)]
            speed *= bf16 if item.compute == "bf16" else 1
            speed *= fp16 if item.wire == "fp16" else 1
            speed *= float16 if item.storage == "float16" else 1
            accuracy = 0.9 - accuracy_lost * (item != BASELINE)
            values = {"samples_per_s": speed, "accuracy": accuracy, "loss": 0.5, "wall_s": 1.0}
            values |= {f"seconds_{phase}": 1.0 for phase in ("compute", "exchange", "reduce")}
            observations.append(Observation(str(item), number, values, 1.0))
    return Measurement(tuple(map(str, formats)), observations)


def a_reader(ratio: float, rounds: int = 8) -> Measurement:
    observations = [
        Observation(name, number, {"warm_samples_per_s": rate * NOISE[number]}, 1.0)
        for number in range(rounds)
        for name, rate in (("float32", 100.0), ("float16", 100.0 * ratio))
    ]
    return Measurement(("float32", "float16"), observations)


def test_settings_begin_with_the_baseline_and_single_changes() -> None:
    assert combined()[0] == BASELINE
    assert combined()[:4] == alone()
    assert len({str(item) for item in combined()}) == 8


def test_an_effect_pairs_runs_that_differ_in_nothing_else() -> None:
    found = effect(a_training(rounds=3, bf16=0.5), "compute", "samples_per_s")
    assert [len(pairs) for pairs in found] == [4, 4, 4]
    ratios = [mine / other for pairs in found for mine, other in pairs]
    assert ratios == pytest.approx([0.5] * 12, rel=0.07)
    assert [len(pairs) for pairs in effect(a_training(3, alone()), "wire", "samples_per_s")] == [1, 1, 1]


def test_a_round_counts_once_however_many_pairs_it_has() -> None:
    trained = a_training(rounds=6, bf16=1.5)
    ratios = speed_ratios(trained, "compute")
    assert len(ratios) == 6
    first = effect(trained, "compute", "samples_per_s")[0]
    assert ratios[0] == pytest.approx(np.prod([mine / other for mine, other in first]) ** (1 / 4))
    assert changes_of(a_training(6, accuracy_lost=0.02), "wire", "accuracy") == pytest.approx([-0.005] * 6)
    # One round of many pairs says nothing of the next round, however alike its pairs are
    assert Summary.of(speed_ratios(a_training(rounds=5, bf16=1.5), "compute")).interval is None


def test_every_run_is_in_one_pair_of_each_effect() -> None:
    trained = a_training(rounds=2)
    for axis in ("compute", "wire", "storage"):
        pairs = itertools.chain(*effect(trained, axis, "samples_per_s"))
        used = [value for pair in pairs for value in pair]
        assert sorted(used) == sorted(item.values["samples_per_s"] for item in trained.observations)


@pytest.mark.parametrize(
    ("factor", "lost", "rounds", "formats", "wanted"),
    [
        (1.5, 0.0, 6, combined(), "Compute: use bf16: bf16 trains at 1."),
        (1.5, 0.004, 6, combined(), "Compute: use bf16"),
        (1.5, 0.0, 5, combined(), "too few rounds to tell"),
        (0.5, 0.0, 6, combined(), "it is slower here"),
        (1.0, 0.0, 6, combined(), "no gain that can be told from noise"),
        (1.5, 0.0, 2, alone(), "too few rounds to tell"),
        (1.5, 0.01, 6, alone(), "but accuracy changes by -1.00 points"),
        (1.5, 0.0, 0, combined(), "bf16 was not measured"),
    ],
)
def test_advice_on_compute(
    factor: float, lost: float, rounds: int, formats: tuple[Formats, ...], wanted: str
) -> None:
    sentence = advise("compute", a_training(rounds, formats, bf16=factor, accuracy_lost=lost))
    assert wanted in sentence
    assert sentence.startswith("Compute: use" if "use" in wanted else "Compute: keep fp32")


def test_advice_on_the_wire() -> None:
    assert advise("wire", a_training(6, fp16=1.4)).startswith("Wire: use fp16")
    assert advise("wire", a_training(6, fp16=0.7)).startswith("Wire: keep fp32")


@pytest.mark.parametrize(
    ("ratio", "trains", "lost", "rounds", "wanted"),
    [
        (1.9, 1.0, 0.0, 6, "use float16: float16 reads 1.90"),
        (1.9, 0.7, 0.0, 6, "keep float32.*training runs at 0.7"),
        (1.9, 1.0, 0.02, 6, "keep float32.*accuracy changes by -2.00 points"),
        (1.9, 1.0, 0.0, 0, "keep float32.*training with it was not measured"),
        (0.9, 1.0, 0.0, 6, "keep float32.*no gain"),
    ],
)
def test_advice_on_storage(ratio: float, trains: float, lost: float, rounds: int, wanted: str) -> None:
    trained = a_training(rounds, alone(), float16=trains, accuracy_lost=lost)
    assert re.search(wanted, advise_storage(trained, a_reader(ratio)))


def test_advice_on_storage_without_enough_readings() -> None:
    assert "too few rounds" in advise_storage(a_training(6), a_reader(1.9, rounds=5))
    assert "not measured" in advise_storage(a_training(6), Measurement(("float32", "float16")))


@pytest.mark.parametrize(
    ("flags", "has"), [(["avx2"], False), (["avx512_bf16"], True), (["amx_bf16"], True), (["bf16"], True)]
)
def test_bf16_in_hardware(flags: list[str], has: bool) -> None:
    assert has_bf16(flags) is has


def test_relative_error_of_float16_is_that_of_its_11_bits() -> None:
    values = np.random.default_rng(0).standard_normal((100, 100)).astype(np.float32)
    # Rounding to 11 bits errs uniformly by up to 2^-12 .. 2^-11 of the value: about 2^-11 / sqrt(12) / 0.75 in the mean
    assert relative_error(values, np.dtype(np.float16)) == pytest.approx(2**-11 / 12**0.5 * 1.5, rel=0.15)
    assert relative_error(values, np.dtype(np.float32)) == 0


def test_tables_show_what_was_left_out_and_survive_nothing_measured() -> None:
    trained = a_training(2, alone())
    trained.left_out = ("x / y / z",)
    table = training_table(trained)
    assert [row[0] for row in table.rows] == [str(item) for item in alone()]
    assert "Left out for want of time: x / y / z" in table.note
    assert [row[:2] for row in effects_table(trained).rows] == [
        ("compute bf16", "2"), ("wire fp16", "2"), ("storage float16", "2"),
    ]  # fmt: skip
    assert training_table(Measurement((str(BASELINE),))).rows == []


def test_quick_is_planned_for_less_than_two_minutes_and_full_for_less_than_ten() -> None:
    assert QUICK.budget_s < 120
    assert PrecisionConfig().budget_s < 600
    assert PrecisionConfig().min_training_rounds >= 6, "fewer give no interval, and so no advice"


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.usefixtures("own_digits")
def test_precision_end_to_end(tmp_path: Path) -> None:
    reduced = Formats("bf16", "fp16", "float16")
    config = PrecisionConfig(
        formats=(BASELINE, reduced),
        training=Training(epochs=2, width=8, max_samples=256),
        training_rounds=1,
        num_fields=64,
        field_side=32,
        read_s=0.0,
        reader_rounds=2,
    )
    report, said = Report("precision", {"cpu_flags": []}, {}), []
    run_precision(config, tmp_path, report, said.append)
    assert report.failure is None
    assert report.ended is Ended.COMPLETE
    trained, reader = report.measurements["training"], report.measurements["reader"]
    assert trained.settings == (str(BASELINE), str(reduced))
    assert len(trained.ratios(str(reduced), str(BASELINE), "samples_per_s")) == 1
    losses = [trained.values(name, "loss")[0] for name in trained.settings]
    assert losses[0] == pytest.approx(losses[1], abs=0.1)
    assert losses[0] != losses[1]  # the reduced formats really were used
    half = reader.values("float16", "stored_mb")[0] / reader.values("float32", "stored_mb")[0]
    assert 0.4 < half < 0.65
    assert any("emulated" in sentence for sentence in report.advice)
    assert "| fp32 / fp32 / float32 | 1 |" in report.markdown()
