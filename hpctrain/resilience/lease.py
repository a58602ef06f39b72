"""One owner of a run directory at a time.

On one machine the kernel's lock on `owner.lock` decides: it ends with its holder, however that ends, and no
stale lock file can block a later run. On a shared filesystem such a lock may be local to a node, so
`owner.json` also holds a heartbeat: an owner on another host counts as alive while its heartbeat moves.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from hpctrain.errors import ConfigError, StorageError
from hpctrain.resilience.attempts import read_json, write_json

HEARTBEAT_S = 5.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Owner:
    """`owner.json`. `heartbeat` only counts: clocks of two hosts need not agree."""

    host: str
    pid: int
    boot_id: str
    attempt: int
    heartbeat: int

    def __str__(self) -> str:
        """Host, pid and attempt for a message."""
        return f"host {self.host}, pid {self.pid}, attempt {self.attempt}"


class Lease:
    """Ownership of `run_dir`, from `acquire` until `release` or the end of the process."""

    def __init__(self, run_dir: Path, observe_s: float = 3 * HEARTBEAT_S) -> None:
        self._run_dir = run_dir
        self._observe_s = observe_s
        self._descriptor: int | None = None
        self._owner = Owner(socket.gethostname(), os.getpid(), boot_id(), 0, 0)
        self._beaten_s = 0.0

    def acquire(self) -> Owner | None:
        """Become the owner; returns the dead owner that was taken over, if there was one.

        Raises:
            ConfigError: a live process owns the directory.
            StorageError: the lock file cannot be made.
        """
        path = self._run_dir / "owner.lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise StorageError(f"{path}: cannot be made: {error.strerror}; choose another --dir") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            previous = self._refuse_if_alive_elsewhere()
        except BlockingIOError:
            os.close(descriptor)
            raise self._in_use(self._read()) from None
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self.beat(force=True)
        return previous

    def beat(self, attempt: int | None = None, force: bool = False) -> None:
        """Show that the owner lives; writes at most every `HEARTBEAT_S` unless the attempt is new."""
        now_s = time.monotonic()
        new_attempt = attempt is not None and attempt != self._owner.attempt
        if not (force or new_attempt or now_s - self._beaten_s >= HEARTBEAT_S):
            return
        self._beaten_s = now_s
        number = self._owner.attempt if attempt is None else attempt
        self._owner = Owner(
            self._owner.host, self._owner.pid, self._owner.boot_id, number, self._owner.heartbeat + 1
        )
        # A full disk must not end the run: at worst a supervisor on another host thinks this one dead.
        with contextlib.suppress(StorageError):
            write_json(self._run_dir / "owner.json", asdict(self._owner))

    def release(self) -> None:
        """Give the directory back; a second call changes nothing."""
        if self._descriptor is None:
            return
        (self._run_dir / "owner.json").unlink(missing_ok=True)
        os.close(
            self._descriptor
        )  # the lock file itself stays: removing it would let two owners lock two files
        self._descriptor = None

    def __enter__(self) -> Self:
        """Return the lease itself; `acquire` is called apart, because it tells whom it took over."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release."""
        self.release()

    def _read(self) -> Owner | None:
        raw = read_json(self._run_dir / "owner.json")
        try:
            return None if raw is None else Owner(**raw)
        except TypeError:
            return None

    def _refuse_if_alive_elsewhere(self) -> Owner | None:
        """With the lock ours: an owner of this boot is dead, one of another if its heartbeat stands still."""
        previous = self._read()
        if previous is None or previous.boot_id == self._owner.boot_id:
            return previous
        deadline_s = time.monotonic() + self._observe_s
        while time.monotonic() < deadline_s:
            time.sleep(min(0.2, self._observe_s / 10))
            now = self._read()
            if now is None:
                return previous  # it released the directory just now
            if now != previous:
                raise self._in_use(now)
        return previous

    def _in_use(self, owner: Owner | None) -> ConfigError:
        who = "another process" if owner is None else str(owner)
        how = (
            "wait for it to end" if owner is None else f"wait for it, or end it there with `kill {owner.pid}`"
        )
        return ConfigError(
            f"run directory {self._run_dir} is in use by {who}; {how}, or choose another --dir"
        )


def boot_id() -> str:
    """What tells this boot of this kernel from all others; the host name where there is no such number."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()
