"""The Task: what a user writes.

    class Digits(Task):
        def model(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

        def loss(self, model, batch):
            mean = F.cross_entropy(model(batch["image"].float()), batch["label"])
            return mean, len(batch["label"])

Named in the run description as `module:Class`; the module is looked up beside the run description first.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.config import RunConfig
from hpctrain.data.preprocess import SampleFunction
from hpctrain.errors import ConfigError
from hpctrain.h5.fields import Field
from hpctrain.h5.packed import PackedSet

Batch = dict[str, Any]
"""Dense field: tensor (B, ...) in the stored dtype. Ragged field: {"values": 1-D tensor, "offsets": int64 (B + 1,)}.
`id`: int64 (B,), the global sample ids."""


@dataclass(frozen=True)
class DatasetInfo:
    """What a Task may know of its packed training set."""

    fields: dict[str, Field]
    """By name: dtype, shape of a sample, mean and standard deviation."""
    classes: list[str] | None
    """Names of the classes, by label, where the set has them."""
    num_samples: int

    @classmethod
    def of(cls, packed: PackedSet, fields: dict[str, Field] | None = None) -> DatasetInfo:
        """The description of a set; `fields`: what batches have after preprocessing, where there is any."""
        classes = None if packed.classes is None else list(packed.classes)
        return cls(dict(packed.fields if fields is None else fields), classes, packed.num_samples)


class Task:
    """Base class of what is trained. `model` and `loss` must be written; the rest may.

    torch's, NumPy's and Python's random numbers are seeded before each micro-batch from (seed, step, lane): a Task
    uses them freely, and the same micro-batch gets the same numbers on whatever rank it is computed.
    """

    def __init__(self, **options: Any) -> None:
        """Takes `[task.options]` of the run description; unknown ones are refused."""
        if options:
            raise TypeError(f"{type(self).__name__} takes no options, got {', '.join(sorted(options))}")

    def setup(self, dataset: DatasetInfo) -> None:
        """Called once, before `model`, with the description of the training set."""

    def model(self) -> nn.Module:
        """Build the model, with float32 parameters. Called once per rank, with torch seeded alike on all."""
        raise NotImplementedError(f"{type(self).__name__} must define model()")

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        """The mean loss of one micro-batch (a scalar tensor) and its weight (samples, or tokens)."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(model, batch)")

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
        """The optimizer; None stands for AdamW with the run description's learning rate and weight decay.

        The schedule multiplies the learning rate that each parameter group begins with.
        """
        return None

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float, float]]:
        """Metrics of one evaluation batch: name -> (mean, weight). Without it there is no evaluation."""
        raise NotImplementedError(f"{type(self).__name__} defines no evaluate(model, batch)")


def has_evaluate(task: Task) -> bool:
    """Whether the Task defines `evaluate`."""
    return type(task).evaluate is not Task.evaluate


def load_task(name: str, options: dict[str, Any], folder: Path) -> Task:
    """Import `module:Class`, looked up in `folder` first, and construct it.

    Raises `ConfigError` saying what cannot be imported and why.
    """
    module, class_name = _import("task.name", name, folder)
    kind = getattr(module, class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        classes = {key: value for key, value in vars(module).items() if isinstance(value, type)}
        near = [key for key, value in classes.items() if issubclass(value, Task) and value is not Task]
        raise ConfigError(
            f"task.name = {name!r}: {module.__name__} has no Task of that name; it has {near or 'none'}"
        )
    try:
        return kind(**options)
    except TypeError as error:
        raise ConfigError(f"task.options = {options!r}: {error}") from error


def load_functions(config: RunConfig, folder: Path) -> dict[str, SampleFunction]:
    """The functions that preprocessing calls, by the name that the run description has for them.

    Raises `ConfigError` saying what cannot be imported and why.
    """
    functions: dict[str, SampleFunction] = {}
    for field, section in config.data.preprocess.items():
        if section.function is None:
            continue
        key = f"data.preprocess.{field}.function"
        module, name = _import(key, section.function, folder)
        function = getattr(module, name, None)
        if not callable(function):
            raise ConfigError(f"{key} = {section.function!r}: {module.__name__} has no function of that name")
        functions[section.function] = function
    return functions


def _import(key: str, value: str, folder: Path) -> tuple[ModuleType, str]:
    """The module of `module:name`, looked up in `folder` first, and the name."""
    module_name, _, name = value.partition(":")
    if str(folder) not in sys.path[:1]:
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(module_name), name
    except Exception as error:
        raise ConfigError(
            f"{key} = {value!r}: importing {module_name} failed: {type(error).__name__}: {error}; it was looked up "
            f"in {folder} and in the installed packages"
        ) from error
