"""Whole batches: what is passed on, who may call, what the Task is told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hpctrain.data.preprocess import FieldSteps, Preprocessor
from hpctrain.errors import ConfigError
from hpctrain.h5.ragged import Ragged
from tests.data.preprocessing import dense, field_of, pictures, preprocessor

ALL = FieldSteps(normalize="stored", augment=("rotate90", "flip", "crop:2", "noise:0.1"))
GOLDEN_PICTURES = [[[0, 9, 6], [0, 8, 5], [0, 7, 4]], [[0, 0, 0], [15, 18, 0], [14, 17, 0]]]


def never(name: str) -> np.ndarray:
    raise AssertionError(f"sample 0 of {name} was read, though its shape is known")


def test_fields_without_steps_are_passed_on() -> None:
    batch = {"image": pictures(5), "label": np.arange(5), "text": Ragged.from_text("abcde")}
    fields = {name: field_of(name, rows) for name, rows in batch.items()}
    steps = {"image": FieldSteps(dtype="float32")}
    made = Preprocessor(fields, steps, 1, first=never, functions={}, source="set")
    result = made.apply(batch, np.arange(5), 0)
    assert list(result) == list(batch)
    assert result["label"] is batch["label"]
    assert result["text"] is batch["text"]
    assert np.array_equal(result["image"], batch["image"].astype(np.float32))


def test_results_go_where_the_caller_says() -> None:
    given: list[np.ndarray] = []

    def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        given.append(np.empty(shape, dtype))
        return given[-1]

    rows = pictures(5)
    made = preprocessor(rows, FieldSteps(dtype="int64"))
    result = made.apply({"image": rows}, np.arange(5), 0, empty)
    assert [array.dtype for array in given] == [np.int64]
    assert result["image"] is given[0]


def test_an_empty_batch() -> None:
    rows = pictures(3)
    made = preprocessor(rows, ALL, mean=1.0, std=2.0)
    assert made.apply({"image": rows[:0]}, np.arange(0), 0)["image"].shape == (0, 6, 6, 3)


def test_threads_may_share_the_rows_of_a_batch() -> None:
    rows, samples = pictures(400, (16, 16, 3)), np.arange(400)
    made = preprocessor(rows, ALL, mean=(1.0, 2.0, 3.0), std=(2.0, 2.0, 2.0))
    whole = made.apply({"image": rows}, samples, 1)["image"]
    field = made.fields["image"]
    parts = np.empty_like(whole)

    def work(part: slice) -> None:
        field.run(rows[part], samples[part], 1, [parts[part]])

    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            parts[...] = 0
            list(pool.map(work, [slice(start, start + 7) for start in range(0, 400, 7)]))
            assert np.array_equal(parts, whole)


def test_what_the_task_is_told() -> None:
    image, field = pictures(2), pictures(2, (4, 8, 8), np.float32)
    fields = {"image": dense("image", image, mean=(1.0, 2.0, 3.0), std=(1.0, 1.0, 1.0))}
    fields |= {"field": dense("field", field, mean=5.0, std=6.0), "label": dense("label", np.arange(2))}
    steps = {"image": FieldSteps(normalize="stored"), "field": FieldSteps(dtype="float16", augment=("flip",))}
    made = Preprocessor(fields, steps, 1, first=never, functions={}, source="set")
    outputs = made.outputs
    assert list(outputs) == ["image", "field", "label"]
    assert (outputs["image"].dtype, outputs["image"].mean) == (np.float32, None)
    assert (outputs["field"].dtype, outputs["field"].mean, outputs["field"].std) == (np.float16, 5.0, 6.0)
    assert outputs["field"].sample_shape == (4, 8, 8)
    assert outputs["label"] is fields["label"]


def test_golden_picture() -> None:
    """Raise `PREPROCESS_VERSION` where this changes: it decides the weights of runs that augment."""
    rows = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) + 1
    made = preprocessor(rows, FieldSteps(augment=("crop:1", "flip", "rotate90")), seed=11)
    assert made.apply({"image": rows}, np.array([5, 6]), 2)["image"].tolist() == GOLDEN_PICTURES


def test_unknown_field() -> None:
    with pytest.raises(ConfigError, match=r"field = 'imgae' is unknown; did you mean 'image'\?"):
        Preprocessor(
            {"image": dense("image", pictures(2))},
            {"imgae": FieldSteps()},
            1,
            first=never,
            functions={},
            source="set",
        )


def test_the_length_of_padded_rows_needs_a_free_name() -> None:
    fields = {
        "text": field_of("text", Ragged.from_text("ab")),
        "text_length": dense("text_length", np.arange(2)),
    }
    with pytest.raises(ConfigError, match="makes the field 'text_length', which the set has already"):
        Preprocessor(fields, {"text": FieldSteps(pad_to=3)}, 1, first=never, functions={}, source="set")
