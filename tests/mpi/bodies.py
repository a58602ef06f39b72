"""Bodies that must hold at any number of ranks; see `runner`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.checkpoint.restore import restore_newest
from hpctrain.checkpoint.snapshot import Cursor, put_snapshot, take_snapshot, weights_digest
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.comm.guard import LockstepGuard, OutOfStepError, StepReport
from hpctrain.comm.reducer import GradientReducer
from hpctrain.comm.world import World, mapped_libmpi
from hpctrain.data.assembler import Assembler
from hpctrain.errors import ConfigError, DataError
from hpctrain.h5.chunks import FileSource
from hpctrain.h5.packed import PackedSet
from hpctrain.resilience.signals import StopFlag
from hpctrain.resilience.watchdog import Watchdog
from hpctrain.training.evaluation import Evaluator
from hpctrain.training.model import _broadcast
from hpctrain.training.phases import Phases
from hpctrain.training.sets import on_root
from hpctrain.training.task import Task
from tests.support import small_set

NUM_LANES = 7
ALL: dict[str, Callable[[World, Path], None]] = {}


def body(function: Callable[[World, Path], None]) -> Callable[[World, Path], None]:
    ALL[function.__name__] = function
    return function


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def lane_data(lane: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Inputs (rows, 5), targets, and a weight that is not the number of rows."""
    generator = torch.Generator().manual_seed(1000 + lane)
    rows = lane % 3 + 1
    return (
        torch.randn(rows, 5, generator=generator),
        torch.randint(3, (rows,), generator=generator),
        0.5 + lane,
    )


def lane_loss(model: nn.Module, lane: int) -> tuple[torch.Tensor, float]:
    inputs, targets, weight = lane_data(lane)
    return nn.functional.cross_entropy(model(inputs), targets), weight


def reference_gradients(seed: int = 0) -> list[torch.Tensor]:
    """The gradient of the weighted mean over all lanes, in one process and in float64."""
    model = net(seed).double()
    losses = []
    for lane in range(NUM_LANES):
        inputs, targets, weight = lane_data(lane)
        losses.append(weight * nn.functional.cross_entropy(model(inputs.double()), targets))
    (sum(losses) / total_weight()).backward()
    return [parameter.grad for parameter in model.parameters()]


def total_weight() -> float:
    return sum(lane_data(lane)[2] for lane in range(NUM_LANES))


def reduce_lanes(reducer: GradientReducer, model: nn.Module, lanes: range) -> None:
    reducer.begin()
    for lane in lanes:
        loss, weight = lane_loss(model, lane)
        if lane == lanes[-1]:
            reducer.last_lane()
        (loss * weight).backward()
    reducer.finish(total_weight())


@body
def the_world_is_what_was_asked_for(world: World, folder: Path) -> None:
    everyone = world.comm.allgather((world.rank, world.size, list(world.lanes)))
    assert [rank for rank, _, _ in everyone] == list(range(world.size))
    assert [lane for _, _, lanes in everyone for lane in lanes] == list(range(NUM_LANES))
    assert world.local_size == world.size
    assert len({Path(path).resolve() for path in mapped_libmpi()}) == 1
    assert os.environ["HOROVOD_FUSION_THRESHOLD"] == "0", "whatever the environment said before"


@body
def gradients_are_the_weighted_mean_over_lanes(world: World, folder: Path) -> None:
    for bucket_bytes in (1, 300, 1 << 20):
        model = net()
        reducer = GradientReducer(model.named_parameters(), bucket_bytes)
        for _ in range(2):  # the second step must not see the first one's gradients
            reduce_lanes(reducer, model, world.lanes)
            for parameter, expected in zip(model.parameters(), reference_gradients(), strict=True):
                torch.testing.assert_close(parameter.grad.double(), expected, rtol=2e-5, atol=1e-7)
    assert reducer.num_buckets == 1


@body
def gradients_are_the_same_bits_on_every_rank_and_every_time(world: World, folder: Path) -> None:
    seen = set()
    for _ in range(6):
        model = net()
        reducer = GradientReducer(model.named_parameters(), 200)
        reduce_lanes(reducer, model, world.lanes)
        seen.add(b"".join(parameter.grad.numpy().tobytes() for parameter in model.parameters()))
    assert len(seen.union(*world.comm.allgather(seen))) == 1


@body
def the_order_of_sums_is_told(world: World, folder: Path) -> None:
    """The same on every rank and every time; another one where the values are summed in another order."""
    reducer = GradientReducer(net().named_parameters(), 200)
    first = reducer.order_of_sums(world.rank)
    assert {first} == set(world.comm.allgather(reducer.order_of_sums(world.rank)))
    if world.size > 2:  # two ranks have one order only: a + b = b + a
        turned = reducer.order_of_sums((world.rank + 1) % world.size)
        assert turned != first


@body
def half_precision_on_the_wire(world: World, folder: Path) -> None:
    model = net()
    reducer = GradientReducer(model.named_parameters(), 200, wire="fp16")
    reduce_lanes(reducer, model, world.lanes)
    for parameter, expected in zip(model.parameters(), reference_gradients(), strict=True):
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=4e-3, atol=1e-4)


