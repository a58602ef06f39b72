"""Digits without a registry: the same files as `hpctrain data digits` makes, fewer of them, of noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import training
from hpctrain.recipes.prepared import Prepared

TRAIN, TEST = 300, 100


def write_digits(root: Path, say: object, cache: Path | None = None) -> Prepared:
    rng = np.random.default_rng(0)
    for name, count in (("train", TRAIN), ("test", TEST)):
        (root / name).mkdir(parents=True)
        np.save(root / name / "image.npy", rng.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        np.save(root / name / "label.npy", rng.integers(0, 10, count, dtype=np.uint8))
    return Prepared(root, TRAIN, TEST, fresh=True)


@pytest.fixture
def own_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced because the real one asks a package registry; tests/recipes tests it."""
    monkeypatch.setattr(training, "prepare_digits", write_digits)
