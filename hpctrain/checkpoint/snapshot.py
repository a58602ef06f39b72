"""A snapshot: the training state copied out of the optimizer's way, as named tensors and a JSON document.

No pickle anywhere: tensors by name for safetensors, everything else as JSON (floats round-trip exactly). The data path
and the random numbers need no state beyond the cursor, because both are functions of (seed, epoch, step, lane).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from hpctrain.errors import ConfigError

EMPTY_DIGEST = xxhash.xxh3_128_hexdigest(b"")


@dataclasses.dataclass(frozen=True)
class Cursor:
    """Where a run is: the next step is step `step_in_epoch` of epoch `epoch`."""

    step: int = 0
    """Steps taken since the beginning of the run."""
    epoch: int = 0
    step_in_epoch: int = 0
    samples_digest: str = EMPTY_DIGEST
    """Digest over the sample ids of all steps so far, in order."""
    skipped_steps: int = 0
    """Updates skipped because a loss or gradient was not finite."""

    def advanced(self, steps_per_epoch: int, samples_digest: str, skipped: bool) -> Cursor:
        """The cursor after one more step."""
        wrapped = self.step_in_epoch + 1 == steps_per_epoch
        return Cursor(
            step=self.step + 1,
            epoch=self.epoch + wrapped,
            step_in_epoch=0 if wrapped else self.step_in_epoch + 1,
            samples_digest=samples_digest,
            skipped_steps=self.skipped_steps + skipped,
        )


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The training state after `cursor.step` steps.

    Attributes:
        tensors: on the CPU and contiguous: `model.NAME` for parameters and buffers, `optimizer.INDEX.KEY` for its
            state.
        optimizer: the optimizer's parameter groups and its state entries that are no tensors, as JSON values.
    """

    cursor: Cursor
    tensors: dict[str, Tensor]
    optimizer: dict[str, Any]


def take_snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, cursor: Cursor) -> Snapshot:
    """Copy the state; the copies do not change when training goes on."""
    tensors = {f"model.{name}": _copy(tensor) for name, tensor in model.state_dict().items()}
    state = optimizer.state_dict()
    scalars: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{key}"] = _copy(value)
            else:
                scalars.setdefault(str(index), {})[key] = _to_json(value, f"state {key}")
    groups = [{key: _to_json(value, key) for key, value in group.items()} for group in state["param_groups"]]
    return Snapshot(cursor, tensors, {"groups": groups, "scalars": scalars})


def put_snapshot(snapshot: Snapshot, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the state; raises `ConfigError` where the model or the optimizer has another form than the saved one."""
    weights = {
        name.removeprefix("model."): t for name, t in snapshot.tensors.items() if name.startswith("model.")
    }
    try:
        model.load_state_dict(weights, strict=True)
        optimizer.load_state_dict(_optimizer_state(snapshot))
    except (RuntimeError, ValueError, KeyError) as error:
        found = " ".join(str(error).split())
        raise ConfigError(
            f"the checkpoint of step {snapshot.cursor.step} does not fit the Task's model or optimizer ({found}); "
            "restore the Task as it was, or begin a new run in another --dir"
        ) from error


def _optimizer_state(snapshot: Snapshot) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for index, entries in snapshot.optimizer["scalars"].items():
        state.setdefault(int(index), {}).update({key: _from_json(value) for key, value in entries.items()})
    for name, tensor in snapshot.tensors.items():
        section, _, rest = name.partition(".")
        if section == "optimizer":
            index, _, key = rest.partition(".")
            state.setdefault(int(index), {})[key] = tensor
    groups = [
        {key: _from_json(value) for key, value in group.items()} for group in snapshot.optimizer["groups"]
    ]
    return {"state": state, "param_groups": groups}


def weights_digest(model: nn.Module) -> str:
    """xxh3-128 over parameters and buffers in name order: name, dtype, shape and bytes of each."""
    return _digest(sorted(model.state_dict().items()))


def state_digest(snapshot: Snapshot) -> str:
    """xxh3-128 over all tensors of the snapshot, the optimizer's numbers and the cursor."""
    extra = repr(
        (sorted(snapshot.optimizer["scalars"].items()), snapshot.optimizer["groups"], snapshot.cursor)
    )
    return _digest(sorted(snapshot.tensors.items()), extra.encode())


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in C order, without a copy where it is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_digest(tensor: Tensor) -> str:
    """xxh3-128 of one tensor: dtype, shape and bytes."""
    return _digest([("", tensor)])


def _digest(tensors: Iterable[tuple[str, Tensor]], extra: bytes = b"") -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor))
    digest.update(extra)
    return digest.hexdigest()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _to_json(value: Any, name: str) -> Any:
    if isinstance(value, tuple):
        return {"tuple": [_to_json(item, name) for item in value]}
    if isinstance(value, list):
        return [_to_json(item, name) for item in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"the optimizer keeps {name!r} as {type(value).__name__}, which cannot be saved without pickle; keep tensors, "
        "numbers or strings there"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if isinstance(value, dict) and "tuple" in value:
        return tuple(_from_json(item) for item in value["tuple"])
    if isinstance(value, dict) and "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    return value
