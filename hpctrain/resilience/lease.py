"""One owner of a run directory at a time.

On one machine the kernel's lock on `owner.lock` decides: it ends with its holder, however that ends, and no
stale lock file can block a later run. On a shared filesystem such a lock may be local to a node, so
`owner.json` also holds a heartbeat: an owner on another host counts as alive while its heartbeat moves.

Under Slurm the job decides first. A job that was requeued takes the directory from its own earlier start at once:
where that start still runs, it is a zombie on a node that Slurm lost sight of, and may even hold the lock. So an
owner can lose the directory without having done anything, and asks at every beat whether it did (`Lease.check`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from hpctrain.errors import ConfigError, HpctrainError, StorageError
from hpctrain.resilience.attempts import newest_attempt, read_json, started_after, write_json
from hpctrain.resilience.lockfile import LockFile, exclusive
from hpctrain.resilience.owner import Owner, in_use, in_use_by_job, requeued_since

HEARTBEAT_S = 5.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_GUARD_TIMEOUT_S = 10.0


class LeaseLostError(HpctrainError, RuntimeError):
    """Another supervisor owns the run directory now: end all processes, write nothing more to it, do not requeue."""

    # The code of "never retried", as for a directory that is refused at the start. 75 would ask whoever reads it
    # (a batch script, Slurm's RequeueExit) to start the job again, against the one that took over.
    exit_code: ClassVar[int] = ConfigError.exit_code


@dataclass(frozen=True)
class JobIdentity:
    """A start of a Slurm job: its id, and how often it was requeued before (SLURM_RESTART_COUNT)."""

    id: str
    restart: int


class Lease:
    """Ownership of `run_dir`, from `acquire` until `release`, the end of the process, or its loss.

    Args:
        run_dir: the run directory.
        job: the Slurm job of this process; None outside Slurm.
        observe_s: how long a heartbeat must stand still for its owner to count as dead.
        is_alive: asks Slurm whether a job is pending or running; None: it does not answer, or knows nothing.
    """

    def __init__(
        self,
        run_dir: Path,
        job: JobIdentity | None = None,
        observe_s: float = 3 * HEARTBEAT_S,
        *,
        is_alive: Callable[[str], bool | None] = lambda _job: None,
    ) -> None:
        self._run_dir, self._lock = run_dir, LockFile(run_dir / "owner.lock")
        self._observe_s = observe_s
        self._is_alive = is_alive
        job = job or JobIdentity("", 0)
        self._owner = Owner(socket.gethostname(), os.getpid(), boot_id(), 0, 0, job.id, job.restart)
        self._deposed: Owner | None = None
        self._attempt = 0  # the newest that is ours, or was there before us
        self._beaten_s = 0.0

    def acquire(self) -> Owner | None:
        """Become the owner; returns the owner that was taken over, if there was one: dead, or a zombie.

        Raises:
            ConfigError: a live process owns the directory, a live job, or a later start of this one.
            StorageError: the lock or `owner.json` cannot be made.
        """
        try:
            while not self._take_over(previous := self._dead_owner()):
                self._lock.release()  # another was faster: decide anew, with that one as the owner
        except BaseException:
            self._lock.release()
            raise
        # After the name in owner.json, so that whoever starts a newer attempt has been able to read it.
        self._attempt = newest_attempt(self._run_dir)
        return previous

    def beat(self, attempt: int | None = None) -> None:
        """Show that the owner lives, after a `check`; does so at most every `HEARTBEAT_S` unless the attempt is new.

        A new attempt is told after its directory was made and before its start record is written (see `check`).

        Raises:
            LeaseLostError: another supervisor took over; nothing was written.
        """
        number = self._owner.attempt if attempt is None else attempt
        if number == self._owner.attempt and time.monotonic() - self._beaten_s < HEARTBEAT_S:
            return
        self._check(number)
        self._attempt = max(self._attempt, number)
        # A full disk must not end the run: at worst a supervisor on another host thinks this one dead.
        with contextlib.suppress(StorageError):
            self._write(number)

    def check(self) -> None:
        """Whether the directory is still ours; to be called before a launch and before an end record is written.

        `owner.json` alone cannot tell: between reading it and writing it again, another may have written it, and a
        node that was cut off may write what it decided minutes ago. So the new owner overlooks the name of whom it
        deposed, and the old one learns of its loss from what nobody can overwrite, the numbers of attempts. In that
        race one of the two always notices, because each does first what the other looks for last: the new owner
        writes its name and then takes a number; the old one takes a number, then reads the name, and only then
        writes the start record that makes the number count.

        Raises:
            LeaseLostError: another supervisor took over.
        """
        self._check(self._owner.attempt)

    def release(self, keep_claim: bool = False) -> None:
        """Give the directory back, if it is still ours; a second call changes nothing.

        Args:
            keep_claim: leave the name in it. The job comes back, and no other job is to take its place meanwhile.
        """
        if not self._lock.is_held:
            return
        # What cannot be removed costs the next owner a wait for a heartbeat, not this one its result.
        with contextlib.suppress(LeaseLostError, OSError):
            self.check()
            if not keep_claim:
                (self._run_dir / "owner.json").unlink(missing_ok=True)
        self._lock.release()

    def __enter__(self) -> Self:
        """Return the lease itself; `acquire` is called apart, because it tells whom it took over."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release."""
        self.release()

    def _check(self, attempt: int) -> None:
        now = self._read()  # missing or torn: the next beat mends it
        if now is not None and not (now.is_same(self._owner) or self._is_deposed(now)):
            raise self._lost(f"is now owned by another supervisor ({now})")
        try:
            newer = [number for number in started_after(self._run_dir, self._attempt) if number != attempt]
        except OSError:  # a filesystem that does not answer now ends no run: the next beat asks again
            return
        if newer:
            raise self._lost(f"has attempt {newer[-1]}, which another supervisor started")

    def _is_deposed(self, owner: Owner) -> bool:
        return owner.is_earlier_start_of(self._owner) or (
            self._deposed is not None and owner.is_same(self._deposed)
        )

    def _lost(self, what: str) -> LeaseLostError:
        return LeaseLostError(
            f"run directory {self._run_dir} {what}; this one ({self._owner}) ends its processes and leaves it alone"
        )

    def _write(self, attempt: int) -> None:
        self._beaten_s = time.monotonic()
        self._owner = replace(self._owner, attempt=attempt, heartbeat=self._owner.heartbeat + 1)
        write_json(self._run_dir / "owner.json", asdict(self._owner))

    def _read(self) -> Owner | None:
        raw = read_json(self._run_dir / "owner.json")
        try:
            return None if raw is None else Owner(**raw)
        except TypeError:
            return None

    def _dead_owner(self) -> Owner | None:
        """Whom to take over from: dead, a zombie, or nobody. Raises `ConfigError`: the owner is alive."""
        locked = self._lock.try_take()
        owner = self._read()
        if owner is not None:
            if owner.is_earlier_start_of(self._owner):
                return owner
            if self._owner.is_earlier_start_of(owner):
                raise requeued_since(self._run_dir, owner, self._owner.restart)
            if owner.job and owner.job != self._owner.job:
                alive = self._is_alive(owner.job)
                if alive:
                    raise in_use_by_job(self._run_dir, owner)
                if alive is False and (locked or not self._is_on_this_host(owner)):
                    return owner
        if not locked:
            raise in_use(self._run_dir, owner)
        # The lock of a process of this boot ended with it, where there are locks.
        if owner is not None and (owner.boot_id != self._owner.boot_id or not self._lock.is_real):
            self._refuse_if_heart_beats(owner)
        return owner

    def _refuse_if_heart_beats(self, owner: Owner) -> None:
        deadline_s = time.monotonic() + self._observe_s
        while time.monotonic() < deadline_s:
            time.sleep(min(0.2, self._observe_s / 10))
            now = self._read()
            if now is None:
                return  # it released the directory just now
            if now != owner:
                raise in_use(self._run_dir, now)

    def _take_over(self, previous: Owner | None) -> bool:
        """The change of owner, by one at a time; False where another was faster since `previous` was read.

        Beats are outside the guard on purpose: a zombie whose write hangs would hold it for ever.
        """
        try:
            with exclusive(self._run_dir / ".owner.guard", _GUARD_TIMEOUT_S):
                now = self._read()
                changed = now is not None and (previous is None or not now.is_same(previous))
                if changed or self._lock.is_replaced():
                    return False
                if not self._lock.is_held:
                    self._lock.replace()
                self._deposed = previous
                self._write(0)
                return True
        except TimeoutError as error:
            raise in_use(self._run_dir, None) from error

    def _is_on_this_host(self, owner: Owner) -> bool:
        return (owner.host, owner.boot_id) == (self._owner.host, self._owner.boot_id)


def boot_id() -> str:
    """What tells this boot of this kernel from all others; the host name where there is no such number."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()
