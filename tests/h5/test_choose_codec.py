"""`--codec auto`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import UsageError
from hpctrain.h5 import choose_codec as module
from hpctrain.h5.choose_codec import Choice, Trial, choose_codec
from hpctrain.h5.codecs import CODECS
from hpctrain.h5.pack import PackOptions, Watch, pack, pack_arrays
from hpctrain.h5.packed import open_packed
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import ArraySource, Columns


def trial(codec: str, ratio: float, effective: float, decode: float = 1.0) -> Trial:
    return Trial(codec, 8, ratio, 1.0, decode, effective)


def choice(*trials: Trial) -> Choice:
    return Choice(trials, len(trials), 0.2, 1)


class TestRule:
    """Of the settings near the best, those that store fewest bytes; of those the fastest."""

    def test_the_highest_effective_rate_wins(self) -> None:
        assert choice(trial("a", 5.0, 0.5), trial("b", 1.0, 1.0)).best.codec == "b"

    def test_within_5_percent_the_higher_ratio_wins(self) -> None:
        assert choice(trial("a", 2.0, 0.96), trial("b", 1.0, 1.0)).best.codec == "a"
        assert choice(trial("a", 2.0, 0.94), trial("b", 1.0, 1.0)).best.codec == "b"

    def test_a_gain_of_a_few_percent_is_not_worth_slower_decoding(self) -> None:
        assert choice(trial("a", 1.02, 0.98, 3.0), trial("none", 1.0, 1.0, 12.0)).best.codec == "none"
        assert choice(trial("a", 1.06, 0.98, 3.0), trial("none", 1.0, 1.0, 12.0)).best.codec == "a"

    def test_of_the_chunk_sizes_the_first_tried_the_default(self) -> None:
        first, second = trial("a", 2.0, 0.99, 1.0), trial("a", 2.0, 1.0, 1.02)
        assert choice(first, second).best is first
        assert choice(trial("a", 2.0, 0.9, 1.0), second).best is second


def wave(num_samples: int = 400) -> np.ndarray:
    steps = np.random.default_rng(0).normal(size=(num_samples, 1024))
    return np.cumsum(steps, axis=1, dtype=np.float32)


def test_every_codec_and_chunk_size_is_tried() -> None:
    source = ArraySource(
        {"wave": wave(), "label": np.arange(400), "text": Ragged.from_text("ab" * i for i in range(400))}
    )
    seen: list[Choice] = []
    found = choose_codec(source, PackOptions("auto", keep_bits=8), seen.append)
    assert [len(item.trials) for item in seen] == list(range(1, found.planned + 1))
    assert {item.codec for item in found.trials} == set(CODECS)
    assert len({item.chunk_samples for item in found.trials}) > 1
    assert 1 < max(item.ratio for item in found.trials) < 50
    for item in found.trials:
        slow = 1 / (1 / item.decode_gb_per_s + 1 / (0.2 * item.ratio))
        assert item.effective_gb_per_s == pytest.approx(slow)


def test_a_slow_filesystem_asks_for_ratio_and_a_fast_one_for_speed() -> None:
    source = ArraySource({"wave": wave(100)})
    codecs = ("none", "blosc-zstd")
    slow = choose_codec(source, PackOptions("auto", keep_bits=6, storage_gb_per_s=0.001), codecs=codecs)
    fast = choose_codec(source, PackOptions("auto", keep_bits=6, storage_gb_per_s=1e6), codecs=codecs)
    assert (slow.best.codec, fast.best.codec) == ("blosc-zstd", "none")


def test_the_sample_is_bounded_and_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    # A source larger than the real 32 MiB would take seconds to make and to try.
    monkeypatch.setattr(module, "_SAMPLED_BYTES", 1 << 16)
    read: list[tuple[int, int]] = []

    class Counting(ArraySource):
        def read(self, start: int, stop: int) -> Columns:
            read.append((start, stop))
            return super().read(start, stop)

    found = choose_codec(
        Counting({"wave": wave(1000)}), PackOptions("auto", chunk_samples=2), codecs=("none",)
    )
    assert found.sampled_bytes <= 1 << 16
    assert {stop - start for start, stop in read} == {2}
    assert (read[0], read[-1]) == ((0, 2), (998, 1000))


def test_the_choice_is_packed_and_recorded(tmp_path: Path) -> None:
    report = pack(ArraySource({"wave": wave(50)}), tmp_path / "set", PackOptions("auto", chunk_samples=10))
    packed = open_packed(tmp_path / "set")
    kept = json.loads((tmp_path / "set" / "dataset.json").read_text())["codec_choice"]
    assert report.choice is not None
    assert kept == json.loads(json.dumps(report.choice.as_json()))
    assert kept["codec"] == report.codec == packed.fields["wave"].codec != "auto"
    assert kept["chunk_samples"] == packed.chunk_samples == 10
    assert len(kept["trials"]) == len(CODECS)
    assert "highest 1 / (1 / decode" in kept["rule"]


def test_a_target_that_cannot_be_used_is_refused_before_the_trials(tmp_path: Path) -> None:
    pack_arrays({"wave": wave(5)}, tmp_path / "set")
    with pytest.raises(UsageError, match="exists already"):
        pack(
            ArraySource({"wave": wave(5)}),
            tmp_path / "set",
            PackOptions("auto"),
            Watch(trying=lambda _: pytest.fail("tried")),
        )


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_out_of_bounds(rate: float) -> None:
    with pytest.raises(UsageError, match=r"storage-gb-per-s is .*, but must be above 0 and finite"):
        PackOptions(storage_gb_per_s=rate)


def test_rows_without_values_can_be_tried(tmp_path: Path) -> None:
    texts = Ragged.from_text([""] * 10)
    report = pack_arrays({"text": texts}, tmp_path / "set", PackOptions(codec="auto"))
    assert report.choice is not None
    assert {trial.ratio for trial in report.choice.trials} == {1.0}
    assert open_packed(tmp_path / "set").num_samples == 10
