"""Gradient reduction: flat buckets, one Horovod allreduce each, in one fixed order of sums.

Gradients live in flat float32 buckets (each parameter's `.grad` is a view), filled in the order in which backward
usually finishes them. The lanes of a rank accumulate into them in lane order; during the last lane's backward a bucket
is handed to Horovod as soon as its last gradient is there, so that communication and computation overlap. Horovod's
own tensor fusion is off: it packs whatever is ready at the moment, and with three ranks or more the same run then gave
different bits (tried: 4 results in 6 runs; without fusion, 1). Our buckets have a fixed content instead.

Behind the gradients of a bucket lies one count per parameter, of the lanes that used it: a parameter that no lane of
any rank used gets `grad = None`, as torch would have it, instead of a zero that AdamW would decay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from hpctrain.data.permutation import mix_key, random_words
from hpctrain.errors import ConfigError


@dataclasses.dataclass(eq=False)
class _Bucket:
    """A part of the gradients.

    Attributes:
        flat: float32, shape (sum of parameter sizes + number of parameters,): the gradients, then the use counts.
        views: each parameter's gradient, a view of `flat` in the parameter's shape.
    """

    name: str
    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    pending: int = 0
    handle: Any = None
    wire: Tensor | None = None

    @property
    def gradients(self) -> Tensor:
        return self.flat[: -len(self.parameters)]

    @property
    def use_counts(self) -> Tensor:
        return self.flat[-len(self.parameters) :]


class GradientReducer:
    """Sums the lanes' weighted gradients over all ranks.

    A step is `begin()`, one backward of `weight * loss` per lane (`last_lane()` before the last one), `finish()`.

    Args:
        parameters: the model's (name, parameter) pairs, in the same order on every rank.
        bucket_bytes: size of a bucket; a larger parameter gets one of its own.
        wire: format of the gradients on the network.

    Raises `ConfigError` for parameters that are not float32.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        bucket_bytes: int,
        wire: Literal["fp32", "fp16"] = "fp32",
    ) -> None:
        import horovod.torch as hvd

        self._hvd, self._wire = hvd, wire
        self._buckets = _make_buckets([item for item in parameters if item[1].requires_grad], bucket_bytes)
        self._armed = False
        for bucket in self._buckets:
            for position, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(_UseHook(self, bucket, position))  # type: ignore[no-untyped-call]

    @property
    def num_buckets(self) -> int:
        """Allreduce calls per step."""
        return len(self._buckets)

    def order_of_sums(self, rank: int) -> str:
        """A digest that tells the order in which the ranks' values are summed, for buckets of these sizes.

        The algorithm that MPI takes depends on its version, the message size and the number of ranks, and MPI does
        not say which it took. Float32 sums of fixed values of mixed magnitude do: another order rounds differently.
        """
        digest = xxhash.xxh3_64()
        for bucket in self._buckets:
            words = random_words(mix_key(rank), len(bucket.flat))
            scale = np.exp2((words % np.uint64(16)).astype(np.float32))
            values = (words >> np.uint64(40)).astype(np.float32) * scale
            probe = torch.from_numpy(values).to(bucket.flat.device)
            self._hvd.allreduce_(probe, name=f"order.{bucket.name}", op=self._hvd.Sum)
            digest.update(probe.cpu().numpy().data)
        return digest.hexdigest()

    def begin(self) -> None:
        """Zero the gradients and point every parameter's `.grad` into its bucket."""
        self._armed = False
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.handle = None
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view

    def last_lane(self) -> None:
        """The next backward is the last one of this rank: buckets may be sent as they complete."""
        self._armed = self._wire == "fp32"
        for bucket in self._buckets:
            bucket.pending = len(bucket.parameters)

    def finish(self, total_weight: float) -> None:
        """Wait for the sums and turn them into the gradient of the weighted mean.

        Args:
            total_weight: the sum of the lanes' weights over all ranks; more than 0.
        """
        self._armed = False
        for bucket in self._buckets:
            if bucket.handle is None:
                self._send(bucket, total_weight)
        for bucket in self._buckets:
            self._receive(bucket, total_weight)

    def _send(self, bucket: _Bucket, total_weight: float) -> None:
        if self._wire == "fp16":
            # the mean goes on the wire, not the sum: float16 ends at 65,504 (sums of many ranks reach it)
            bucket.gradients.div_(total_weight)
            bucket.wire = bucket.flat.half()
        else:
            bucket.wire = bucket.flat
        bucket.handle = self._hvd.allreduce_async_(bucket.wire, name=bucket.name, op=self._hvd.Sum)

    def _receive(self, bucket: _Bucket, total_weight: float) -> None:
        self._hvd.synchronize(bucket.handle)
        if self._wire == "fp16":
            assert bucket.wire is not None
            bucket.flat.copy_(bucket.wire)
        else:
            bucket.gradients.div_(total_weight)
        bucket.wire = None
        for parameter, used in zip(bucket.parameters, bucket.use_counts.tolist(), strict=True):
            if used == 0:
                parameter.grad = None

    def on_accumulated(self, bucket: _Bucket, position: int) -> None:
        """Called by autograd when a parameter's gradient of one backward is complete.

        Raises `ConfigError` where the sum over lanes would silently be wrong: the gradient was taken out of its
        bucket (`zero_grad()` in a Task), or grows after its bucket was sent (several backward passes in one loss, as
        reentrant checkpointing does).
        """
        if bucket.parameters[position].grad is not bucket.views[position]:
            raise ConfigError(
                "a gradient was replaced within a step: a Task must not call zero_grad(), set .grad, or call backward "
                "with create_graph; the loop does what is needed"
            )
        if bucket.handle is not None:
            raise ConfigError(
                "a gradient grew after its bucket was sent: loss() must leave one backward pass to the loop; use "
                "torch.utils.checkpoint with use_reentrant=False, and no backward() in a Task"
            )
        bucket.use_counts[position] += 1
        if self._armed:
            bucket.pending -= 1
            if bucket.pending == 0:
                self._send(bucket, 1.0)


