"""How a rank ends: a durable record, not an exit code.

Launchers do not carry exit codes faithfully (`srun --kill-on-bad-exit` turns 71 or 65 into 143; mpirun
turns 75 and 65 into 75). So each rank writes `ranks/N.json` as its last deed; a rank without one was
killed. The supervisor reads all of them and takes the gravest.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
import traceback as traceback_module
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError


class FailureClass(StrEnum):
    """How a rank, or a whole attempt, ended. Declared in order of gravity, the gravest first."""

    USER = "user"
    """Usage, bad source data, bad configuration: the same again will fail the same way."""
    HANG = "hang"
    """Found by the watchdog."""
    IO = "io"
    """I/O failed after its retries, or a bad mirror."""
    BUG = "bug"
    """An uncaught exception."""
    KILLED = "killed"
    """No record: out of memory, a segmentation fault, a dead node, SIGKILL."""
    OTHER = "other"
    """Anything else (an unexpected exit, a launcher's own error); treated as killed."""
    PEER = "peer"
    """Lost another rank; never the cause."""
    LEAVE = "leave"
    """State saved, asked to leave."""
    DONE = "done"
    """Finished."""

    @property
    def gravity(self) -> int:
        """0 is the gravest."""
        return _GRAVITY[self]

    @property
    def exit_code(self) -> int:
        """The code a process of this class ends with, unless its record says otherwise."""
        return _EXIT_CODES[self]


_GRAVITY = {failure: place for place, failure in enumerate(FailureClass)}
# Killed ranks have no code of their own. The supervisor gives up with 72: 128 + 9 would look as if it had
# itself been killed.
_EXIT_CODES = {
    FailureClass.USER: 78,
    FailureClass.HANG: 71,
    FailureClass.IO: 74,
    FailureClass.BUG: 70,
    FailureClass.KILLED: 72,
    FailureClass.OTHER: 72,
    FailureClass.PEER: 76,
    FailureClass.LEAVE: 75,
    FailureClass.DONE: 0,
}
# 69 (a Horovod that cannot be built or used) is not mended by another attempt either.
_CLASS_OF_CODE = {
    64: FailureClass.USER,
    65: FailureClass.USER,
    69: FailureClass.USER,
    78: FailureClass.USER,
    71: FailureClass.HANG,
    74: FailureClass.IO,
    75: FailureClass.LEAVE,
    76: FailureClass.PEER,
}
_STORAGE_ERRNOS = {
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EROFS,
    errno.EREMOTEIO,
}
_PEER_CLASSES = {"HorovodInternalError", "PeerError"}


@dataclass(frozen=True)
class EndRecord:
    """The last words of one rank: the step it was in (-1: before the first) and the phase of that step."""

    rank: int
    failure: FailureClass
    code: int
    exception: str | None
    message: str | None
    traceback: str | None
    step: int
    phase: str
    host: str
    pid: int
    ended_unix_s: float

    @classmethod
    def now(
        cls,
        rank: int,
        failure: FailureClass,
        *,
        step: int,
        phase: str,
        code: int | None = None,
        error: BaseException | None = None,
        message: str | None = None,
    ) -> EndRecord:
        """A record of this process at this moment; `error` gives exception, message and traceback."""
        trace = None if error is None else "".join(traceback_module.format_exception(error))
        return cls(
            rank=rank,
            failure=failure,
            code=failure.exit_code if code is None else code,
            exception=None if error is None else type(error).__name__,
            message=message if error is None or message is not None else str(error),
            traceback=trace,
            step=step,
            phase=phase,
            host=socket.gethostname(),
            pid=os.getpid(),
            ended_unix_s=time.time(),
        )

    @classmethod
    def of_error(cls, rank: int, error: BaseException, *, step: int, phase: str) -> EndRecord:
        """The record of a rank that ends with `error`, classified by `classify`."""
        failure, code = classify(error)
        return cls.now(rank, failure, step=step, phase=phase, code=code, error=error)


def classify(error: BaseException) -> tuple[FailureClass, int]:
    """The failure class of an exception, and the exit code that goes with it.

    Horovod's and MPI's errors are known by class name, so that nothing heavy is imported.
    """
    if isinstance(error, HpctrainError):
        return _CLASS_OF_CODE.get(error.exit_code, FailureClass.BUG), error.exit_code
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return FailureClass.OTHER, code
    if isinstance(error, KeyboardInterrupt):  # the stop signals only set a flag: nothing was saved
        failure = FailureClass.OTHER
    elif _lost_a_peer(error):
        failure = FailureClass.PEER
    elif isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS:
        failure = FailureClass.IO
    else:
        failure = FailureClass.BUG
    return failure, failure.exit_code


def _lost_a_peer(error: BaseException) -> bool:
    kinds = type(error).__mro__
    named = any(kind.__name__ in _PEER_CLASSES for kind in kinds)
    return named or any(kind.__module__ == "mpi4py.MPI" and kind.__name__ == "Exception" for kind in kinds)


def record_path(attempt_dir: Path, rank: int) -> Path:
    """Where the end record of `rank` lies."""
    return attempt_dir / "ranks" / f"{rank}.json"


def write_end_record(attempt_dir: Path, record: EndRecord) -> None:
    """Write `ranks/N.json`, whole or not at all; the first record of a rank wins.

    Never raises: the process is dying already, and a second error must not hide the first. What cannot be
    written goes to standard error, which the launcher's log keeps.
    """
    try:
        _publish_once(record_path(attempt_dir, record.rank), json.dumps(asdict(record), indent=1).encode())
    except (OSError, ValueError, TypeError) as error:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"rank {record.rank}: end record not written ({error}); it was: {record}\n")
            sys.stderr.flush()


