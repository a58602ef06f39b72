"""What a rank does between its first and its last breath (`__main__`): set up, restore, train, write the result."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint.restore import restore_newest
from hpctrain.checkpoint.snapshot import Cursor, put_snapshot
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.writer import CheckpointWriter
from hpctrain.comm.guard import LockstepGuard
from hpctrain.comm.reducer import GradientReducer
from hpctrain.comm.world import World, lane_efficiency, start_world
from hpctrain.data.assembler import Assembler
from hpctrain.data.plan import Plan
from hpctrain.data.preprocess import Preprocessor, SampleFunction
from hpctrain.durable import replace_file
from hpctrain.h5.chunks import allow_many_files
from hpctrain.resilience.attempts import write_restored
from hpctrain.training.attempt import RankAttempt
from hpctrain.training.data_path import DataPath
from hpctrain.training.evaluation import Evaluator
from hpctrain.training.loop import Run, train
from hpctrain.training.model import build_model, build_optimizer, choose_device
from hpctrain.training.numerics import compare_with_run, differences, fingerprint
from hpctrain.training.result import write_result
from hpctrain.training.schedule import Schedule
from hpctrain.training.sets import (
    PackedSets,
    check_identity,
    make_plan,
    make_preprocessor,
    on_root,
    open_sets,
)
from hpctrain.training.staging import NodeAgent
from hpctrain.training.task import DatasetInfo, Task, has_evaluate, load_functions, load_task


def run_rank(attempt: RankAttempt) -> bool:
    """Set up, restore, train, and write the result; True when finished, False when all ranks leave."""
    torch.set_num_threads(attempt.config.precision.compute_threads)
    allow_many_files()
    with attempt.phases("start", -1):
        parts = _set_up(attempt)
        leaving = _agreed_to_leave(attempt, parts.world)
    if not leaving:
        with attempt.phases("restore", -1):
            store, cursor = _restore(attempt, parts)
            leaving = _agreed_to_leave(attempt, parts.world)
    if leaving:
        return False  # nothing new to save
    config, emit = attempt.config, attempt.events.emit
    train_set, index_s = parts.sets.train, parts.index_s
    with DataPath(
        config, train_set, parts.plan, parts.world, cursor, parts.preprocessor, parts.agent, emit, index_s
    ) as data:
        run = _assemble(attempt, parts, store, cursor, data)
        finished = train(run)
        run.writer.wait()
        if finished:
            staging = data.staging_counters()
            if parts.world.is_root:
                write_result(run, attempt.run_dir, attempt.number, staging)
    return finished


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What is there before a state is restored."""

    world: World
    agent: NodeAgent
    task: Task
    sets: PackedSets
    preprocessor: Preprocessor
    functions: dict[str, SampleFunction]
    index_s: float
    plan: Plan
    device: torch.device
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    reducer: GradientReducer


def _set_up(attempt: RankAttempt) -> _Parts:
    config = attempt.config
    world = start_world(int(attempt.start["num_ranks"]), config.lanes.num_lanes)
    agent = NodeAgent(config, world, attempt.number, attempt.events.emit)
    task = load_task(config.task.name, config.task.options, Path(attempt.start["task_dir"]))
    begun_s = time.perf_counter()
    sets: PackedSets = on_root(world, lambda: open_sets(config, attempt.run_dir / "index"))
    index_s = time.perf_counter() - begun_s
    recorded = on_root(world, lambda: _identity(attempt, sets))
    check_identity(recorded, sets.identity, attempt.run_dir)
    functions = load_functions(config, Path(attempt.start["task_dir"]))
    preprocessor = make_preprocessor(config, sets, functions, training=True)
    if world.is_root:
        for text in preprocessor.warnings:
            attempt.events.emit("warning", message=text)
    task.setup(DatasetInfo.of(sets.train, preprocessor.outputs))
    device = choose_device(world)
    model = build_model(task, config, world, device)
    optimizer = build_optimizer(task, model, config)
    bucket_bytes = int(config.comm.bucket_mib * 2**20)
    reducer = GradientReducer(model.named_parameters(), bucket_bytes, config.precision.wire)
    _announce(attempt, world, reducer.order_of_sums(world.rank))
    plan = make_plan(config, sets)
    # here, before a restored state brings the rate of its own step: the schedule takes each group's peak
    schedule = Schedule(optimizer, config.train, plan.steps_per_epoch * config.train.epochs)
    return _Parts(
        world=world,
        agent=agent,
        task=task,
        sets=sets,
        preprocessor=preprocessor,
        functions=functions,
        index_s=index_s,
        plan=plan,
        device=device,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        reducer=reducer,
    )


