"""Named augmentations, against plain code for one sample at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.preprocess import FieldSteps
from hpctrain.data.preprocess.draws import Draws, normals
from hpctrain.errors import ConfigError
from tests.data.preprocessing import pictures, result

SHAPES = [(6, 6), (6, 6, 1), (6, 6, 3), (2, 6, 6), (5, 6, 6)]


def spatial_axes(shape: tuple[int, ...]) -> tuple[int, int]:
    """Where height and width are in a sample of `SHAPES`."""
    return (0, 1) if len(shape) == 2 or shape[-1] in (1, 3, 4) else (1, 2)


def one_by_one(step: str, rows: np.ndarray, samples: np.ndarray, epoch: int, seed: int) -> np.ndarray:
    """The same in plain steps."""
    name, _, number = step.partition(":")
    axes = spatial_axes(rows.shape[1:])
    moved = []
    for row, word in zip(rows, Draws(seed, "image").words(name, epoch, samples).tolist(), strict=True):
        if name == "flip":
            moved.append(np.flip(row, axes[1]) if word >> 63 else row)
        elif name == "rotate90":
            moved.append(np.rot90(row, word >> 62, axes))
        else:
            edge = int(number)
            top, left = ((part * (2 * edge + 1)) >> 32 for part in (word >> 32, word & 0xFFFFFFFF))
            padded = np.pad(row, [(edge, edge) if axis in axes else (0, 0) for axis in range(row.ndim)])
            window = [slice(None)] * row.ndim
            for axis, start in zip(axes, (top, left), strict=True):
                window[axis] = slice(start, start + row.shape[axis])
            moved.append(padded[tuple(window)])
    return np.stack(moved)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["u1", "<f4", ">f4", "<i8"])
def test_moves_as_one_by_one(shape: tuple[int, ...], dtype: str) -> None:
    rows = pictures(40, shape, dtype)
    kept = rows.copy()
    samples = np.arange(40) * 17 + 3
    for steps in (("flip",), ("rotate90",), ("crop:2",), ("crop:3", "flip", "rotate90")):
        wanted = rows
        for step in steps:
            wanted = one_by_one(step, wanted, samples, 3, 5)
        found = result(rows, FieldSteps(augment=steps), samples)
        assert np.array_equal(found, wanted)
        assert found.dtype == rows.dtype.newbyteorder("=")
        assert not np.array_equal(found, rows)
    assert np.array_equal(rows, kept), "the rows given may be those of a chunk that others use, too"


def test_all_turns_and_mirrors_happen_equally_often() -> None:
    rows = np.repeat(pictures(1, (3, 3)), 4000, axis=0)
    found = result(rows, FieldSteps(augment=("flip", "rotate90")))
    kinds, counts = np.unique(found.reshape(4000, -1), axis=0, return_counts=True)
    assert len(kinds) == 8
    assert counts.min() > 400


def test_crop_reaches_every_place_and_brings_in_zeros() -> None:
    found = result(np.full((2000, 4, 4), 9, np.uint8), FieldSteps(augment=("crop:1",)))
    assert len(np.unique(found.reshape(2000, -1), axis=0)) == 9
    assert set(np.unique(found)) == {0, 9}


def test_noise_comes_after_normalising() -> None:
    rows = pictures(30, (7, 5))
    plain = result(rows, FieldSteps(mean=(100.0,), std=(50.0,)))
    noisy = result(rows, FieldSteps(mean=(100.0,), std=(50.0,), augment=("noise:0.25",)))
    words = Draws(5, "image").words("noise", 3, np.arange(30))
    wanted = plain + np.float32(0.25) * normals(words, 0, 35).reshape(rows.shape)
    assert np.array_equal(noisy, wanted)


def test_noise_of_large_samples() -> None:
    noise = result(np.zeros((2, 300, 301), np.float32), FieldSteps(augment=("noise:2",)), [4, 9])
    words = Draws(5, "image").words("noise", 3, np.array([4, 9]))
    assert np.array_equal(noise.reshape(2, -1), 2 * normals(words, 0, 300 * 301))


def test_large_samples_are_single_blocks() -> None:
    """More values in a sample than a block has."""
    rows = pictures(3, (300, 300, 3))
    samples = np.array([2, 4, 9])
    assert np.array_equal(
        result(rows, FieldSteps(augment=("flip",)), samples), one_by_one("flip", rows, samples, 3, 5)
    )


@settings(deadline=None)
@given(st.permutations(range(12)), st.integers(1, 12), st.integers(0, 5), st.integers(0, 2**63 - 1))
def test_a_sample_does_not_depend_on_its_batch(order: list[int], count: int, epoch: int, seed: int) -> None:
    rows = pictures(12)
    steps = FieldSteps(augment=("flip", "crop:2", "rotate90", "noise:0.5"), dtype="float32")
    whole = result(rows, steps, np.arange(12), epoch, seed=seed)
    part = result(rows[order[:count]], steps, order[:count], epoch, seed=seed)
    assert np.array_equal(part, whole[order[:count]])


def test_epochs_and_seeds_differ() -> None:
    rows = pictures(50)
    steps = FieldSteps(augment=("crop:3",))
    found = [result(rows, steps, epoch=epoch, seed=seed).tobytes() for epoch in (0, 1) for seed in (1, 2)]
    assert len(set(found)) == 4


def test_no_augmentation_in_evaluation() -> None:
    rows = pictures(20)
    steps = FieldSteps(augment=("flip", "noise:1"), dtype="float32")
    assert np.array_equal(result(rows, steps, training=False), rows.astype(np.float32))


@pytest.mark.parametrize(
    ("augment", "shape", "message"),
    [
        (("flop",), (6, 6), "'flop' is unknown; did you mean 'flip'"),
        (("mirror",), (6, 6), "there are: crop, flip, noise, rotate90"),
        (("flip:2",), (6, 6), "flip takes no number"),
        (("crop",), (6, 6), "crop needs a number; write for example 'crop:4'"),
        (("crop:1.5",), (6, 6), "'crop:1.5', but crop needs a number"),
        (("crop:0",), (6, 6), "must be above 0"),
        (("crop:7",), (6, 6, 3), "more than the side of the samples, 6 x 6"),
        (("noise:x",), (6, 6), "noise needs a number; write for example 'noise:0.1'"),
        (("noise:nan",), (6, 6), "must be above 0"),
        (("noise:0.1",), (6, 6), "noise needs a float type, these values are uint8"),
        (("flip", "flip"), (6, 6), "'flip' twice"),
        (("flip",), (6,), r"flip needs samples .* these have \(6,\)"),
        (("rotate90",), (6, 4, 3), "rotate90 needs squares, these samples are 6 x 4"),
        (("rotate90",), (3, 6, 5), "rotate90 needs squares, these samples are 6 x 5"),
    ],
)
def test_wrong_augmentations(augment: tuple[str, ...], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"data.preprocess.image.augment.*{message}"):
        result(pictures(2, shape), FieldSteps(augment=augment))