def _publish_once(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{time.monotonic_ns()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            path.hardlink_to(temporary)  # fails where a record is: the first one stays
        except FileExistsError:
            return
        except OSError:
            # Some filesystems have no hard links. A lost race then replaces a record by another of this rank.
            if not path.exists():
                temporary.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def read_end_records(attempt_dir: Path, known: Mapping[int, EndRecord] | None = None) -> dict[int, EndRecord]:
    """The end records of an attempt by rank; a file that is none counts as class `other`, shown as found.

    Those `known` are not read again. Who gives them looks more than once: a file that cannot be read now is left to
    the next time.

    Raises:
        OSError: the directory cannot be listed.
    """
    records = dict(known or {})
    for path in sorted((attempt_dir / "ranks").glob("*.json")):
        if path.stem.isdigit() and int(path.stem) not in records:
            record = _read_record(path, again=known is not None)
            if record is not None:
                records[int(path.stem)] = record
    return records


def _read_record(path: Path, *, again: bool) -> EndRecord | None:
    try:
        raw: dict[str, Any] = json.loads(path.read_bytes())
        return EndRecord(**{**raw, "failure": FailureClass(raw["failure"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, OSError) and again:
            return None
        other = FailureClass.OTHER
        message = f"{path}: not an end record: {error}"
        return EndRecord(int(path.stem), other, other.exit_code, None, message, None, -1, "?", "?", 0, 0.0)


def gravest(records: dict[int, EndRecord], num_ranks: int) -> tuple[FailureClass, EndRecord | None]:
    """The class of an attempt of `num_ranks` ranks, and the record that decides it (none for killed ranks).

    A missing record counts as killed. Among records of one class the earliest decides: the others followed.
    """
    missing = any(rank not in records for rank in range(num_ranks))
    found = sorted(records.values(), key=lambda item: (item.failure.gravity, item.ended_unix_s, item.rank))
    if missing and (not found or found[0].failure.gravity > FailureClass.KILLED.gravity):
        return FailureClass.KILLED, None
    return (found[0].failure, found[0]) if found else (FailureClass.OTHER, None)
