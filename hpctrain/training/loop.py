"""The training loop: gradients of this rank's lanes, one exchange, one reduction, one update per step.

Read it from top to bottom. Everything a step decides (save, leave, skip) is decided alike on all ranks, from what the
guard exchanged, at the step boundary.
"""

from __future__ import annotations

import dataclasses
import math
import time
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.snapshot import Cursor, take_snapshot, weights_digest
from hpctrain.checkpoint.writer import CheckpointWriter
from hpctrain.comm.guard import LockstepGuard, StepReport, StepVerdict
from hpctrain.comm.reducer import GradientReducer
from hpctrain.comm.world import World
from hpctrain.config import RunConfig
from hpctrain.data.loader import LaneBatch, StepBatches
from hpctrain.errors import ConfigError, HpctrainError
from hpctrain.observe.events import EventLog
from hpctrain.resilience.faults import fault_point
from hpctrain.resilience.signals import StopFlag
from hpctrain.training.batches import chain_samples, hash_samples, to_torch
from hpctrain.training.data_path import DataPath
from hpctrain.training.evaluation import Evaluator
from hpctrain.training.model import refusing_local_statistics
from hpctrain.training.phases import Phases
from hpctrain.training.randomness import seed_lane
from hpctrain.training.schedule import Schedule
from hpctrain.training.sets import on_root
from hpctrain.training.task import Task


class NonFiniteError(HpctrainError, ArithmeticError):
    """A loss or gradient is not finite, and the run description says to stop. The same step would give it again."""

    exit_code = 65


@dataclasses.dataclass
class Run:
    """Everything the loop works on; `cursor` is the only part that it replaces."""

    config: RunConfig
    world: World
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    reducer: GradientReducer
    guard: LockstepGuard
    data: DataPath
    steps_per_epoch: int
    evaluator: Evaluator | None
    writer: CheckpointWriter
    events: EventLog
    phases: Phases
    stop: StopFlag
    device: torch.device
    cursor: Cursor
    restored_step: int = 0
    saved_step: int = -1
    """Step of the last save that was begun; the others may have to wait for rank 0 in the exchange after it."""
    last_save_s: float = dataclasses.field(default_factory=time.monotonic)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.steps_per_epoch * self.config.train.epochs


def train(run: Run) -> bool:
    """Train from the cursor to the end; True when finished, False when the ranks agreed to leave (state saved).

    Raises `NonFiniteError`, `OutOfStepError`, and whatever the Task, the data path or the storage raise.
    """
    try:
        return _train(run)
    finally:
        _tell_phases(run)


def _train(run: Run) -> bool:
    steps = run.data.loader.steps(run.cursor.epoch, run.cursor.step_in_epoch, run.config.train.epochs)
    progress = _Progress(run)
    while True:
        with run.phases("data", run.cursor.step):
            batches = next(steps, None)
        if batches is None:
            break
        verdict = take_step(run, batches)
        progress.after_step(verdict)
        if run.cursor.step_in_epoch == 0:
            run.data.tell_epoch(run.cursor.epoch - 1)
        if verdict.stop:
            return leave(run)
        if verdict.save_due:
            save(run)
        if _evaluation_due(run) and not evaluate(run):
            return leave(run)
    with run.phases("save", run.cursor.step):
        _save_now(run)
    return evaluate(run) or leave(run)


def take_step(run: Run, batches: StepBatches) -> StepVerdict:
    """One update: the weighted mean of the gradients of all lanes, applied alike on all ranks."""
    step = run.cursor.step
    fault_point("step", step)
    with run.phases("compute", step):
        first = step == run.restored_step
        with refusing_local_statistics(run.model) if first else nullcontext():
            loss_sum, weight = accumulate_gradients(run, batches.lanes)
    with run.phases("exchange after save" if run.saved_step == step else "exchange", step):
        fault_point("exchange", step)
        verdict = run.guard.exchange(_report(run, batches.lanes, loss_sum, weight))
    with run.phases("reduce", step):
        run.reducer.finish(verdict.weight)
    with run.phases("update", step):
        applied = apply_update(run, verdict)
    digest = chain_samples(run.cursor.samples_digest, step, verdict.sample_hash)
    run.cursor = run.cursor.advanced(run.steps_per_epoch, digest, skipped=not applied)
    return verdict


def accumulate_gradients(run: Run, lanes: list[LaneBatch]) -> tuple[float, float]:
    """Sum weight x gradient over this rank's lanes, in lane order; returns (sum of weight x loss, sum of weights).

    A lane may be empty in the last step of an epoch; it weighs nothing then.
    """
    run.reducer.begin()
    filled = [lane for lane in lanes if len(lane.samples)]
    loss_sum = weight_sum = 0.0
    for lane in filled:
        seed_lane(run.config.train.seed, run.cursor.step, lane.lane)
        loss, weight = _lane_loss(run, lane)
        fault_point("backward", run.cursor.step)
        if lane is filled[-1]:
            run.reducer.last_lane()
        torch.autograd.backward(loss * weight)
        loss_sum += float(loss.detach()) * weight
        weight_sum += weight
    return loss_sum, weight_sum


def apply_update(run: Run, verdict: StepVerdict) -> bool:
    """Clip, schedule and step; False where the update was skipped because something was not finite.

    The reduced gradients are the same on every rank, so their norm needs no exchange.
    """
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if not (verdict.finite and math.isfinite(float(norm))):
        return _not_finite(run, verdict.loss, float(norm))
    if run.config.train.clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(run.model.parameters(), run.config.train.clip_norm, norm)
    run.schedule.apply(run.cursor.step)
    run.optimizer.step()
    return True


