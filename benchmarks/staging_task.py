"""A Task for benchmarks of staging: it takes the bytes that are read, and computes next to nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.staging_sets import FIELD
from hpctrain.training.task import Batch, Task


class Touch(Task):
    """Fits one number to the first byte of each sample."""

    def model(self) -> nn.Module:
        """One weight and one bias."""
        return nn.Linear(1, 1)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        """Mean square, and the number of samples."""
        first: Tensor = batch[FIELD][:, :1].to(torch.float32) / 255
        return (model(first) - first).square().mean(), float(len(first))