@body
def half_precision_sums_do_not_overflow(world: World, folder: Path) -> None:
    """Horovod trap 5: the float16 sum of two 40,000s is inf although their mean fits."""
    weight = nn.Parameter(torch.ones(3))
    reducer = GradientReducer([("weight", weight)], 64, wire="fp16")
    reducer.begin()
    for _ in world.lanes:
        (weight.sum() * 40000.0).backward()
    reducer.finish(float(NUM_LANES))
    torch.testing.assert_close(weight.grad, torch.full((3,), 40000.0), rtol=2e-3, atol=0)


@body
def a_parameter_that_nobody_used_keeps_no_gradient(world: World, folder: Path) -> None:
    """Horovod trap 7: a zero gradient would be decayed by AdamW, where torch skips the parameter."""
    model = nn.ModuleDict({"used": nn.Linear(5, 3), "unused": nn.Linear(5, 3)})
    reducer = GradientReducer(model.named_parameters(), 1 << 20)
    reducer.begin()
    reducer.last_lane()
    model["used"](torch.ones(1, 5)).sum().backward()
    reducer.finish(float(world.size))
    assert model["unused"].weight.grad is None
    assert torch.equal(model["used"].weight.grad, torch.ones(3, 5))


@body
def a_parameter_used_on_one_rank_only(world: World, folder: Path) -> None:
    """Horovod trap 6: with groups this deadlocks. Here it gets the mean over all lanes' weights."""
    model = nn.ModuleDict({"everywhere": nn.Linear(5, 3), "rank0": nn.Linear(5, 3)})
    reducer = GradientReducer(model.named_parameters(), 40)
    reducer.begin()
    reducer.last_lane()
    total = model["everywhere"](torch.ones(1, 5)).sum()
    if world.is_root:
        total = total + model["rank0"](torch.ones(1, 5)).sum()
    total.backward()
    reducer.finish(float(world.size))
    torch.testing.assert_close(model["rank0"].weight.grad, torch.full((3, 5), 1 / world.size))


@body
def a_rank_whose_lanes_are_empty_takes_part(world: World, folder: Path) -> None:
    """The last step of an epoch may leave a rank without samples."""
    model = net()
    reducer = GradientReducer(model.named_parameters(), 100)
    reducer.begin()
    if world.is_root:
        reducer.last_lane()
        (model(torch.ones(1, 5)).sum() * 2.0).backward()
    reducer.finish(2.0)
    expected = net()
    expected(torch.ones(1, 5)).sum().backward()
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


@body
def channels_last_parameters(world: World, folder: Path) -> None:
    """Horovod trap 4: it refuses tensors that are not contiguous; the flat buckets always are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    plain.load_state_dict(model.state_dict())
    reducer = GradientReducer(model.named_parameters(), 1 << 20)
    inputs = torch.randn(2, 3, 9, 9)
    for _ in range(2):
        reducer.begin()
        reducer.last_lane()
        model(inputs.to(memory_format=torch.channels_last)).square().mean().backward()
        reducer.finish(float(world.size))
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
    plain(inputs).square().mean().backward()
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


def report(world: World, **changes: Any) -> StepReport:
    base = {
        "step": 3,
        "stop": False,
        "save_due": False,
        "samples": 2,
        "sample_hash": 5,
        "weights_hash": 9,
        "loss_sum": 1.5,
        "weight": 0.5,
    }
    return StepReport(**{**base, **changes})


@body
def a_gradient_taken_out_of_its_bucket_is_refused(world: World, folder: Path) -> None:
    """It would lose the lanes before; every rank meets it at the same place, so nobody waits."""
    weight = nn.Parameter(torch.ones(3))
    reducer = GradientReducer([("weight", weight)], 64)
    reducer.begin()
    weight.sum().backward()
    weight.grad = None
    with pytest.raises(ConfigError, match="zero_grad"):
        weight.sum().backward()


@body
def a_gradient_that_grows_after_it_was_sent_is_refused(world: World, folder: Path) -> None:
    weight = nn.Parameter(torch.ones(3))
    reducer = GradientReducer([("weight", weight)], 64)
    reducer.begin()
    reducer.last_lane()
    weight.sum().backward()
    with pytest.raises(ConfigError, match="after its bucket was sent"):
        weight.sum().backward()
    reducer.finish(1.0)


@body
def one_ranks_wish_reaches_all(world: World, folder: Path) -> None:
    last = world.rank == world.size - 1
    verdict = LockstepGuard().exchange(
        report(world, stop=last, save_due=world.is_root, sample_hash=2**64 - 1)
    )
    assert verdict.stop
    assert verdict.save_due
    assert verdict.samples == 2 * world.size
    assert verdict.sample_hash == (2**64 - 1) * world.size % 2**64
    assert verdict.loss == 3.0
    assert verdict.weight == 0.5 * world.size
    assert not LockstepGuard().exchange(report(world)).stop


@body
def a_loss_that_is_not_finite_anywhere_is_known_everywhere(world: World, folder: Path) -> None:
    for bad in (float("nan"), float("inf")):
        mine = bad if world.rank == world.size - 1 else 1.0
        assert not LockstepGuard().exchange(report(world, loss_sum=mine)).finite


@body
def ranks_apart_are_told_so_on_every_rank(world: World, folder: Path) -> None:
    if world.size == 1:
        return
    for change in ({"step": 3 + world.rank}, {"weights_hash": 9 + (world.rank == 1)}):
        with pytest.raises(OutOfStepError, match="rank 1"):
            LockstepGuard().exchange(report(world, **change))


@body
def an_error_on_rank_0_is_raised_on_all(world: World, folder: Path) -> None:
    def fail() -> None:
        raise DataError("shard-00003.h5: truncated")

    with pytest.raises(DataError, match=r"shard-00003\.h5: truncated"):
        on_root(world, fail)
    assert on_root(world, lambda: {"a": 1}) == {"a": 1}


@body
def initial_weights_come_from_rank_0(world: World, folder: Path) -> None:
    """In every dtype: Horovod's own broadcast refuses bfloat16 and bool (trap 4)."""
    model = net(seed=world.rank)
    model.register_buffer("bfloat16_values", torch.full((3,), float(world.rank), dtype=torch.bfloat16))
    model.register_buffer("bool_value", torch.tensor(world.is_root))
    model.register_buffer("no_values", torch.zeros(0))
    _broadcast(model, world)
    expected = net(seed=0)
    expected.register_buffer("bfloat16_values", torch.zeros(3, dtype=torch.bfloat16))
    expected.register_buffer("bool_value", torch.tensor(True))
    expected.register_buffer("no_values", torch.zeros(0))
    assert weights_digest(model) == weights_digest(expected)


