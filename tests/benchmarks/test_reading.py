from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks import reading
from hpctrain.errors import DataError
from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.h5.packed import PackedSet, open_packed
from tests.support import small_set


@pytest.fixture
def packed(tmp_path: Path) -> PackedSet:
    image = np.random.default_rng(0).integers(0, 255, (300, 8, 8), dtype=np.uint8)
    pack_arrays({"image": image}, tmp_path / "set", PackOptions(chunk_samples=32))
    return open_packed(tmp_path / "set")


def test_warm_rates_agree_with_each_other(packed: PackedSet) -> None:
    found = reading.read_warm(packed, min_s=0.05)
    assert set(found) == {"warm_gb_per_s", "warm_samples_per_s", "cpu_s_per_gb", "io_s_per_gb"}
    assert found["warm_gb_per_s"] * 1e9 == pytest.approx(found["warm_samples_per_s"] * 64)
    assert found["cpu_s_per_gb"] > 0
    assert found["io_s_per_gb"] > 0


def test_ragged_fields_count_with_their_values(tmp_path: Path) -> None:
    found = reading.read_warm(small_set(tmp_path / "set", 200, 16), min_s=0)
    per_sample = found["warm_gb_per_s"] * 1e9 / found["warm_samples_per_s"]
    text = np.mean([len(f"sample {i} ") + i % 7 for i in range(200)])
    assert per_sample == pytest.approx(6 * 5 + 8 + 8 + text)


def test_a_cold_figure_is_given_only_if_bytes_came_from_the_device(
    packed: PackedSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = sum(shard.path.stat().st_size for shard in packed.shards)
    # What a device delivers cannot be chosen on the filesystem of a test, so the counter is replaced.
    for delivered, cold in ((stored, True), (stored // 2, False)):
        counts = iter([1000, 1000 + delivered])
        monkeypatch.setattr(reading, "device_bytes", lambda counts=counts: next(counts))
        assert ("cold_gb_per_s" in reading.read_cold(packed)) is cold
    monkeypatch.setattr(reading, "device_bytes", lambda: None)
    assert reading.read_cold(packed) == {}


def test_device_counter(tmp_path: Path) -> None:
    counters = tmp_path / "io"
    counters.write_text("rchar: 5\nread_bytes: 4096\nwrite_bytes: 1\n", encoding="ascii")
    assert reading.device_bytes(counters) == 4096
    assert reading.device_bytes(tmp_path / "missing") is None


def test_forget_keeps_the_bytes(packed: PackedSet) -> None:
    path = packed.shards[0].path
    before = path.read_bytes()
    assert reading.forget(path) == len(before)
    assert path.read_bytes() == before


def test_a_damaged_set_is_an_error_and_leaves_no_thread_or_descriptor(packed: PackedSet) -> None:
    index = packed.shards[0].dense["image"]
    with open(index.path, "r+b") as file:
        file.seek(int(index.offsets[2]))
        file.write(b"\xff\xff\xff")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DataError, match="digest"):
        reading.read_warm(packed, min_s=0)
    assert len(os.listdir("/proc/self/fd")) == before
