"""Handwritten digits: a small convolutional net on 28 x 28 grey pictures, trained in seconds."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from hpctrain.errors import ConfigError
from hpctrain.recipes.augment import shift_pixels
from hpctrain.training.task import Batch, DatasetInfo, Task

_SIDE: Final = 28
_NUM_CLASSES: Final = 10
_BLACK: Final = 0.0


class Digits(Task):
    """Classification of fields `image` (28, 28) uint8 and `label`.

    Options: `width` channels of the first layer (a multiple of 8), `shift_pixels` by how many pixels pictures
    are moved at most, each way, while training.
    """

    def __init__(self, *, width: int = 16, shift_pixels: int = 2) -> None:
        if width < 8 or width % 8:
            raise ConfigError(f"task.options.width = {width}: must be a positive multiple of 8")
        if not 0 <= shift_pixels < _SIDE:
            raise ConfigError(
                f"task.options.shift_pixels = {shift_pixels}: must be at least 0 and less than {_SIDE}"
            )
        self._width, self._shift_pixels = width, shift_pixels
        self._mean, self._std = 0.0, 255.0

    def setup(self, dataset: DatasetInfo) -> None:
        """Take the pictures' mean and deviation; raises `ConfigError` for a set without the fields needed."""
        image = dataset.fields.get("image")
        if image is None or image.sample_shape != (_SIDE, _SIDE) or "label" not in dataset.fields:
            found = {name: field.sample_shape for name, field in dataset.fields.items()}
            raise ConfigError(
                f"the training set has fields {found}; digits needs image ({_SIDE}, {_SIDE}) and a label: "
                "make it with "
                "hpctrain data digits DIR and hpctrain pack DIR/train ..."
            )
        # One number: the field has no axis of channels.
        assert isinstance(image.mean, float)
        assert isinstance(image.std, float)
        self._mean, self._std = image.mean, image.std

    def model(self) -> nn.Module:
        """Two halving convolutions and a linear layer."""
        width = self._width
        return nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2, padding=2, bias=False),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * (_SIDE // 4) ** 2, _NUM_CLASSES),
        )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        """Mean cross entropy, and the number of samples."""
        picture = shift_pixels(
            self._pictures(batch), self._shift_pixels, fill=(_BLACK - self._mean) / self._std
        )
        label = batch["label"].long()
        return functional.cross_entropy(model(picture), label), float(len(label))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float, float]]:
        """`accuracy`: the share of pictures whose label has the largest logit."""
        label = batch["label"].long()
        right = model(self._pictures(batch)).argmax(1) == label
        return {"accuracy": (float(right.double().mean()), float(len(label)))}

    def _pictures(self, batch: Batch) -> Tensor:
        """Normalised pictures (B, 1, 28, 28)."""
        image: Tensor = batch["image"]
        return (image[:, None].float() - self._mean) / self._std
