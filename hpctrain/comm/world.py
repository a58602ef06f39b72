"""The world: every rank arithmetic of a run, and the checks that the launch is what was asked for."""

from __future__ import annotations

import dataclasses
import os
import platform
from typing import Any

from hpctrain.errors import ConfigError


def deal_lanes(num_lanes: int, num_ranks: int) -> list[range]:
    """Lanes dealt to ranks in order, as evenly as they go (8 lanes on 3 ranks: 3, 3, 2).

    Raises `ConfigError` for more ranks than lanes: such a rank would have nothing to do.
    """
    if num_ranks > num_lanes:
        raise ConfigError(
            f"{num_ranks} ranks for lanes.num_lanes = {num_lanes}: a rank needs at least one lane; "
            f"start at most {num_lanes} ranks (or begin a new run with more lanes)"
        )
    share, extra = divmod(num_lanes, num_ranks)
    dealt, start = [], 0
    for rank in range(num_ranks):
        stop = start + share + (rank < extra)
        dealt.append(range(start, stop))
        start = stop
    return dealt


def lane_efficiency(num_lanes: int, num_ranks: int) -> float:
    """Share of rank time that has a lane to work on, 1 where lanes are dealt evenly."""
    return num_lanes / (num_ranks * -(-num_lanes // num_ranks))


@dataclasses.dataclass(frozen=True)
class World:
    """All ranks of an attempt, seen from one of them."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    num_lanes: int
    comm: Any = dataclasses.field(repr=False, compare=False)
    """The mpi4py communicator: for start-up, evaluation and shut-down; the steps go through Horovod."""

    @property
    def lanes(self) -> range:
        """The lanes of this rank."""
        return deal_lanes(self.num_lanes, self.size)[self.rank]

    @property
    def is_root(self) -> bool:
        """True on rank 0, which writes what is written once."""
        return self.rank == 0


def start_world(num_ranks: int, num_lanes: int) -> World:
    """Initialise MPI and Horovod, in this order, and check the launch.

    Args:
        num_ranks: ranks that were asked for.
        num_lanes: lanes of the run.

    Raises:
        ConfigError: the world has another size than was asked for, MPI was loaded without thread support, or mpi4py
            and Horovod use two different MPI libraries; the message says the mend.
    """
    # mpi4py first: Horovod would initialise MPI on a thread of its own and finalise it at shutdown, and a libmpi that
    # is already loaded also satisfies a Horovod wheel whose rpath points to another environment.
    from mpi4py import MPI

    _check_threads(MPI)
    size = MPI.COMM_WORLD.Get_size()
    if size != num_ranks:
        raise ConfigError(_explain_size(size, num_ranks))
    deal_lanes(num_lanes, size)
    import horovod.torch as hvd

    _check_one_libmpi()
    _configure_horovod()
    hvd.init()
    if hvd.size() != size or hvd.rank() != MPI.COMM_WORLD.Get_rank():
        raise ConfigError(
            f"Horovod sees rank {hvd.rank()} of {hvd.size()}, MPI rank {MPI.COMM_WORLD.Get_rank()} of {size}: Horovod "
            "was built against another MPI; run `hpctrain build-horovod --force`"
        )
    return World(hvd.rank(), size, hvd.local_rank(), hvd.local_size(), num_lanes, MPI.COMM_WORLD)


def stop_world() -> None:
    """Shut Horovod down; MPI itself is finalised by mpi4py at exit."""
    import horovod.torch as hvd

    hvd.shutdown()


def _configure_horovod() -> None:
    """What Horovod reads at init. It decides bits and deadlines, so the environment does not overrule it."""
    settings = {
        "HOROVOD_CONTROLLER": "mpi",
        "HOROVOD_CPU_OPERATIONS": "MPI",
        "HOROVOD_AUTOTUNE": "0",  # it would search the fusion threshold, and bits would vary with it
        "HOROVOD_FUSION_THRESHOLD": "0",  # fused, identical runs of 3 ranks differ (see comm.reducer)
        "HOROVOD_CYCLE_TIME": "0.2",  # ms; the default of 1 ms is waited for at every step
        # The watchdog knows which phase each rank is in; Horovod's own clock would end a rank that reads slowly.
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0",
    }
    os.environ.update(settings)
    os.environ.pop("HOROVOD_MPI_THREADS_DISABLE", None)  # asks for MPI_THREAD_SINGLE


def _check_threads(mpi: Any) -> None:
    level = mpi.Query_thread()
    if level < mpi.THREAD_MULTIPLE:
        raise ConfigError(
            f"MPI was initialised with thread level {level}, {mpi.THREAD_MULTIPLE} (MPI_THREAD_MULTIPLE) is needed "
            "because Horovod communicates from its own thread; use an MPI built with thread support"
        )


def _explain_size(size: int, num_ranks: int) -> str:
    found = f"the MPI world has {size} rank(s), {num_ranks} were asked for"
    if size != 1:
        return f"{found}: start the job with the same number as `-n`"
    return (
        f"{found}: every process is alone in its own world. The launcher and the MPI library of this "
        "environment do not speak the same protocol: use the mpirun that belongs to the library below, or under Slurm "
        f"`srun --mpi=pmix` (see `srun --mpi=list`). Library: {', '.join(mapped_libmpi()) or 'not found'}"
    )


def mapped_libmpi() -> list[str]:
    """Paths of the MPI libraries that this process has mapped (Linux; elsewhere empty)."""
    if platform.system() != "Linux":
        return []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libmpi" in line}
    return sorted(
        path
        for path in paths
        if os.path.basename(path).startswith(("libmpi.so", "libmpich.so", "libmpi_cray"))
    )


def _check_one_libmpi() -> None:
    libraries = {os.path.realpath(path) for path in mapped_libmpi()}
    if len(libraries) > 1:
        raise ConfigError(
            f"mpi4py and Horovod use different MPI libraries: {', '.join(sorted(libraries))}; rebuild "
            "Horovod for the one you launch with: `hpctrain build-horovod --force` (MPICXX selects the wrapper)"
        )
