"""Random numbers as functions of (seed, step, lane): nothing to save, nothing to deal to ranks."""

from __future__ import annotations

import random

import numpy as np
import torch

from hpctrain.data.permutation import mix_key

_MODEL, _LANE, _EVALUATION = 101, 102, 103  # streams, apart from those of the plan


def seed_model(seed: int) -> None:
    """Seed everything for building the model; the same on every rank."""
    _seed_all(mix_key(seed, _MODEL))


def seed_lane(seed: int, step: int, lane: int) -> None:
    """Seed everything for one micro-batch."""
    _seed_all(mix_key(seed, _LANE, step, lane))


def seed_evaluation(seed: int, step: int, batch: int) -> None:
    """Seed everything for one evaluation batch."""
    _seed_all(mix_key(seed, _EVALUATION, step, batch))


def _seed_all(key: int) -> None:
    torch.manual_seed(key >> 1)  # all CUDA devices too
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)
