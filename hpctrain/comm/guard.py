"""The lockstep guard: one small exchange per step in which every rank learns what all ranks know.

Each rank contributes a row of eight 64-bit words and sees the rows of all, so every rank takes the same decision at the
same step boundary and can name the rank that differs: stop requested, save due, loss not finite, out of step, weights
apart. An allgather rather than an allreduce: a sum of step numbers or digests shows only that some rank differs.
"""

from __future__ import annotations

import dataclasses
import math
import struct

import torch

from hpctrain.errors import HpctrainError

_ROW = struct.Struct("=qqqqQQdd")
_WORDS = _ROW.size // 8


class OutOfStepError(HpctrainError, RuntimeError):
    """The ranks are not at the same step, or their weights differ."""


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What one rank says at a step boundary."""

    step: int
    stop: bool
    save_due: bool
    samples: int
    sample_hash: int
    """Sum over the rank's lanes of a 64-bit hash of (step, lane, sample ids), modulo 2^64."""
    weights_hash: int
    """Digest of the weights before this step, or 0 where the step does not compare them."""
    loss_sum: float
    """Sum of weight x loss over the rank's lanes."""
    weight: float
    """Sum of the weights over the rank's lanes."""


@dataclasses.dataclass(frozen=True)
class StepVerdict:
    """What all ranks know after the exchange; the same on every rank."""

    stop: bool
    save_due: bool
    samples: int
    sample_hash: int
    loss: float
    """Weighted mean of the loss over all lanes; not finite where any lane's was not."""
    weight: float

    @property
    def finite(self) -> bool:
        """Whether every lane's loss was finite."""
        return math.isfinite(self.loss)


class LockstepGuard:
    """Exchanges a `StepReport` per step over Horovod."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        self._hvd = hvd

    def exchange(self, mine: StepReport) -> StepVerdict:
        """Send this rank's report and combine all.

        Raises `OutOfStepError` where the step numbers or the weight digests differ, naming the ranks.
        """
        row = torch.frombuffer(bytearray(_ROW.pack(*dataclasses.astuple(mine))), dtype=torch.int64)
        rows = self._hvd.allgather(row.view(1, _WORDS), name="guard")
        packed = rows.numpy().tobytes()
        reports = [StepReport(*values) for values in _ROW.iter_unpack(packed)]
        return combine(reports)


def combine(reports: list[StepReport]) -> StepVerdict:
    """The verdict from the reports of all ranks, in rank order."""
    _check_equal("step", [report.step for report in reports], "the ranks are out of step")
    _check_equal("weights digest", [report.weights_hash for report in reports], "the ranks' weights differ")
    weight = math.fsum(report.weight for report in reports)
    loss_sum = sum(report.loss_sum for report in reports)
    return StepVerdict(
        stop=any(report.stop for report in reports),
        save_due=any(report.save_due for report in reports),
        samples=sum(report.samples for report in reports),
        sample_hash=sum(report.sample_hash for report in reports) % 2**64,
        loss=loss_sum / weight if weight else math.nan,
        weight=weight,
    )


def _check_equal(what: str, values: list[int], message: str) -> None:
    if len(set(values)) > 1:
        shown = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[:16]))
        raise OutOfStepError(
            f"{message} ({what}: {shown}); restart from the last checkpoint. If it comes again, the Task does "
            "something that differs between ranks (a branch on the rank, a buffer that is updated from local data)"
        )
