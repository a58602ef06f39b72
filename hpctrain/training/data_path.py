"""The data of a run, seen from one rank: the packed sets, opened once and broadcast, and the road to the batch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from hpctrain.checkpoint.snapshot import Cursor
from hpctrain.comm.world import World
from hpctrain.config import RunConfig
from hpctrain.data.loader import Loader
from hpctrain.data.plan import Plan
from hpctrain.errors import ConfigError, HpctrainError, StorageError
from hpctrain.h5.packed import PackedSet, open_packed
from hpctrain.h5.reader import ChunkSource, FileSource
from hpctrain.staging.mirror import Mirror
from hpctrain.staging.source import StagedSource, StagingCounters
from hpctrain.staging.stager import Stager

Emit = Callable[..., None]
Result = TypeVar("Result")


def on_root(world: World, action: Callable[[], Result]) -> Result:
    """Run `action` on rank 0 and give its result, or its error, to every rank: one rank loads the file system."""
    outcome: tuple[Result | None, HpctrainError | None] = (None, None)
    if world.is_root:
        try:
            outcome = (action(), None)
        except HpctrainError as error:
            outcome = (None, error)
    result, failure = world.comm.bcast(outcome, root=0)
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class PackedSets:
    """The packed sets of a run."""

    train: PackedSet
    evaluate: PackedSet | None

    @property
    def identity(self) -> dict[str, str | None]:
        """What a restart compares."""
        return {
            "train": self.train.identity,
            "evaluate": None if self.evaluate is None else self.evaluate.identity,
        }


def open_sets(config: RunConfig) -> PackedSets:
    """Open and check both sets (on one rank). Raises `DataError` or `ConfigError`."""
    train = open_packed(config.data.train)
    evaluate = None if config.data.evaluate is None else open_packed(config.data.evaluate)
    if evaluate is not None and (missing := sorted(set(train.fields) - set(evaluate.fields))):
        raise ConfigError(
            f"data.evaluate = {config.data.evaluate}: fields {', '.join(missing)} of the training set are missing there"
        )
    return PackedSets(train, evaluate)


def make_plan(config: RunConfig, packed: PackedSet) -> Plan:
    """The plan of a run."""
    lanes = config.lanes
    return Plan(
        packed.chunk_sizes, lanes.num_lanes, lanes.lane_batch, config.train.seed, config.data.window_chunks
    )


def io_threads(config: RunConfig, ranks_on_node: int) -> int:
    """Reading threads of this rank: as configured, else its share of the cores it may use less the compute threads."""
    if config.data.io_threads:
        return config.data.io_threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, cores // ranks_on_node - config.precision.compute_threads))


class DataPath:
    """Shared file -> mirror -> decoded chunk -> batch, for this rank's lanes. A context manager."""

    def __init__(
        self, config: RunConfig, packed: PackedSet, plan: Plan, world: World, cursor: Cursor, emit: Emit
    ) -> None:
        self._config, self._packed, self._plan, self._world, self._emit = config, packed, plan, world, emit
        self._stack = ExitStack()
        self.files = FileSource()
        self._stack.callback(self.files.close)
        self.staged: StagedSource | None = None
        self.source: ChunkSource = self.files
        if config.staging.dir is not None:
            self._stage(config.staging.dir, range(cursor.epoch, config.train.epochs))
        threads = io_threads(config, world.local_size)
        self.loader = Loader(packed, self.source, plan, world.lanes, threads, config.data.prefetch_steps)
        self._stack.callback(self.loader.close)

    @property
    def num_samples(self) -> int:
        """Samples of the training set."""
        return self._packed.num_samples

    @property
    def counters(self) -> StagingCounters:
        """What staging did so far in this process; zeros without staging."""
        return self.staged.counters if self.staged else StagingCounters()

    def _stage(self, directory: Path, epochs: range) -> None:
        try:
            mirror = Mirror(staging_directory(directory), self._packed)
        except StorageError as error:  # a full or failing disk; one that others may write to is a ConfigError
            self._emit("warning", message=f"no staging on this rank: {error}; reading the shared files")
            return
        self._stack.callback(mirror.close)
        self.source = self.staged = StagedSource(
            self.files, mirror, lambda text: self._emit("warning", message=text)
        )
        order = self._plan.staging_order(epochs, self._world.lanes)
        stager = Stager(self._packed, self.staged, order, lambda: self._report_staged(mirror))
        self._stack.callback(stager.close)

    def _report_staged(self, mirror: Mirror) -> None:
        counters = dataclasses.asdict(self.counters)
        self._emit("staging", chunks=mirror.present_chunks(), total=mirror.num_chunks, **counters)

    def __enter__(self) -> DataPath:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # a failed rank ends at once: waiting for stuck reads would hide why
            self._stack.close()


def staging_directory(configured: Path) -> Path:
    """`staging.dir` with environment variables and `~` expanded on this node.

    Raises `ConfigError` for a variable that is not set here: its name would become a folder somewhere else.
    """
    expanded = Path(os.path.expandvars(configured)).expanduser()
    if "$" in str(expanded) or not expanded.is_absolute():
        raise ConfigError(
            f"staging.dir = {configured}: {expanded} on this node; a variable is not set, or the path is not absolute"
        )
    return expanded


def check_identity(recorded: dict[str, Any] | None, found: dict[str, str | None], run_dir: Path) -> None:
    """Raise `ConfigError` where the run began on other data."""
    if recorded is not None and recorded["train"] != found["train"]:
        raise ConfigError(
            f"{run_dir}: the run began on the packed set {recorded['train']}, data.train is now {found['train']}; the "
            "weights would differ: put the old set back, or begin a new run in another --dir"
        )
