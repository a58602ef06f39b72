"""The learning rate as a function of the step: nothing to save."""

from __future__ import annotations

import math

import torch

from hpctrain.config import TrainSection


def lr_factor(step: int, total_steps: int, train: TrainSection) -> float:
    """Factor of the peak learning rate at `step` (from 0): linear warm-up, then a cosine to `min_lr_fraction`.

    The cosine follows Loshchilov and Hutter, "SGDR" (ICLR 2017), with one period and no restart.
    """
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, total_steps - train.warmup_steps)
    floor = train.min_lr_fraction
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Schedule:
    """Sets the learning rate of every parameter group before a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, train: TrainSection, total_steps: int) -> None:
        self._optimizer, self._train, self._total_steps = optimizer, train, total_steps
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]

    def apply(self, step: int) -> float:
        """Set the rates for `step`; returns that of the first group."""
        factor = lr_factor(step, self._total_steps, self._train)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        return self._peaks[0] * factor