def save(run: Run) -> None:
    """Take a snapshot on rank 0; a thread writes it while training goes on."""
    run.last_save_s, run.saved_step = time.monotonic(), run.cursor.step
    if run.world.is_root:
        with run.phases("save", run.cursor.step):
            run.writer.save(take_snapshot(run.model, run.optimizer, run.cursor))


def leave(run: Run) -> bool:
    """Save and leave together; always False. Raises `StorageError` where the state could not be saved."""
    with run.phases("save", run.cursor.step):
        _save_now(run)
    run.events.emit("stop", step=run.cursor.step, signal=run.stop.signal_name)
    return False


def evaluate(run: Run) -> bool:
    """Evaluate on all ranks; False where the ranks agreed to leave instead."""
    if run.evaluator is None:
        return True
    with run.phases("evaluate", run.cursor.step):
        metrics = run.evaluator.run(run.cursor.step, run.stop, run.phases)
    if metrics is None:
        return False
    run.metrics = metrics
    run.events.emit("evaluate", step=run.cursor.step, epoch=run.cursor.epoch, metrics=metrics)
    _tell_phases(run)
    return True


def _tell_phases(run: Run) -> None:
    """On rank 0, where the time went so far; `step` events say it too, about every two seconds."""
    if run.world.is_root:
        run.events.emit("phases", step=run.cursor.step, phases=run.phases.totals())


def _save_now(run: Run) -> None:
    """Save on rank 0 while all wait; its error is raised on all."""
    on_root(run.world, lambda: run.writer.save_now(take_snapshot(run.model, run.optimizer, run.cursor)))


def _lane_loss(run: Run, lane: LaneBatch) -> tuple[Tensor, float]:
    batch = to_torch(lane.samples, lane.fields, run.device)
    with torch.autocast(run.device.type, torch.bfloat16, enabled=run.config.precision.compute == "bf16"):
        result = run.task.loss(run.model, batch)
    try:
        loss, weight = result
        weight = float(weight)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{type(run.task).__name__}.loss returned {type(result).__name__}; it must return (mean loss, weight)"
        ) from error
    if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
        raise ConfigError(
            f"{type(run.task).__name__}.loss: the mean must be a scalar tensor with a gradient, got {loss!r}"
        )
    if not (weight > 0 and math.isfinite(weight)):
        raise ConfigError(
            f"{type(run.task).__name__}.loss: weight = {weight}; it must be finite and more than 0"
        )
    return loss.float().reshape(()), weight


def _report(run: Run, lanes: list[LaneBatch], loss_sum: float, weight: float) -> StepReport:
    cursor, checkpoint = run.cursor, run.config.checkpoint
    compare = cursor.step == run.restored_step or (cursor.step + 1) % run.config.comm.digest_every_steps == 0
    by_steps = checkpoint.interval_steps > 0 and (cursor.step + 1) % checkpoint.interval_steps == 0
    by_time = 0 < checkpoint.interval_s <= time.monotonic() - run.last_save_s
    return StepReport(
        step=cursor.step,
        stop=run.stop.requested,
        save_due=run.world.is_root and (by_steps or by_time),
        samples=sum(len(lane.samples) for lane in lanes),
        sample_hash=sum(hash_samples(cursor.step, lane.lane, lane.samples) for lane in lanes) % 2**64,
        weights_hash=int(weights_digest(run.model)[:16], 16) if compare else 0,
        loss_sum=loss_sum,
        weight=weight,
    )


def _not_finite(run: Run, loss: float, norm: float) -> bool:
    found = f"step {run.cursor.step}: loss {loss}, gradient norm {norm}"
    if run.config.train.on_nonfinite == "stop":
        raise NonFiniteError(
            f"{found}: not finite; lower train.learning_rate, set train.clip_norm, look at the batch's samples, or set "
            "train.on_nonfinite = 'skip' to pass over such steps"
        )
    run.events.emit("warning", message=f"{found}: not finite; update skipped on all ranks")
    return False


def _evaluation_due(run: Run) -> bool:
    every = run.config.train.evaluate_every_epochs
    at_epoch_end = run.cursor.step_in_epoch == 0 and run.cursor.epoch < run.config.train.epochs
    return every > 0 and at_epoch_end and run.cursor.epoch % every == 0


class _Progress:
    """Says on rank 0 how training goes: often at first, then every two seconds, and the last step."""

    SHARE, SHORTEST_S, LONGEST_S = 0.02, 0.1, 2.0

    def __init__(self, run: Run) -> None:
        self._run = run
        self._begun_s = self._said_s = time.monotonic()
        self._samples = 0

    def after_step(self, verdict: StepVerdict) -> None:
        run, now = self._run, time.monotonic()
        self._samples += verdict.samples
        elapsed_s = now - self._said_s
        interval_s = min(self.LONGEST_S, max(self.SHORTEST_S, self.SHARE * (now - self._begun_s)))
        at_an_end = run.cursor.step in (run.restored_step + 1, run.total_steps)
        if run.world.is_root and (elapsed_s >= interval_s or at_an_end):
            run.events.emit(
                "step",
                step=run.cursor.step,
                epoch=run.cursor.epoch,
                steps_total=run.total_steps,
                loss=verdict.loss,
                lr=run.optimizer.param_groups[0]["lr"],
                samples_per_s=self._samples / max(elapsed_s, 1e-9),
                phases=run.phases.totals(),
            )
            self._said_s, self._samples = now, 0
