from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import storage
from benchmarks.harness import Ended, Measurement, Observation
from benchmarks.report import Report, as_json
from benchmarks.storage import QUICK, StorageConfig, advise, best_chunk, run_storage, setting_name
from benchmarks.training import Storage, Training


def a_reader(figures: dict[str, tuple[float, float, float | None]], rounds: int = 6) -> Measurement:
    """`figures`: setting -> stored share, warm GB/s, cold GB/s."""
    observations = []
    for number in range(rounds):
        for name, (share, warm, cold) in figures.items():
            values = {"stored_share": share, "warm_gb_per_s": warm} | (
                {} if cold is None else {"cold_gb_per_s": cold}
            )
            observations.append(Observation(name, number, values, 1.0))
    return Measurement(tuple(figures), observations)


def test_advice_takes_the_smallest_of_the_fast_ones() -> None:
    figures = {
        "none, 8 per chunk": (1.0, 2.0, None),
        "lz4, 8 per chunk": (0.6, 1.95, None),
        "gzip, 8 per chunk": (0.4, 1.0, None),
    }
    assert advise(a_reader(figures)) == (
        "Pack with lz4, 8 per chunk: 0.60 of the raw bytes, read warm at 1.95 GB/s (fastest: 2.00 GB/s)."
    )


def test_advice_goes_by_cold_figures_where_all_have_them() -> None:
    figures = {"none, 8 per chunk": (1.0, 2.0, 0.3), "gzip, 8 per chunk": (0.4, 1.0, 0.5)}
    assert "Pack with gzip, 8 per chunk: 0.40 of the raw bytes, read cold at 0.500" in advise(
        a_reader(figures)
    )


def test_advice_keeps_data_uncompressed_that_hardly_compress() -> None:
    figures = {"none, 8 per chunk": (1.0, 2.0, None), "lz4, 8 per chunk": (0.99, 2.1, None)}
    assert "Pack with none, 8 per chunk" in advise(a_reader(figures))


def test_advice_compares_within_rounds() -> None:
    # The machine is slow in round 2, which only `none` has: by medians gzip is the fastest, in the common round not.
    rates = {"none, 8 per chunk": (1.5, 1.5, 0.1), "gzip, 8 per chunk": (1.0, 1.0, 0.1)}
    observations = [
        Observation(name, number, {"stored_share": share, "warm_gb_per_s": rates[name][number]}, 1.0)
        for name, share, rounds in (("none, 8 per chunk", 1.0, (1, 2)), ("gzip, 8 per chunk", 0.4, (0, 1)))
        for number in rounds
    ]
    reader = Measurement(tuple(rates), observations)
    assert reader.values("none, 8 per chunk", "warm_gb_per_s") == [1.5, 0.1]
    assert "pack with none, 8 per chunk" in advise(reader)


def test_advice_goes_by_warm_figures_where_the_cold_ones_share_no_round() -> None:
    reader = a_reader({"none, 8 per chunk": (1.0, 2.0, None), "gzip, 8 per chunk": (0.4, 1.0, None)})
    reader.observations[0].values["cold_gb_per_s"] = 0.1
    reader.observations[3].values["cold_gb_per_s"] = 0.9
    assert "none, 8 per chunk: 1.00 of the raw bytes, read warm" in advise(reader)


def test_advice_says_how_little_it_rests_on() -> None:
    sentence = advise(a_reader({"none, 8 per chunk": (1.0, 2.0, None)}, rounds=3))
    assert sentence.startswith("A hint only, from 3 repetitions: pack with none, 8 per chunk")
    assert "nothing is recommended" in advise(Measurement(("none",)))


def test_best_chunk_is_that_of_the_highest_median() -> None:
    figures = {
        setting_name("lz4", chunk): (1.0, rate, None) for chunk, rate in ((8, 1.0), (64, 3.0), (512, 2.0))
    }
    reader = a_reader(figures)
    reader.observations.append(Observation(setting_name("lz4", 8), 9, {"warm_gb_per_s": 99.0}, 1.0))
    assert best_chunk(reader, "lz4", (8, 64, 512)) == 64
    assert best_chunk(reader, "gzip", (8, 64, 512)) is None