class _UseHook:
    """The hook of one parameter (a class, so that it holds no frame alive)."""

    def __init__(self, reducer: GradientReducer, bucket: _Bucket, position: int) -> None:
        self._reducer, self._bucket, self._position = reducer, bucket, position

    def __call__(self, _: Tensor) -> None:
        self._reducer.on_accumulated(self._bucket, self._position)


def _make_buckets(parameters: list[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[_Bucket]:
    """Parameters in reverse order (backward finishes the last layers first), cut at `bucket_bytes`."""
    for name, parameter in parameters:
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name} is {parameter.dtype}: parameters must be float32; for faster arithmetic set "
                "precision.compute = 'bf16', which keeps float32 weights"
            )
    groups: list[list[nn.Parameter]] = []
    filled = 0
    for _, parameter in reversed(parameters):
        nbytes = parameter.numel() * 4
        if not groups or filled + nbytes > bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += nbytes
    return [_make_bucket(f"gradients.{number}", group) for number, group in enumerate(groups)]


def _make_bucket(name: str, parameters: list[nn.Parameter]) -> _Bucket:
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes) + len(parameters), device=parameters[0].device)
    parts = torch.split(flat[: sum(sizes)], sizes)
    views = [_view_like(part, parameter) for part, parameter in zip(parts, parameters, strict=True)]
    return _Bucket(name, parameters, flat, views)


def _view_like(part: Tensor, parameter: Tensor) -> Tensor:
    """`part` in the shape of the parameter, and with its strides (channels_last among them) where they are dense.

    Autograd accumulates in place only into a gradient that is laid out like its parameter.
    """
    if parameter.is_contiguous() or not _is_dense(parameter):
        return part.view(parameter.shape)
    return part.as_strided(parameter.shape, parameter.stride())


def _is_dense(parameter: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
