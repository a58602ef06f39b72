"""Runs over HDF5 files as their owner wrote them: the same promises, and refusals before anything is lost."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from torch import Tensor, nn

from hpctrain.observe.events import read_events
from hpctrain.training.task import Batch
from tests.support import read_json, small_arrays
from tests.toy import NUM_SAMPLES, STEPS_PER_EPOCH, Toy, result, start, toy_run, train

pytestmark = pytest.mark.mpi

FIELDS = {"image": "experiment/frames", "label": "experiment/kind", "number": "number", "weight": "weight"}


class Bright(Toy):
    """The toy, on frames that preprocessing made floats of mean 0."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        assert batch["image"].is_floating_point()
        assert len(set(batch["number"].tolist())) == len(batch["id"])
        return super().loss(model, batch)


class Drawn(Toy):
    """Weighted draws: sample 0 has no weight, and the last one as much as all others together."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        assert 0 not in batch["id"].tolist()
        return super().loss(model, batch)


def halved(sample: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
    return sample.astype(np.float32) / 2 + (0 if rng is None else rng.normal() / 100)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files, with another filter and chunk shape each, big-endian frames, labels that are not chunked."""
    folder = tmp_path_factory.mktemp("user-files")
    arrays = small_arrays(NUM_SAMPLES)
    weight = np.ones(NUM_SAMPLES)
    weight[[0, -1]] = 0, NUM_SAMPLES
    for name, part, options in (
        ("a.h5", slice(0, 100), {"chunks": (7, 6, 3), "compression": "gzip", "shuffle": True}),
        ("b.h5", slice(100, NUM_SAMPLES), {"chunks": (9, 6, 5), "compression": "lzf", "fletcher32": True}),
    ):
        with h5py.File(folder / name, "w") as file:
            file.create_dataset("experiment/frames", data=arrays["image"][part].astype(">i2"), **options)
            file["experiment/kind"] = arrays["label"][part]
            file["number"] = arrays["number"][part]
            file["weight"] = weight[part]
    return folder


def user_run(folder: Path, files: Path, task: str = "Bright", **changes: Any) -> Path:
    preprocess = {"function": "tests.runs.test_user_files:halved", "mean": [50.0], "std": [30.0]}
    changes = {
        "task__name": f"tests.runs.test_user_files:{task}",
        "data__fields": FIELDS,
        "data__preprocess": {"image": {**preprocess, "augment": ["flip", "noise:0.05"]}},
        "data__order": "node_local",
        "data__balance": "label",
        "data__memory_budget_mib": 16,
        **changes,
    }
    return toy_run(folder, files, **changes)


def test_killed_or_not_and_on_other_ranks(tmp_path: Path, files: Path) -> None:
    """Balanced lanes, node-local order, augmentation and user functions: recovery changes no bit of it."""
    description = user_run(tmp_path, files)
    whole, killed, alone = tmp_path / "whole", tmp_path / "killed", tmp_path / "alone"
    assert train(description, 2, whole).returncode == 0
    assert train(description, 2, killed, "kill@step:rank=1,step=33,attempt=1").returncode == 0
    assert train(description, 1, alone).returncode == 0
    found, other = result(whole), result(killed)
    assert other["restarts"] == 1
    assert other["state_digest"] == found["state_digest"]
    assert result(alone)["samples_digest"] == found["samples_digest"]
    assert found["staging"]["shared_bytes"] > 0
    assert other["staging"]["shared_bytes"] == result(alone)["staging"]["shared_bytes"] == 0, (
        "all was staged before"
    )
    events = read_events(whole / "attempts" / "a0001" / "events" / "rank-0.jsonl")
    check_what_it_says_of_itself(events)


