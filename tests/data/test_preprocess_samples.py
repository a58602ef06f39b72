"""Decoding, users' functions and padding."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from hpctrain.data.preprocess import FieldSteps
from hpctrain.errors import ConfigError, DataError
from hpctrain.h5.ragged import Ragged
from tests.data.preprocessing import pictures, preprocessor, result


def encoded(pixels: np.ndarray, kind: str = "PNG") -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return np.frombuffer(file.getvalue(), np.uint8)


def bytes_of(images: list[np.ndarray], kind: str = "PNG") -> Ragged:
    return Ragged.from_rows([encoded(image, kind) for image in images], np.uint8)


DECODE = FieldSteps(decode="image")


def test_pictures_are_decoded() -> None:
    images = pictures(9, (8, 5, 3))
    assert np.array_equal(result(bytes_of(list(images)), DECODE), images)


def test_pictures_are_scaled_as_pillow_does() -> None:
    images = [*pictures(3, (40, 31, 3)), *pictures(2, (17, 50, 3))]
    found = result(bytes_of(images), FieldSteps(decode="image", size=(12, 9)))
    wanted = [
        np.asarray(Image.fromarray(image).resize((9, 12), Image.Resampling.BICUBIC)) for image in images
    ]
    assert np.array_equal(found, np.stack(wanted))


def test_decoded_pictures_go_through_all_steps() -> None:
    images = pictures(9, (8, 8, 3))
    steps = FieldSteps(mean=(100.0, 90.0, 80.0), std=(50.0, 40.0, 30.0), augment=("flip", "crop:2"))
    from_bytes = FieldSteps(decode="image", mean=steps.mean, std=steps.std, augment=steps.augment)
    assert np.array_equal(result(bytes_of(list(images)), from_bytes), result(images, steps))


def test_pictures_of_differing_sizes_need_a_size() -> None:
    rows = bytes_of([*pictures(2, (8, 5, 3)), pictures(1, (5, 8, 3))[0]])
    with pytest.raises(
        DataError,
        match=r"the/set: field 'image', sample 2: 8 x 5 pixels, but sample 0 has 5 x 8; .*image.size",
    ):
        result(rows, DECODE)


@pytest.mark.parametrize("size", [None, (20, 24)])
def test_jpeg_bytes_give_the_pixels_that_pillow_gives(size: tuple[int, int] | None) -> None:
    """They are not decoded by Pillow: colours, sampling and order of the coefficients must not matter."""
    picture = Image.fromarray(pictures(1, (8, 6, 3))[0]).resize((48, 40), Image.Resampling.BICUBIC)
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera's orientation
    for mode in ("RGB", "L", "CMYK"):
        for options in ({}, {"subsampling": 0}, {"progressive": True}, {"quality": 30}, {"exif": turned}):
            file = io.BytesIO()
            picture.convert(mode).save(file, "JPEG", **options)
            with Image.open(file) as image:
                wanted = ImageOps.exif_transpose(image).convert("RGB")
            if size is not None:
                wanted = wanted.resize(size[::-1], Image.Resampling.BICUBIC)
            rows = Ragged.from_rows([np.frombuffer(file.getvalue(), np.uint8)], np.uint8)
            assert np.array_equal(result(rows, FieldSteps(decode="image", size=size))[0], np.asarray(wanted))


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_damaged_picture_is_named(kind: str) -> None:
    rows = [encoded(image, kind) for image in pictures(3, (32, 32, 3))]
    rows[1] = rows[1][: len(rows[1]) // 2]
    with pytest.raises(DataError, match="the/set: field 'image', sample 101: does not decode as an image"):
        result(Ragged.from_rows(rows, np.uint8), DECODE, [100, 101, 102])


def test_decoding_is_for_bytes() -> None:
    with pytest.raises(ConfigError, match=r"decode needs .* \(ragged uint8\), but the field is dense uint8"):
        preprocessor(pictures(2), DECODE)


def shifted(sample: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
    sample += 1  # in place: it is a copy
    return sample[:2] + (0 if rng is None else rng.integers(100))


FUNCTION = FieldSteps(function="mine:shifted")


def test_function_of_sample_and_generator() -> None:
    rows = np.arange(50, dtype=np.int64).reshape(10, 5)
    found = result(rows, FUNCTION, function=shifted)
    assert found.shape == (10, 2)
    offsets = found[:, 0] - rows[:, 0] - 1
    assert np.array_equal(found - offsets[:, None] - 1, rows[:, :2])
    assert len(set(offsets.tolist())) > 5
    assert rows.tolist() == np.arange(50).reshape(10, 5).tolist()
    again = result(rows[[7, 2]], FUNCTION, [7, 2], function=shifted)
    assert np.array_equal(again, found[[7, 2]]), "the generator is of (seed, epoch, sample) alone"
    assert not np.array_equal(result(rows, FUNCTION, epoch=4, function=shifted), found)


def test_function_in_evaluation_has_no_generator() -> None:
    rows = np.arange(50, dtype=np.int64).reshape(10, 5)
    assert np.array_equal(result(rows, FUNCTION, function=shifted, training=False), rows[:, :2] + 1)
    with pytest.raises(
        DataError, match=r"mine:shifted failed: AttributeError: .* repair it .in evaluation its rng is None"
    ):
        result(rows, FUNCTION, function=lambda sample, rng: rng.normal(), training=False)


def test_function_makes_pictures_of_differing_sizes_alike() -> None:
    images = [*pictures(2, (8, 5, 3)), *pictures(2, (5, 8, 3))]
    steps = FieldSteps(decode="image", function="mine:corner", dtype="float32")
    found = result(bytes_of(images), steps, function=lambda sample, rng: sample[:4, :4])
    assert np.array_equal(found, np.stack([image[:4, :4] for image in images]).astype(np.float32))


def test_function_of_a_text_gives_a_number() -> None:
    rows = Ragged.from_text(["a", "bcd", ""])
    found = result(rows, FieldSteps(function="mine:length"), function=lambda sample, rng: len(sample))
    assert (found.tolist(), found.dtype) == ([1, 3, 0], np.int64)


def changes_shape(sample: np.ndarray, rng: Any) -> np.ndarray:
    return sample[: 2 + (sample[0] == 20)]


def changes_type(sample: np.ndarray, rng: Any) -> np.ndarray:
    return sample / 2 if sample[0] == 20 else sample


def fails(sample: np.ndarray, rng: Any) -> np.ndarray:
    if sample[0] == 20:
        raise KeyError("nothing there")
    return sample


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            changes_shape,
            r"mine:f returned \(3,\) int64, but for sample 0 \(2,\) int64; every sample needs the same",
        ),
        (changes_type, r"mine:f returned \(5,\) float64, but for sample 0 \(5,\) int64"),
        (fails, "the function mine:f failed: KeyError: 'nothing there'; repair it"),
    ],
)
def test_bad_function_is_named_with_field_and_sample(function: Any, message: str) -> None:
    rows = np.arange(50, dtype=np.int64).reshape(10, 5)
    with pytest.raises(DataError, match=f"the/set: field 'image', sample 4: .*{message}"):
        result(rows, FieldSteps(function="mine:f"), function=function)


def test_function_must_return_numbers() -> None:
    with pytest.raises(ConfigError, match=r"values of type <U\d cannot be preprocessed"):
        preprocessor(pictures(2), FieldSteps(function="mine:f"), function=lambda sample, rng: "text")


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(-9, 9), max_size=7), min_size=1, max_size=9),
    st.integers(1, 8),
    st.integers(-1, 1),
    st.sampled_from([None, "int64"]),
)
def test_padding(rows: list[list[int]], pad_to: int, value: int, dtype: str | None) -> None:
    ragged = Ragged.from_rows([np.array(row, np.int32) for row in rows], np.int32)
    made = preprocessor(ragged, FieldSteps(pad_to=pad_to, pad_value=value, dtype=dtype))
    batch = made.apply({"image": ragged}, np.arange(len(rows)), 0)
    assert batch["image"].tolist() == [(row + [value] * pad_to)[:pad_to] for row in rows]
    assert batch["image"].dtype == np.dtype(dtype or "int32")
    assert batch["image_length"].tolist() == [min(len(row), pad_to) for row in rows]
    assert [(name, field.sample_shape) for name, field in made.outputs.items()] == [
        ("image", (pad_to,)),
        ("image_length", ()),
    ]


def test_a_function_may_cut_a_window_before_padding() -> None:
    rows = Ragged.from_rows([np.arange(20), np.arange(3), np.arange(5)], np.uint16)
    steps = FieldSteps(function="mine:window", pad_to=4, dtype="int64")
    made = preprocessor(rows, steps, function=lambda sample, rng: sample[1 : rng.integers(2, 9)])
    batch = made.apply({"image": rows}, np.arange(3), 0)
    lengths = batch["image_length"].tolist()
    assert batch["image"].tolist() == [[*range(1, 1 + n), *[0] * (4 - n)] for n in lengths]


@pytest.mark.parametrize(
    ("rows", "steps", "message"),
    [
        (pictures(2), FieldSteps(pad_to=3), "pad_to is for ragged fields"),
        (pictures(2), FieldSteps(size=(3, 3)), "only scales decoded pictures"),
        (pictures(2), FieldSteps(pad_value=3), "no meaning without pad_to"),
        (pictures(2).astype("S3"), FieldSteps(dtype="int64"), r"values of type \|S3 cannot be preprocessed"),
        (Ragged.from_text(["a"]), FieldSteps(dtype="int64"), "add pad_to, decode or function"),
        (Ragged.from_text(["a"]), FieldSteps(decode="image", pad_to=3), "exclude each other"),
        (Ragged.from_text(["a"]), FieldSteps(decode="images"), "did you mean 'image'"),
        (Ragged.from_text(["a"]), FieldSteps(decode="image", size=(0, 3)), "must be 1 to 8192 pixels"),
        (Ragged.from_text(["a"]), FieldSteps(pad_to=0), "must be 1 to 16777216 values"),
        (Ragged.from_text(["a"]), FieldSteps(pad_to=3, pad_value=-1), "pad_value = -1, but must be 0 to 255"),
    ],
)
def test_steps_that_do_not_fit_the_field(rows: Any, steps: FieldSteps, message: str) -> None:
    with pytest.raises(ConfigError, match=f"data.preprocess.image.*{message}"):
        preprocessor(rows, steps)


def test_padding_needs_one_axis() -> None:
    with pytest.raises(ConfigError, match=r"returned the shape \(2, 2\), but pad_to = 3 needs 1-D arrays"):
        preprocessor(
            Ragged.from_text(["a"]), FieldSteps(function="m:f", pad_to=3), function=lambda *_: np.eye(2)
        )
