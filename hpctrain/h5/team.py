"""The processes that pack one set together: what they exchange, and that none is left waiting for another.

`Alone` is one process by itself. The one over MPI is `hpctrain.comm.packing`: nothing here may load MPI.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, Final, Protocol, TypeVar

from hpctrain.errors import DataError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_POLL_S: Final = 0.1
# Of Open MPI; of MPICH, Intel MPI, Cray MPICH and `srun --mpi=pmi2`; of MVAPICH.
_SIZE_VARIABLES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


class Team(Protocol):
    """Processes numbered by `rank`; all make the same calls of `gather` and `share`, in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process; 0 publishes, reports, and shows progress."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def cores(self) -> int:
        """Cores that this process may keep busy."""
        ...

    def tick(self, activity: str, *counts: int) -> tuple[int, ...]:
        """Say how far this process is; on rank 0 gives the sums over all, of this activity.

        To be called often: raises where another process has failed.
        """
        ...

    def gather(self, part: Any) -> list[Any]:
        """The parts of all, in the order of their ranks, on rank 0; nothing elsewhere."""
        ...

    def share(self, value: Any) -> Any:
        """What rank 0 gave, on all."""
        ...

    def ending_together(self) -> contextlib.AbstractContextManager[None]:
        """Where the block raises, it is left only when all others have left theirs: nobody writes any more."""
        ...


class Alone:
    """A team of one."""

    rank = 0
    size = 1

    @property
    def cores(self) -> int:
        """All cores of the process."""
        return len(os.sched_getaffinity(0))

    def tick(self, activity: str, *counts: int) -> tuple[int, ...]:
        """The counts."""
        return counts

    def gather(self, part: Any) -> list[Any]:
        """The only part."""
        return [part]

    def share(self, value: Any) -> Any:
        """The value."""
        return value

    def ending_together(self) -> contextlib.AbstractContextManager[None]:
        """There is nobody else."""
        return contextlib.nullcontext()


def launched_processes(environ: Mapping[str, str]) -> int:
    """How many processes an MPI launcher says, in the environment, that it started together; 1 where there is none."""
    names = list(_SIZE_VARIABLES)
    # srun --mpi=pmix or cray_shasta; without an MPI plugin, srun starts processes that know nothing of each other.
    if environ.keys() & {"PMIX_RANK", "PALS_RANKID"}:
        names.append("SLURM_STEP_NUM_TASKS")
    return max((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), default=1)


def check_alike(team: Team, what: str, value: Any) -> None:
    """Raise `DataError` where `value`, which each process found for itself, is not the same on all."""
    for rank, other in enumerate(team.gather(value)):
        if other != value:
            raise DataError(
                f"process {rank} sees another {what} than process 0 ({other} and {value}); all must see the same "
                "files: put SRC on a filesystem that all nodes share, and leave it alone while it is packed"
            )


@contextlib.contextmanager
def working(team: Team, threads: int, name: str) -> Iterator[Executor]:
    """Threads (0: one per core of this process) for what is done together; they may read and compute, not write."""
    pool = ThreadPoolExecutor(threads or team.cores, thread_name_prefix=name)
    try:
        with team.ending_together():
            yield pool
    except BaseException:
        # Among several, a function of the user that hangs must not keep the error from being told.
        pool.shutdown(wait=team.size == 1, cancel_futures=True)
        raise
    pool.shutdown()


def in_order(
    pool: Executor,
    function: Callable[[_Item], _Result],
    items: Iterable[_Item],
    ahead: int,
    meanwhile: Callable[[], object],
) -> Iterator[_Result]:
    """Results in order, with at most `ahead` of them under way or waiting: memory stays bounded.

    `meanwhile` is called again and again while one is waited for.
    """
    waiting: deque[Future[_Result]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) >= ahead:
            yield _result(waiting.popleft(), meanwhile)
    while waiting:
        yield _result(waiting.popleft(), meanwhile)


def _result(future: Future[_Result], meanwhile: Callable[[], object]) -> _Result:
    while not wait([future], _POLL_S).done:
        meanwhile()
    return future.result()
