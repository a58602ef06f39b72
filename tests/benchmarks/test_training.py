from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import training
from benchmarks.training import BenchmarkFailed, DigitsTraining, Storage, Training
from hpctrain.errors import HangError
from hpctrain.h5.packed import open_packed
from hpctrain.h5.reader import FileSource, read_sample_chunk


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 5))
def test_samples_until_against_counting(num_samples: int, global_batch: int, epochs: int) -> None:
    sizes = [
        len(range(num_samples)[at : at + global_batch]) for at in range(0, num_samples, global_batch)
    ] * epochs
    found = [training.samples_until(step, num_samples, global_batch) for step in range(len(sizes) + 1)]
    assert found == [0, *np.cumsum(sizes)]


def test_the_first_step_is_left_out() -> None:
    events = [
        {"t": 5.0, "kind": "step", "step": 1, "loss": 9.0},  # ten slow seconds of warming up lie before it
        {"t": 5.5, "kind": "warning", "message": "what"},
        {"t": 6.0, "kind": "step", "step": 2, "loss": 3.0},
        {"t": 7.0, "kind": "step", "step": 4, "loss": 2.0},
    ]
    result = {"seconds": {"start": 10.0, "compute": 1.5}, "metrics": {"accuracy": 0.5}}
    # 150 samples in batches of 100: steps of 100, 50, 100, 50
    assert training.values_of(result, events, 150, 100) == {
        "samples_per_s": (50 + 100 + 50) / 2.0, "loss": 2.0, "accuracy": 0.5,
        "seconds_start": 10.0, "seconds_compute": 1.5,
    }  # fmt: skip


def test_a_run_of_one_step_has_no_rate() -> None:
    events = [{"t": 5.0, "kind": "step", "step": 1, "loss": 9.0}]
    assert training.values_of({"seconds": {}, "metrics": {}}, events, 10, 100) == {"loss": 9.0}


@pytest.mark.usefixtures("own_digits")
@pytest.mark.parametrize(("dtype", "bound"), [("uint8", 0), ("float32", 1e-7), ("float16", 5e-4)])
def test_pictures_are_stored_as_asked_and_packed_once(tmp_path: Path, dtype: str, bound: float) -> None:
    digits = DigitsTraining(tmp_path, Training(max_samples=64), print)
    storage = Storage("gzip", 16, dtype)  # type: ignore[arg-type]
    folder = digits.packed(storage)
    assert digits.packed(Storage("gzip", 16, dtype)) == folder  # type: ignore[arg-type]
    packed = open_packed(folder / "train")
    assert (packed.num_samples, packed.chunk_samples) == (64, 16)
    assert packed.fields["image"].dtype == np.dtype(dtype)
    with FileSource() as source:
        found = read_sample_chunk(packed, source, 0)["image"]
    assert isinstance(found, np.ndarray)
    expected = np.load(tmp_path / "digits-raw" / "train" / "image.npy")[:16]
    scale = 1 if dtype == "uint8" else 255
    assert np.abs(found.astype(float) - expected / scale).max() <= bound


def test_a_failing_command_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(
        BenchmarkFailed, match=r"(?s)ended with 78; its last words:.*cannot read the run description"
    ):
        training.run_hpctrain(["run", str(tmp_path / "missing.toml")], tmp_path)


def test_a_command_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = tmp_path / "run.toml"  # reading it waits for a writer that never comes
    os.mkfifo(fifo)
    monkeypatch.setattr(training, "_DEADLINE_S", 0.5)
    begun_s, threads = time.monotonic(), threading.active_count()
    with pytest.raises(HangError, match=r"more than 0\.5 s"):
        training.run_hpctrain(["run", str(fifo)], tmp_path)
    assert time.monotonic() - begun_s < 20
    assert threading.active_count() == threads
