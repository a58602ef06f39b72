from __future__ import annotations

import io
import json
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import reader_side
from benchmarks.reader_base import Batches, Side
from benchmarks.reader_data import DataSet, Reference, random_order
from benchmarks.reader_side import Server, check, choose, measure, memory, serve

VALUES = np.random.default_rng(0).integers(0, 256, (400, 100), dtype=np.uint8)


class Paced(Side):
    """Gives VALUES, each batch after a time that the option says."""

    bounded = True

    def __init__(self, data: DataSet, pause_s: float = 0.0) -> None:
        super().__init__(data)
        self.pause_s, self.used, self.epochs = pause_s, [], []

    def options(self) -> list[str]:
        return ["slow", "fast", "middling"]

    def use(self, option: str, samples: int) -> None:
        super().use(option, samples)
        self.used.append(option)
        self.pause_s = {"slow": 0.01, "fast": 0.001, "middling": 0.003}[option]

    def files(self) -> list[Path]:
        return []

    def batches(self, epoch: int, epochs: int) -> Batches:
        for number in range(epoch, epoch + epochs):
            self.epochs.append(number)
            order = random_order(len(VALUES), number)[: self.samples]
            for start in range(0, len(order), self.data.batch):
                time.sleep(self.pause_s)
                ids = order[start : start + self.data.batch]
                yield ids, VALUES[ids]

    def close(self) -> None:
        self.used.append("closed")


@pytest.fixture
def data(tmp_path: Path) -> DataSet:
    return DataSet.of("pictures", tmp_path, VALUES, chunk_samples=8, batch=10, window=16, workers=(0,))


def test_the_fastest_option_is_taken_and_the_part_fits_the_time(data: DataSet) -> None:
    side = Paced(data)
    found = choose(side, seconds=0.02)
    assert found["option"] == "fast"
    assert side.used == ["slow", "fast", "middling", "fast"]
    assert found["tried"]["slow"] < found["tried"]["middling"] < found["tried"]["fast"]
    assert found["samples"] % 10 == 0
    assert 10 <= found["samples"] <= 250  # 200 of 400: about 1 ms for 10
    side.bounded = False
    assert choose(side, seconds=0.02)["samples"] == 400


def test_a_trial_of_few_batches_counts_them_all(data: DataSet) -> None:
    side = Paced(data)
    data_of_few = DataSet.of(
        "few", data.folder, VALUES[:20], chunk_samples=8, batch=10, window=16, workers=(0,)
    )
    side.data = data_of_few
    rate = side.trial("slow", 1.0)
    assert 20 * 100 / 1e9 / 2.0 < rate <= 20 * 100 / 1e9 / 0.02  # two batches, each after 10 ms at least


def test_rates_are_those_of_raw_bytes(data: DataSet) -> None:
    side = Paced(data, pause_s=0.001)
    side.epoch_s = 0.05
    found = measure(side, epoch=3, seconds=0.1, cold=False)
    assert side.epochs == [3, 4]
    assert found["gb_per_s"] == pytest.approx(2 * VALUES.nbytes / 1e9 / found["seconds"])
    assert found["seconds"] >= 80 * 0.001
    assert found["gb_per_core_s"] > 0
    assert side.epoch_s == pytest.approx(found["seconds"] / 2)


def test_nothing_is_cold_that_reads_no_file(data: DataSet) -> None:
    assert measure(Paced(data), epoch=0, seconds=0.1, cold=True) == {}


def test_a_cold_rate_needs_bytes_from_the_device(data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    path = data.folder / "set.json"
    side = Paced(data)
    side.files = lambda: [path]  # type: ignore[method-assign]
    size = path.stat().st_size
    # What a device delivers cannot be chosen on the filesystem of a test, so the counter is replaced.
    for samples, delivered, is_cold in ((400, size, True), (400, size // 2, False), (200, size // 2, True)):
        side.samples = samples
        counts = iter([7, 7 + delivered])
        monkeypatch.setattr(reader_side, "device_bytes", lambda counts=counts: next(counts))
        assert bool(measure(side, 0, 0.1, cold=True)) is is_cold
    monkeypatch.setattr(reader_side, "device_bytes", lambda: None)
    assert measure(side, 0, 0.1, cold=True) == {}


def test_the_check_knows_right_from_wrong(data: DataSet) -> None:
    side, reference = Paced(data), Reference.of(VALUES)
    assert check(side) == {"digest": reference.expected(400), "count": 400, "dtypes": ["uint8"]}
    side.samples = 30
    assert check(side) == {"digest": reference.expected(30), "count": 30, "dtypes": ["uint8"]}


def test_memory_is_looked_at_after_every_epoch(data: DataSet) -> None:
    side = Paced(data)
    side.samples = 50
    found = memory(side, 6)["resident_bytes"]
    assert len(found) == 6
    assert min(found) > 1 << 20


def test_orders_are_answered_one_by_one_errors_too(data: DataSet) -> None:
    server = Server("codec", [])
    server._openers = {"paced": lambda: Paced(data), "broken": lambda: 1 / 0}  # type: ignore[dict-item, return-value]
    orders = [
        {"do": "names"},
        {"do": "open", "side": "paced"},
        {"do": "check", "side": "broken"},
        {"do": "dance", "side": "paced"},
        {"do": "memory", "side": "paced", "epochs": 2},
    ]
    answers = io.StringIO()
    serve(io.StringIO("".join(json.dumps(order) + "\n" for order in orders)), answers, server)
    found = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert found[0] == {"names": ["paced", "broken"]}
    assert found[1] == {"options": ["slow", "fast", "middling"]}
    assert found[2] == {"error": "ZeroDivisionError: division by zero"}
    assert found[3] == {"error": "KeyError: 'dance'"}
    assert len(found[4]["resident_bytes"]) == 2
    paced = server.side("paced")
    server.close()
    assert isinstance(paced, Paced)
    assert paced.used[-1] == "closed"