def test_quick_is_planned_for_less_than_two_minutes_and_full_for_less_than_ten() -> None:
    assert QUICK.budget_s < 120
    assert StorageConfig().budget_s < 600


class Clock:
    """One that stands still unless moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SlowFetch:
    """Training whose data take longer to come than the whole benchmark may: the real one would take minutes."""

    numerics = None

    def __init__(self, folder: Path, training: Training, say: object) -> None:
        CLOCK.now_s += 1000.0

    def run(self, where: Storage, precision: dict[str, str], seed: int) -> dict[str, float]:
        return {"samples_per_s": 100.0, "seconds_data": 1.0, "wall_s": 1.0}


CLOCK = Clock()
SMALL = dataclasses.replace(
    QUICK, codecs=("none", "gzip"), chunk_samples=(32,), num_pictures=64, read_s=0.0, reader_rounds=3
)


def test_a_slow_fetch_leaves_the_reader_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "DigitsTraining", SlowFetch)
    report = Report("storage", {}, {})
    run_storage(SMALL, tmp_path, report, lambda text: None, CLOCK)
    reader, trained = report.measurements["reader"], report.measurements["training"]
    assert [len(reader.values(name, "warm_gb_per_s")) for name in reader.settings] == [3, 3]
    # Time is over when training begins: two settings, one round
    assert [len(trained.values(name, "samples_per_s")) for name in trained.settings] == [1, 1]
    assert "## Training `digits`" in report.markdown()
    assert json.loads(as_json(report))["measurements"]["training"]["baseline"] == trained.baseline


def test_codecs_that_the_reader_did_not_measure_are_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "DigitsTraining", SlowFetch)
    report = Report("storage", {}, {})
    config = dataclasses.replace(SMALL, training_codecs=("lz4",))
    run_storage(config, tmp_path, report, lambda text: None, CLOCK)
    assert list(report.measurements) == ["reader"]
    assert "Training was not measured" in report.markdown()
    assert json.loads(as_json(report))["ended"] == "complete"


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.usefixtures("own_digits")
def test_storage_end_to_end(tmp_path: Path) -> None:
    config = StorageConfig(
        codecs=("none", "blosc-lz4"),
        chunk_samples=(32, 64),
        num_pictures=256,
        read_s=0.0,
        reader_rounds=2,
        training_codecs=("blosc-lz4",),
        training=Training(epochs=2, width=8, max_samples=256),
        training_rounds=1,
    )
    report, said = Report("storage", {}, {}), []
    run_storage(config, tmp_path, report, said.append)
    assert report.failure is None
    assert report.ended is Ended.COMPLETE
    reader, trained = report.measurements["reader"], report.measurements["training"]
    assert reader.settings == tuple(
        setting_name(codec, chunk) for chunk in (32, 64) for codec in ("none", "blosc-lz4")
    )
    assert [len(reader.values(name, "warm_gb_per_s")) for name in reader.settings] == [2] * 4
    assert reader.values("none, 32 per chunk", "stored_share") == pytest.approx([1.0] * 2, rel=0.01)
    assert reader.values("blosc-lz4, 64 per chunk", "pack_mb_per_s")[0] > 0
    (name,) = trained.settings
    (rate,) = trained.values(name, "samples_per_s")
    assert rate > 0
    assert 0 <= trained.values(name, "accuracy")[0] <= 1
    assert report.environment["numerics"]["horovod"]
    assert any(line.startswith("training") and "round 1 of 1 at most" in line for line in said)
    text = report.markdown()
    assert "| blosc-lz4, 64 per chunk | 2 |" in text
    assert "## Training `digits`" in text
    assert not (tmp_path / "set").exists()