@body
def restore_takes_the_newest_that_all_ranks_verify(world: World, folder: Path) -> None:
    store = CheckpointStore(folder / "checkpoints", attempt=1)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in (1, 2, 3):
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        if world.is_root:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            store.commit(take_snapshot(model, optimizer, Cursor(step=step)))
            if step == 3:
                flip_last_byte(folder / "checkpoints" / "step-000000003-a0001" / "tensors.safetensors")
        if step == 2:
            wanted = weights_digest(model)
    world.comm.Barrier()
    refused: list[str] = []
    found = restore_newest(
        store,
        [str(item) for item in store.committed()],
        world.rank,
        world.size,
        world.comm.allgather,
        lambda name, why: refused.append(f"{name}: {why}"),
    )
    assert found is not None
    name, snapshot = found
    assert name == "step-000000002-a0001"
    assert len(refused) == 1
    assert "tensors.safetensors" in refused[0]
    put_snapshot(snapshot, model, optimizer)
    assert weights_digest(model) == wanted
    only_listed = restore_newest(
        store, ["step-000000001-a0001"], world.rank, world.size, world.comm.allgather, lambda *_: None
    )
    assert only_listed is not None
    assert only_listed[0] == "step-000000001-a0001"


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


class Mean(Task):
    """Its metrics are known from the sample numbers."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def evaluate(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, tuple[float, float]]:
        assert not model.training
        numbers = batch["number"].double()
        text = batch["text"]
        assert bytes(text["values"].numpy()).startswith(f"sample {int(numbers[0])}".encode())
        return {"mean": (numbers.mean().item(), len(numbers)), "first": (numbers[0].item(), 1.0)}


class Frozen(Mean):
    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1))
        model[0].eval()
        return model


def _evaluator(
    task: Task, model: nn.Module, packed: PackedSet, source: FileSource, world: World, batch: int = 10
) -> Evaluator:
    def new_assembler() -> Assembler:
        return Assembler(packed, source, 2, 2, 1 << 20)

    return Evaluator(task, model, packed, new_assembler, world, batch, 1, torch.device("cpu"))


@body
def evaluation_does_not_depend_on_the_ranks(world: World, folder: Path) -> None:
    packed = on_root(world, lambda: small_set(folder / "set", 103, 8))
    with FileSource() as source:
        task = Mean()
        evaluator = _evaluator(task, task.model(), packed, source, world)
        stop = StopFlag()
        phases = Phases(Watchdog(folder, world.rank, 60, 60))
        metrics = evaluator.run(0, stop, phases)
        # one batch, for rank 0: memory is wanted for the samples that there are, not for those of a whole batch
        of_one_batch = _evaluator(task, task.model(), packed, source, world, 1 << 30).run(0, stop, phases)
    assert metrics == {"mean": 51.0, "first": np.mean(np.arange(0, 103, 10))}
    assert of_one_batch == {"mean": 51.0, "first": 0.0}


@body
def evaluation_gives_every_module_its_mode_back(world: World, folder: Path) -> None:
    """A Task may keep a module in evaluation mode for good; a restarted run would otherwise train another model."""
    packed = on_root(world, lambda: small_set(folder / "set", 20, 8))
    task = Frozen()
    model = task.model()
    with FileSource() as source:
        evaluator = _evaluator(task, model, packed, source, world)
        evaluator.run(0, StopFlag(), Phases(Watchdog(folder, world.rank, 60, 60)))
    assert [module.training for module in model.modules()] == [True, False, True]
