"""What the loop needs of a Task: a model whose lanes do not mix, the same on every rank, and an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hpctrain.checkpoint.snapshot import tensor_bytes, tensor_digest
from hpctrain.comm.world import World
from hpctrain.config import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.training.randomness import seed_model
from hpctrain.training.task import Task


def build_model(task: Task, config: RunConfig, world: World, device: torch.device) -> nn.Module:
    """The Task's model on `device`, with rank 0's initial weights on every rank.

    Raises `ConfigError` for a model whose layers would mix lanes, or which has nothing to train.
    """
    seed_model(config.train.seed)
    model = task.model()
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{type(task).__name__}.model() returned {type(model).__name__}; it must return a torch.nn.Module"
        )
    _refuse_batch_statistics(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{type(task).__name__}.model() has no parameter that requires a gradient: nothing to train"
        )
    _broadcast(model, world)
    return model.to(device)


def build_optimizer(task: Task, model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """The Task's optimizer, or AdamW over all trainable parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = task.optimizer(parameters)
    if optimizer is None:
        train = config.train
        # fused: one kernel over all parameters, 1.3 ms a step instead of 7 for the emoji recipe's 1.5 M on a CPU
        return torch.optim.AdamW(parameters, train.learning_rate, weight_decay=train.weight_decay, fused=True)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates the loss inside its step, which distributed lanes do not allow; take another"
        )
    return optimizer


def choose_device(world: World) -> torch.device:
    """The GPU of this rank where torch sees any (the only one, or the one of its local rank), else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank % torch.cuda.device_count())


def _refuse_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"layer {name or 'model'!r} is {type(module).__name__}: its statistics would depend on which rank "
                "computes which lane, and differ between ranks; use GroupNorm or LayerNorm"
            )


@contextmanager
def refusing_local_statistics(model: nn.Module) -> Iterator[None]:
    """Around the first forward passes: raise `ConfigError` for buffers that they changed.

    Such a buffer (running statistics, power iterations) holds what this rank's lanes did to it: it would differ
    between ranks, and depend on the dealing of lanes.
    """
    before = {name: tensor_digest(buffer) for name, buffer in model.named_buffers()}
    yield
    for name, buffer in model.named_buffers():
        if tensor_digest(buffer) != before.get(name):
            raise ConfigError(
                f"buffer {name!r} changed in a forward pass: it would differ between ranks; use layers without running "
                "statistics (GroupNorm, LayerNorm), or parametrisations without buffers"
            )


def _broadcast(model: nn.Module, world: World) -> None:
    """Rank 0's bytes to all. As raw bytes, because Horovod's broadcast refuses bfloat16 and bool."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            buffer = bytearray(tensor_bytes(tensor))
            world.comm.Bcast(buffer, root=0)
            if buffer:
                tensor.copy_(torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape))