def _agreed_to_leave(attempt: RankAttempt, world: World) -> bool:
    """Whether any rank was asked to leave; the same on all."""
    return any(world.comm.allgather(attempt.stop.requested))


def _assemble(
    attempt: RankAttempt, parts: _Parts, store: CheckpointStore, cursor: Cursor, data: DataPath
) -> Run:
    config = attempt.config
    return Run(
        config=config,
        world=parts.world,
        task=parts.task,
        model=parts.model,
        optimizer=parts.optimizer,
        schedule=parts.schedule,
        reducer=parts.reducer,
        guard=LockstepGuard(),
        data=data,
        steps_per_epoch=parts.plan.steps_per_epoch,
        evaluator=_evaluator(attempt, parts, data),
        writer=CheckpointWriter(store, config.checkpoint.keep, attempt.events.emit),
        events=attempt.events,
        phases=attempt.phases,
        stop=attempt.stop,
        device=parts.device,
        cursor=cursor,
        restored_step=cursor.step,
    )


def _announce(attempt: RankAttempt, world: World, order_of_sums: str) -> None:
    """Say what this attempt runs on, and what differs between ranks or from the run's first attempt."""
    if world.rank != attempt.rank:
        attempt.events.emit(
            "warning", message=f"the launcher calls this rank {attempt.rank}, MPI calls it {world.rank}"
        )
    config, warnings = attempt.config, []
    allreduce = os.environ.get("HPCTRAIN_ALLREDUCE", config.comm.allreduce)
    mine = fingerprint(config.precision.compute_threads, allreduce, order_of_sums)
    all_prints = world.comm.allgather(mine)
    for rank, other in enumerate(all_prints):
        if found := differences(all_prints[0], other):
            warnings.append(f"rank {rank} computes on other numerics than rank 0 ({'; '.join(found)})")
    efficiency = lane_efficiency(config.lanes.num_lanes, world.size)
    if efficiency < 1:
        warnings.append(
            f"{config.lanes.num_lanes} lanes on {world.size} ranks: {1 - efficiency:.0%} of the rank time is idle"
        )
    if world.is_root:
        if found := compare_with_run(attempt.run_dir, mine):
            warnings.append(
                f"the run began on other numerics, bits may differ from here on: {'; '.join(found)}"
            )
        attempt.events.emit("start", attempt=attempt.number, ranks=world.size, numerics=mine)
        for text in warnings:
            attempt.events.emit("warning", message=text)


def _identity(attempt: RankAttempt, sets: PackedSets) -> dict[str, Any] | None:
    """The data identity that the run began with; recorded by its first attempt."""
    path = attempt.run_dir / "data.json"
    if path.exists():
        recorded: dict[str, Any] = json.loads(path.read_bytes())
        return recorded
    replace_file(path, json.dumps(sets.identity).encode())
    return None


def _restore(attempt: RankAttempt, parts: _Parts) -> tuple[CheckpointStore, Cursor]:
    """Load the newest checkpoint that every rank verifies into model and optimizer; the cursor to go on from."""
    world, emit = parts.world, attempt.events.emit
    admissible = list(attempt.start["checkpoints"])
    store = CheckpointStore(attempt.run_dir / "checkpoints", attempt.number, admissible)
    if world.is_root:
        store.sweep()

    def refused(name: str, reason: str) -> None:
        if world.is_root:
            store.set_aside(name)
            emit("refused_checkpoint", name=name, reason=reason)

    found = restore_newest(store, admissible, world.rank, world.size, world.comm.allgather, refused)
    cursor = Cursor() if found is None else found[1].cursor
    if found is not None:
        put_snapshot(found[1], parts.model, parts.optimizer)
    if world.is_root:
        write_restored(attempt.directory, cursor.step)
        if found is not None:
            emit("restore", name=found[0], step=cursor.step, epoch=cursor.epoch)
        elif admissible:
            emit("warning", message=f"none of {len(admissible)} checkpoints is whole: beginning from step 0")
    return store, cursor


def _evaluator(attempt: RankAttempt, parts: _Parts, data: DataPath) -> Evaluator | None:
    config, packed = attempt.config, parts.sets.evaluate
    if packed is None or not has_evaluate(parts.task):
        return None
    preprocessor = make_preprocessor(config, parts.sets, parts.functions, training=False)
    batch, seed = config.data.evaluate_batch, config.train.seed

    def new_assembler() -> Assembler:
        return data.assembler(packed, preprocessor)

    return Evaluator(parts.task, parts.model, packed, new_assembler, parts.world, batch, seed, parts.device)
