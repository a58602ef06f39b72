"""A small run that trains in a second or two: its Task, data and description, and the real command that runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import tomli_w
import torch
from torch import nn

from hpctrain.h5.packed import PackedSet
from hpctrain.training.task import Batch, Task
from tests.support import ROOT, hpctrain, read_json, small_set

NUM_SAMPLES = 240
EPOCHS = 3
STEPS_PER_EPOCH = 20
STEPS = EPOCHS * STEPS_PER_EPOCH


class Toy(Task):
    """A net with dropout, so that random numbers matter; `sleep_s` stretches each micro-batch."""

    def __init__(self, sleep_s: float = 0.0, bad_step: int = -1) -> None:
        self.sleep_s, self.bad_step, self.micro_batches = sleep_s, bad_step, 0

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(30, 24), nn.LayerNorm(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 3)
        )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
        time.sleep(self.sleep_s)
        assert batch["number"].tolist() == batch["id"].tolist()
        loss = nn.functional.cross_entropy(model(batch["image"].float() / 100), batch["label"])
        self.micro_batches += 1
        return loss * (float("nan") if self.micro_batches == self.bad_step else 1.0), len(batch["label"])

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float, float]]:
        right = model(batch["image"].float() / 100).argmax(1) == batch["label"]
        return {"accuracy": (right.double().mean().item(), len(right))}


def toy_data(folder: Path) -> PackedSet:
    return small_set(folder / "packed", NUM_SAMPLES, 10)


def toy_run(folder: Path, data: Path, **changes: Any) -> Path:
    """Write `run.toml`; `changes` are `section__key=value`."""
    raw: dict[str, Any] = {
        "name": "toy",
        "task": {"name": "tests.toy:Toy", "options": {}},
        "data": {"train": str(data), "evaluate": str(data), "window_chunks": 4, "evaluate_batch": 100},
        "lanes": {"num_lanes": 4, "lane_batch": 3},
        "train": {"epochs": EPOCHS, "learning_rate": 0.01, "warmup_steps": 5, "clip_norm": 1.0},
        "staging": {"dir": str(folder / "ssd")},
        "checkpoint": {"interval_steps": 10, "interval_s": 0},
        "resilience": {"hang_timeout_s": 20, "start_timeout_s": 60, "backoff_s": 0.1},
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        raw.setdefault(section, {})[key] = value
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(tomli_w.dumps(raw))
    return folder / "run.toml"


def train(
    description: Path, ranks: int, run_dir: Path, faults: str = "", timeout_s: float = 150
) -> subprocess.CompletedProcess[str]:
    """`hpctrain run`, with faults injected by name."""
    env = {"HPCTRAIN_FAULTS": faults} if faults else {}
    return hpctrain(["run", description, "-n", str(ranks), "--dir", run_dir], timeout_s, env=env, cwd=ROOT)


def start(description: Path, ranks: int, run_dir: Path, faults: str = "") -> subprocess.Popen[str]:
    """The same, not waited for; read its output with `communicate`."""
    command = [
        sys.executable,
        "-m",
        "hpctrain.cli",
        "run",
        str(description),
        "-n",
        str(ranks),
        "--dir",
        str(run_dir),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HPCTRAIN_FAULTS": faults}
    return subprocess.Popen(
        command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def result(run_dir: Path) -> dict[str, Any]:
    return read_json(run_dir / "result.json")


def processes_of(run_dir: Path) -> list[str]:
    """Command lines of processes that still belong to a run."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if any(str(run_dir) in argument for argument in command):
            found.append(f"{process.pid}: {' '.join(command)}")
    return found
