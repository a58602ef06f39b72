"""Named augmentations of whole batches: pixels are moved (`Move`), or noise is added to the finished values.

A batch of pictures (B, H, W, C) is seen as (B, H, W) of pixels, and other fields as they are: (B, H, W) or
(B, C, H, W). Either way the two axes of the picture come last, and moving a pixel moves all its channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from hpctrain.data.preprocess.draws import normals, uniform_pair
from hpctrain.data.preprocess.steps import known, where
from hpctrain.errors import ConfigError
from hpctrain.h5.scratch import Scratch
from hpctrain.h5.stats import channels_of

Array = NDArray[Any]
Words = NDArray[np.uint64]

_NOISE_VALUES: Final = 1 << 15
"""Values of a sample that get their noise at a time: what is computed for them stays in the cache."""


@dataclass(frozen=True)
class Augmentation:
    """One augmentation of the list: its name, and its number (0 where it takes none)."""

    name: str
    value: float = 0.0


def flip(pixels: Array, words: Words, _: float, out: Array, __: Scratch) -> None:
    """Mirror left and right, every second sample."""
    flipped = np.flatnonzero(words >> np.uint64(63))
    np.copyto(out, pixels)
    out[flipped] = pixels[flipped][..., ::-1]


def rotate90(pixels: Array, words: Words, _: float, out: Array, __: Scratch) -> None:
    """Turn by 0, 1, 2 or 3 quarters."""
    quarters = words >> np.uint64(62)
    np.copyto(out, pixels)
    for quarter in (1, 2, 3):
        turned = np.flatnonzero(quarters == quarter)
        out[turned] = np.rot90(pixels[turned], quarter, axes=(-2, -1))


def crop(pixels: Array, words: Words, margin: float, out: Array, scratch: Scratch) -> None:
    """Put `margin` zeros around and cut the old size out of it again, anywhere."""
    edge = int(margin)
    *outer, height, width = pixels.shape
    padded = scratch.array("padded", (*outer, height + 2 * edge, width + 2 * edge), pixels.dtype)
    padded.view(np.uint8)[...] = 0
    padded[..., edge : edge + height, edge : edge + width] = pixels
    windows = sliding_window_view(padded, (height, width), axis=(-2, -1))
    top, left = uniform_pair(words, 2 * edge + 1)
    out[...] = windows[np.arange(len(pixels)), ..., top, left, :, :]


MOVES: Final[dict[str, Callable[[Array, Words, float, Array, Scratch], None]]] = {
    "flip": flip,
    "crop": crop,
    "rotate90": rotate90,
}
"""Each writes moved pixels to its last but one argument."""


def move(rows: Array, moves: list[tuple[Augmentation, Words]], scratch: Scratch) -> Array:
    """Samples (B, *shape) after these moves, of the same shape; `rows` stays as it is."""
    shape, dtype = rows.shape, rows.dtype
    channels = channels_of(shape[1:])
    pixels = np.ascontiguousarray(rows)
    if channels is not None:
        pixels = pixels.view(np.dtype((np.void, channels * dtype.itemsize)))[..., 0]
    for number, (augmentation, words) in enumerate(moves):
        out = scratch.array(f"move {number % 2}", pixels.shape, pixels.dtype)  # the one before is still read
        MOVES[augmentation.name](pixels, words, augmentation.value, out, scratch)
        pixels = out
    return np.ascontiguousarray(pixels).view(dtype).reshape(shape)


def add_noise(values: Array, words: Words, std: float) -> None:
    """Add normal noise of this standard deviation to finished values (B, *shape), in place."""
    flat = values.reshape(len(values), -1)
    for start in range(0, flat.shape[1], _NOISE_VALUES):
        part = flat[:, start : start + _NOISE_VALUES]
        noise = normals(words, start, start + part.shape[1])
        noise *= np.float32(std)
        np.add(part, noise, out=part, casting="same_kind")


def parse_augmentations(field: str, texts: tuple[str, ...], shape: tuple[int, ...]) -> list[Augmentation]:
    """The augmentations that `flip`, `crop:4` ... stand for, for samples of this shape.

    Raises `ConfigError` for unknown names (with the nearest), wrong numbers, and shapes they do not work on.
    """
    parsed = [_parse(f"{where(field)}.augment", text) for text in texts]
    names = [item.name for item in parsed]
    for item in parsed:
        if names.count(item.name) > 1:
            raise ConfigError(f"{where(field)}.augment has {item.name!r} twice; once is enough")
        _check_shape(f"{where(field)}.augment", item, shape)
    return parsed


def _parse(at: str, text: str) -> Augmentation:
    name, colon, number = text.partition(":")
    known(at, name, [*MOVES, "noise"])
    if name in ("flip", "rotate90"):
        if colon:
            raise ConfigError(f"{at}: {text!r}, but {name} takes no number; write {name!r}")
        return Augmentation(name)
    try:
        value = float(number) if name == "noise" else int(number)
    except ValueError:
        example = "noise:0.1" if name == "noise" else "crop:4"
        raise ConfigError(
            f"{at}: {text!r}, but {name} needs a number; write for example {example!r}"
        ) from None
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{at}: {text!r}, but the number must be above 0; leave it out for none")
    return Augmentation(name, value)


def _check_shape(at: str, item: Augmentation, shape: tuple[int, ...]) -> None:
    if item.name == "noise":
        return
    if len(shape) not in (2, 3):
        raise ConfigError(
            f"{at}: {item.name} needs samples (H, W), (H, W, C) or (C, H, W), these have {shape}"
        )
    height, width = shape[:2] if channels_of(shape) is not None else shape[-2:]
    if item.name == "rotate90" and height != width:
        raise ConfigError(f"{at}: rotate90 needs squares, these samples are {height} x {width}; leave it out")
    if item.name == "crop" and item.value > min(height, width):
        raise ConfigError(
            f"{at}: crop:{item.value:g} is more than the side of the samples, {height} x {width}; take less"
        )
