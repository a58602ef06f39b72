"""What the tests of preprocessing share."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctrain.data.preprocess import FieldSteps, Preprocessor
from hpctrain.h5.fields import Field
from hpctrain.h5.ragged import Ragged


def dense(name: str, rows: np.ndarray, **statistics: Any) -> Field:
    return Field(name, "dense", rows.dtype, rows.shape[1:], **statistics)


def field_of(name: str, rows: np.ndarray | Ragged, **statistics: Any) -> Field:
    if isinstance(rows, Ragged):
        return Field(name, "ragged", rows.values.dtype, ())
    return dense(name, rows, **statistics)


def preprocessor(
    rows: np.ndarray | Ragged,
    steps: FieldSteps,
    *,
    function: Any = None,
    training: bool = True,
    seed: int = 5,
    name: str = "image",
    **statistics: Any,
) -> Preprocessor:
    """For one field, whose first sample is the first of `rows`."""

    def first(field: str) -> np.ndarray:
        assert field == name
        return rows.row(0) if isinstance(rows, Ragged) else rows[0]

    return Preprocessor(
        {name: field_of(name, rows, **statistics)},
        {name: steps},
        seed,
        first=first,
        functions={} if steps.function is None else {steps.function: function},
        source="the/set",
        training=training,
    )


def result(
    rows: np.ndarray | Ragged, steps: FieldSteps, samples: Any = None, epoch: int = 3, **options: Any
) -> np.ndarray:
    """What becomes of these rows, by default those of the samples 0, 1, 2 ..."""
    ids = np.arange(len(rows)) if samples is None else np.asarray(samples, np.int64)
    batch = preprocessor(rows, steps, **options).apply({"image": rows}, ids, epoch)["image"]
    assert isinstance(batch, np.ndarray)
    return batch


def pictures(count: int, shape: tuple[int, ...] = (6, 6, 3), dtype: Any = np.uint8) -> np.ndarray:
    rng = np.random.default_rng(count)
    return rng.integers(1, 200, (count, *shape)).astype(dtype)