def check_what_it_says_of_itself(events: list[dict[str, Any]]) -> None:
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["kind"], []).append(event)
    assert any("no digests of their chunks" in event["message"] for event in by_kind["warning"])
    assert by_kind["staging"][-1]["present_bytes"] == by_kind["staging"][-1]["total_bytes"] > 0
    (mixing,) = by_kind["mixing"]
    assert 0 < mixing["mixing"] <= 1
    assert mixing["read_amplification"] >= 1
    assert [event["epoch"] for event in by_kind["reading"]] == [0, 1, 2]
    for rank in range(2):
        ranks = [event["ranks"][rank] for event in by_kind["reading"]]
        assert ranks[0]["index_s"] > 0
        assert sum(rank["used_bytes"] for rank in ranks) >= 3 * (NUM_SAMPLES // 2 - 4) * 60
        assert min(sum(rank[key] for rank in ranks) for key in ("read_s", "decode_s", "convert_s")) > 0
    assert {event["slowest"] for event in by_kind["reading"]} <= {0, 1}


def test_weighted_draws_past_the_page_cache(tmp_path: Path, files: Path) -> None:
    changes = {"data__order": "global", "data__balance": "none", "data__page_cache": "bypass"}
    description = user_run(
        tmp_path, files, "Drawn", data__sampling="weighted", data__preprocess={}, **changes
    )
    done = train(description, 2, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "run")["steps"] == 3 * STEPS_PER_EPOCH


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-900]), "truncated"),
        (lambda path: path.write_bytes(b"PK" + path.read_bytes()[2:]), "HDF5"),
    ],
)
def test_a_damaged_file_is_refused_before_a_rank_begins(
    make: Any, said: str, tmp_path: Path, files: Path
) -> None:
    copy = tmp_path / "a.h5"
    copy.write_bytes((files / "a.h5").read_bytes())
    make(copy)
    done = train(user_run(tmp_path, copy), 2, tmp_path / "run")
    assert done.returncode == 65, done.stderr
    assert said in done.stderr
    assert str(copy) in done.stderr
    assert not (tmp_path / "run" / "attempts").exists()


def test_a_file_that_is_changed_while_it_is_read(tmp_path: Path, files: Path) -> None:
    """A writer beside the run, and a later start: neither goes on with other data unnoticed."""
    copy = tmp_path / "b.h5"
    copy.write_bytes((files / "b.h5").read_bytes())
    description = user_run(tmp_path, copy, task__options={"sleep_s": 0.1}, data__preprocess={}, task="Toy")
    description.write_text(description.read_text().replace("test_user_files:Toy", "test_user_files:Slow"))
    run_dir = tmp_path / "run"
    process = start(description, 1, run_dir)
    try:
        deadline = time.monotonic() + 60
        events = run_dir / "attempts" / "a0001" / "events" / "rank-0.jsonl"
        while not events.exists() or '"step"' not in events.read_text():
            assert time.monotonic() < deadline, "it does not begin"
            time.sleep(0.05)
        with h5py.File(copy, "r+", locking=False) as file:
            file["experiment/kind"][:] = 0
        os.utime(copy)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 65, output
    assert "changed since this run looked at it" in output
    again = train(description, 1, run_dir)
    assert again.returncode == 78, again.stderr
    assert "another --dir" in again.stderr


class Slow(Toy):
    """Does not compare ids: the file is a part of the toy's samples."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        return super().loss(model, {**batch, "number": batch["id"]})


def test_labels_missing_for_some_samples(tmp_path: Path, files: Path) -> None:
    with h5py.File(files / "a.h5") as whole, h5py.File(tmp_path / "a.h5", "w") as file:
        for name in FIELDS.values():
            file[name] = whole[name][:90] if name == "experiment/kind" else whole[name][:]
    done = train(user_run(tmp_path, tmp_path / "a.h5"), 1, tmp_path / "run")
    assert done.returncode == 65, done.stderr
    assert "90" in done.stderr
    assert "100" in done.stderr
    record = read_json(tmp_path / "run" / "attempts" / "a0001" / "ranks" / "0.json")
    assert json.dumps(record).count("experiment/kind") >= 1
