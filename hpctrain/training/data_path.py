"""The data of a run, seen from one rank: the road from the shared file to the batch, and what it says of itself."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from hpctrain.checkpoint.snapshot import Cursor
from hpctrain.comm.world import World
from hpctrain.config import RunConfig
from hpctrain.data.advice import EpochReading, advise, slowest, summarize
from hpctrain.data.assembler import Assembler
from hpctrain.data.loader import Loader
from hpctrain.data.mixing import quality
from hpctrain.data.plan import Plan
from hpctrain.data.preprocess import Preprocessor
from hpctrain.h5.chunks import FileSource
from hpctrain.h5.packed import PackedSet
from hpctrain.staging.counters import StagingCounters
from hpctrain.staging.source import StagedSource
from hpctrain.training.staging import NodeAgent

Emit = Callable[..., None]

_MIB = 1 << 20
_MAX_IO_THREADS = 16
_MIXING_SAMPLES = 4_000_000
"""Samples of a rank for which the quality of the mixing is worked out; it takes 0.6 s a million."""


class DataPath:
    """Shared file -> mirror -> chunk -> batch, for this rank's lanes. A context manager."""

    def __init__(
        self,
        config: RunConfig,
        packed: PackedSet,
        plan: Plan,
        world: World,
        cursor: Cursor,
        preprocessor: Preprocessor,
        agent: NodeAgent,
        emit: Emit,
        index_s: float = 0.0,
    ) -> None:
        self._config, self._packed, self._plan, self._world, self._emit = config, packed, plan, world, emit
        self._stack = ExitStack()
        self.files = FileSource(config.data.page_cache, lambda text: emit("warning", message=text))
        self._stack.callback(self.files.close)
        self._agent = agent
        self._stack.callback(agent.close)
        self.source = agent.open(packed, plan, cursor, self.files)
        self.io_threads = config.data.io_threads or io_threads(world, config.precision.compute_threads)
        self._budget_bytes = int(config.data.memory_budget_mib * _MIB)
        self.loader = Loader(
            packed,
            self.source,
            plan,
            world.lanes,
            self.io_threads,
            config.data.prefetch_steps,
            self._budget_bytes,
            preprocessor.fields,
        )
        self._stack.callback(self.loader.close)
        self.loader.times.add(index_s=index_s)
        self._epoch_begun_s, self._dropped_before, self._advised = time.monotonic(), 0, False
        self._tell_mixing(cursor.epoch)

    @property
    def num_samples(self) -> int:
        """Samples of the training set."""
        return self._packed.num_samples

    def staging_counters(self) -> dict[str, int]:
        """What staging did so far in the whole job; zeros without staging. Collective."""
        mine = self.source.counters if isinstance(self.source, StagedSource) else StagingCounters()
        return self._agent.total_counters(mine)

    def assembler(self, packed: PackedSet, preprocessor: Preprocessor) -> Assembler:
        """For evaluation: batches of another set, from its shared files; to be closed by the caller."""
        ahead = self._config.data.prefetch_steps
        return Assembler(packed, self.files, self.io_threads, ahead, self._budget_bytes, preprocessor.fields)

    def tell_epoch(self, epoch: int) -> None:
        """Say how the epoch that just ended was read, on rank 0 for all ranks; look ahead to the next. Collective."""
        self._agent.expect(epoch + 1)
        now_s, dropped = time.monotonic(), self.loader.dropped_chunks
        mine = EpochReading(
            self.loader.times.take(),
            now_s - self._epoch_begun_s,
            self.io_threads,
            dropped - self._dropped_before,
        )
        self._epoch_begun_s, self._dropped_before = now_s, dropped
        readings = self._world.comm.gather(mine, root=0)
        if readings is not None:
            ranks = [_rounded(reading) for reading in readings]
            said = {"message": text} if (text := summarize(epoch, readings)) else {}
            self._emit("reading", epoch=epoch, slowest=slowest(readings), ranks=ranks, **said)
            if not self._advised and (advice := advise(readings)):
                self._advised = True  # the next epoch would say it with other numbers
                self._emit("advice", message=advice)

    def _tell_mixing(self, epoch: int) -> None:
        """Say on rank 0, when it is known, how well the first epoch is mixed; training does not wait for it."""
        if not self._world.is_root or self._plan.num_samples // self._world.size > _MIXING_SAMPLES:
            return

        def tell() -> None:
            found = quality(self._plan, epoch, self._world.lanes)
            self._emit("mixing", epoch=epoch, **dataclasses.asdict(found))

        threading.Thread(target=tell, name="mixing", daemon=True).start()

    def __enter__(self) -> DataPath:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # a failed rank ends at once: waiting for stuck reads would hide why
            self._stack.close()


def io_threads(world: World, compute_threads: int) -> int:
    """Reading threads of this rank: its share of the cores it may use, less the compute threads. Collective.

    A launcher may bind each rank to cores of its own, or leave the node to all of them: a core counts for as many ranks
    as may run on it.
    """
    mine = os.sched_getaffinity(0)
    everyone = world.comm.allgather((world.rank - world.local_rank, mine))
    here = [cores for node, cores in everyone if node == world.rank - world.local_rank]
    share = sum(1 / sum(core in cores for cores in here) for core in mine)
    return max(1, min(_MAX_IO_THREADS, int(share + 1e-6) - compute_threads))


def _rounded(reading: EpochReading) -> dict[str, float]:
    """For an event."""
    seconds = {name: round(value, 4) for name, value in dataclasses.asdict(reading.times).items()}
    return {"epoch_s": round(reading.epoch_s, 4), **seconds, "dropped_chunks": reading.dropped_chunks}
