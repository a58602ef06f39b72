"""How a rank begins and ends. Started by the launcher as `python -m hpctrain.training RUN_DIR ATTEMPT`.

It ends with a record (`hpctrain.resilience.exits`), whatever happens: finished, asked to leave, or an error. An error
on one rank aborts the job, because the others would wait for it for ever.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import torch

from hpctrain.checkpoint.restore import restore_newest
from hpctrain.checkpoint.snapshot import Cursor, Snapshot, put_snapshot
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.writer import CheckpointWriter
from hpctrain.comm.guard import LockstepGuard
from hpctrain.comm.reducer import GradientReducer
from hpctrain.comm.world import World, lane_efficiency, start_world
from hpctrain.resilience import faults
from hpctrain.resilience.exits import FailureClass
from hpctrain.resilience.signals import die_with_parent
from hpctrain.training.attempt import Attempt
from hpctrain.training.data_path import DataPath, PackedSets, check_identity, make_plan, on_root, open_sets
from hpctrain.training.evaluation import Evaluator
from hpctrain.training.loop import Run, train
from hpctrain.training.model import build_model, build_optimizer, choose_device
from hpctrain.training.numerics import compare_with_run, differences, fingerprint
from hpctrain.training.result import write_result
from hpctrain.training.schedule import Schedule
from hpctrain.training.task import DatasetInfo, Task, has_evaluate, load_task


def main(arguments: list[str]) -> NoReturn:
    """Run one rank; exits with the code of its end record."""
    die_with_parent()
    attempt = Attempt(Path(arguments[0]), int(arguments[1]))
    threading.excepthook = lambda args: attempt.abort(args.exc_value or RuntimeError("a thread failed"))
    try:
        attempt.open()
        faults.configure(attempt.rank, attempt.number)
        faults.fault_point("start")
        finished = run_rank(attempt)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the rank ends with a record of it
        attempt.abort(error)
    sys.exit(attempt.leave_together(FailureClass.DONE if finished else FailureClass.LEAVE))


def run_rank(attempt: Attempt) -> bool:
    """Set up, restore, train, and write the result; True when the run is finished."""
    config = attempt.config
    torch.set_num_threads(config.precision.compute_threads)
    with attempt.phases("start", -1):
        world = start_world(int(attempt.start["num_ranks"]), config.lanes.num_lanes)
        _announce(attempt, world)
        task = load_task(config.task.name, config.task.options, Path(attempt.start["task_dir"]))
        sets: PackedSets = on_root(world, lambda: open_sets(config))
        recorded = on_root(world, lambda: _identity(attempt, sets))
        check_identity(recorded, sets.identity, attempt.run_dir)
        task.setup(DatasetInfo.of(sets.train))
        device = choose_device(world)
        model = build_model(task, config, world, device)
        optimizer = build_optimizer(task, model, config)
    store = CheckpointStore(attempt.run_dir / "checkpoints", attempt.number)
    plan = make_plan(config, sets.train)
    # the schedule takes each group's peak before a restored state brings the rate of its own step
    schedule = Schedule(optimizer, config.train, plan.steps_per_epoch * config.train.epochs)
    with attempt.phases("restore", -1):
        snapshot = _restore(attempt, world, store)
        if snapshot is not None:
            put_snapshot(snapshot, model, optimizer)
        cursor = Cursor() if snapshot is None else snapshot.cursor
    with DataPath(config, sets.train, plan, world, cursor, attempt.events.emit) as data:
        run = Run(
            config=config,
            world=world,
            task=task,
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            reducer=GradientReducer(
                model.named_parameters(), int(config.comm.bucket_mib * 2**20), config.precision.wire
            ),
            guard=LockstepGuard(),
            data=data,
            steps_per_epoch=plan.steps_per_epoch,
            evaluator=_evaluator(attempt, world, task, model, sets, data, device),
            writer=CheckpointWriter(store, config.checkpoint.keep, attempt.events.emit),
            events=attempt.events,
            phases=attempt.phases,
            stop=attempt.stop,
            device=device,
            cursor=cursor,
            restored_step=cursor.step,
        )
        finished = train(run)
        run.writer.wait()
    if finished and world.is_root:
        write_result(run, attempt.run_dir, attempt.number)
    return finished


def _announce(attempt: Attempt, world: World) -> None:
    """Say what this attempt runs on, and what differs between ranks or from the run's first attempt."""
    if world.rank != attempt.rank:
        attempt.events.emit(
            "warning", message=f"the launcher calls this rank {attempt.rank}, MPI calls it {world.rank}"
        )
    config, warnings = attempt.config, []
    mine = fingerprint(
        config.precision.compute_threads, os.environ.get("HPCTRAIN_ALLREDUCE", config.comm.allreduce)
    )
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


def _identity(attempt: Attempt, sets: PackedSets) -> dict[str, Any] | None:
    """The data identity that the run began with; recorded by its first attempt."""
    path = attempt.run_dir / "data.json"
    if path.exists():
        recorded: dict[str, Any] = json.loads(path.read_bytes())
        return recorded
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(sets.identity), encoding="utf-8")
    os.replace(temporary, path)
    return None


def _restore(attempt: Attempt, world: World, store: CheckpointStore) -> Snapshot | None:
    """The newest checkpoint that every rank verifies; None to begin from the start."""
    if world.is_root:
        store.sweep()
    admissible = list(attempt.start["checkpoints"])

    def refused(name: str, reason: str) -> None:
        if world.is_root:
            attempt.events.emit("refused_checkpoint", name=name, reason=reason)

    found = restore_newest(store, admissible, world.rank, world.size, world.comm.allgather, refused)
    if found is None:
        if admissible and world.is_root:
            attempt.events.emit(
                "warning", message=f"none of {len(admissible)} checkpoints can be read: beginning from step 0"
            )
        return None
    name, snapshot = found
    if world.is_root:
        attempt.events.emit("restore", name=name, step=snapshot.cursor.step, epoch=snapshot.cursor.epoch)
    return snapshot


def _evaluator(
    attempt: Attempt,
    world: World,
    task: Task,
    model: torch.nn.Module,
    sets: PackedSets,
    data: DataPath,
    device: torch.device,
) -> Evaluator | None:
    if sets.evaluate is None or not has_evaluate(task):
        return None
    config = attempt.config
    return Evaluator(
        task, model, sets.evaluate, data.files, world, config.data.evaluate_batch, config.train.seed, device
    )
