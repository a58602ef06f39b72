"""Evaluation on all ranks: batches dealt in turn, metrics combined by weight in batch order.

The result does not depend on the number of ranks. When asked to leave, each rank stops at its next batch and all agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from hpctrain.comm.world import World
from hpctrain.data.assembler import AssembledStep, Assembler
from hpctrain.data.requests import Requests
from hpctrain.errors import ConfigError
from hpctrain.h5.packed import PackedSet
from hpctrain.resilience.faults import fault_point
from hpctrain.resilience.signals import StopFlag
from hpctrain.training.batches import to_torch
from hpctrain.training.phases import Phases
from hpctrain.training.randomness import seed_evaluation
from hpctrain.training.task import Task

Metrics = dict[str, tuple[float, float]]


class Evaluator:
    """Runs a Task's `evaluate` over a packed set."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        packed: PackedSet,
        new_assembler: Callable[[], Assembler],
        world: World,
        batch_samples: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._task, self._model, self._packed, self._new_assembler = task, model, packed, new_assembler
        self._world, self._batch_samples, self._seed, self._device = world, batch_samples, seed, device

    def run(self, step: int, stop: StopFlag, phases: Phases) -> dict[str, float] | None:
        """The metrics of the whole set; None where the ranks agreed to leave instead."""
        mine: dict[int, Metrics] = {}
        # put back one by one: a Task may keep some modules in evaluation mode for good
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with self._new_assembler() as assembler:
                numbers = range(self._world.rank, self.num_batches, self._world.size)
                rows = min(self._batch_samples, self._packed.num_samples)
                read = assembler.run([self._requests(numbers)], rows)
                for number, assembled in zip(numbers, read, strict=True):
                    if stop.requested:
                        break
                    phases.still_alive("evaluate", step)
                    fault_point("evaluate", step)
                    mine[number] = self._evaluate(number, step, assembled)
        finally:
            for module, training in modes:
                module.training = training
        everything = self._world.comm.allgather((stop.requested, mine))
        if any(leaving for leaving, _ in everything):
            return None
        batches = {number: metrics for _, part in everything for number, metrics in part.items()}
        return combine_metrics([batches[number] for number in sorted(batches)])

    @property
    def num_batches(self) -> int:
        """Evaluation batches over all ranks."""
        return -(-self._packed.num_samples // self._batch_samples)

    def _requests(self, numbers: range) -> Requests:
        """The batches of these numbers, each a run of samples in file order."""
        cuts = [(n * self._batch_samples, (n + 1) * self._batch_samples) for n in numbers]
        parts = [np.arange(begin, min(end, self._packed.num_samples)) for begin, end in cuts]
        samples = np.concatenate([np.zeros(0, np.int64), *parts])
        bounds = np.concatenate(([0], np.cumsum([len(part) for part in parts], dtype=np.int64)))
        starts = np.concatenate(([0], np.cumsum(self._packed.chunk_sizes)))
        return Requests(0, samples, bounds, np.searchsorted(starts, samples, side="right") - 1)

    def _evaluate(self, number: int, step: int, assembled: AssembledStep) -> Metrics:
        batch = to_torch(assembled.samples, assembled.fields, self._device)
        seed_evaluation(self._seed, step, number)
        with torch.no_grad():
            metrics = self._task.evaluate(self._model, batch)
        try:
            return {name: (float(mean), float(weight)) for name, (mean, weight) in metrics.items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{type(self._task).__name__}.evaluate must return {{name: (mean, weight)}}, got {metrics!r}"
            ) from error


def combine_metrics(batches: list[Metrics]) -> dict[str, float]:
    """Weighted means over batches, in their order; a metric may be missing from some."""
    names = sorted({name for metrics in batches for name in metrics})
    combined = {}
    for name in names:
        parts = [metrics[name] for metrics in batches if name in metrics]
        weight = math.fsum(weight for _, weight in parts)
        combined[name] = math.fsum(mean * weight for mean, weight in parts) / weight if weight else math.nan
    return combined
