"""The ledger of attempts: `attempts/aNNNN/`, numbered by exclusive creation; what began, and how it ended.

The number fences everything an attempt writes. A checkpoint carries the number of its attempt in its name,
and an attempt restores only what its start record lists, so what a forgotten process writes late is never
read.
"""

from __future__ import annotations

import errno
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import stamina

from hpctrain.checkpoint.names import committed_checkpoints, newest_step
from hpctrain.durable import replace_file
from hpctrain.errors import PeerError, StorageError
from hpctrain.resilience.exits import FailureClass

ATTEMPT_VARIABLE = "HPCTRAIN_ATTEMPT_DIR"
"""Environment variable of all processes of an attempt: tells which attempt a stray process belongs to."""

_PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN)
_INSIST_S = 60.0
_ATTEMPT_NAME = re.compile(r"a(\d{4,})")


@dataclass(frozen=True)
class StartRecord:
    """`start.json`: who launched the attempt, and the checkpoints it may restore (newest first).

    Under Slurm, `job` is the id of the supervisor's job, `submission` that of the job which the user submitted (another
    one where successors take the place of requeueing), `restart` counts its requeues, and `submitted_unix_s` is when it
    was submitted. Budgets count over a submission.
    """

    attempt: int
    num_ranks: int
    checkpoints: list[str]
    task_dir: str
    host: str
    pid: int
    boot_id: str
    nodes: list[str]
    started_unix_s: float
    version: str
    job: str = ""
    submission: str = ""
    restart: int = 0
    submitted_unix_s: float | None = None


@dataclass(frozen=True)
class EndSummary:
    """`end.json`: the supervisor's verdict. Steps are committed ones (0: none); `reason` is one sentence.

    `ranks` has one entry per rank with its class, code, exception, message, step and phase; `launcher_says`
    quotes the launcher's log as found.
    """

    attempt: int
    failure: FailureClass
    code: int
    reason: str
    blamed_rank: int | None
    blamed_node: str | None
    asked_to_leave: bool
    step_before: int
    step_after: int
    ranks: list[dict[str, Any]]
    launcher_code: int | None
    launcher_says: str | None
    started_unix_s: float
    ended_unix_s: float

    @property
    def steps_gained(self) -> int:
        """Committed steps that the next attempt need not do again."""
        return self.step_after - self.step_before


class Attempt(NamedTuple):
    """One attempt as found on disk; without an end it died with its supervisor, or is running."""

    number: int
    path: Path
    start: StartRecord | None
    end: EndSummary | None


def attempt_dir(run_dir: Path, number: int) -> Path:
    """The directory of attempt `number`."""
    return run_dir / "attempts" / f"a{number:04d}"


def next_attempt(run_dir: Path) -> int:
    """Take the next number by creating its directory; two callers never get the same one."""
    parent = run_dir / "attempts"
    parent.mkdir(parents=True, exist_ok=True)
    number = max(_numbers(parent), default=0) + 1
    while True:
        try:
            attempt_dir(run_dir, number).mkdir()
        except FileExistsError:
            number += 1
            continue
        for name in ("ranks", "events", "logs"):
            (attempt_dir(run_dir, number) / name).mkdir()
        return number


def list_attempts(run_dir: Path) -> list[Attempt]:
    """All attempts of a run, the oldest first."""
    return [_load_attempt(run_dir, number) for number in sorted(_numbers(run_dir / "attempts"))]


def newest_attempt(run_dir: Path) -> int:
    """The highest number taken so far; 0 where there is none."""
    return max(_numbers(run_dir / "attempts"), default=0)


def started_after(run_dir: Path, attempt: int) -> list[int]:
    """The attempts with a higher number and a start record, in order; one directory is listed.

    A directory alone does not count: a supervisor that was cut off may make one late, and then learns that it lost the
    run (`hpctrain.resilience.lease`).
    """
    numbers = sorted(number for number in _numbers(run_dir / "attempts") if number > attempt)
    return [number for number in numbers if (attempt_dir(run_dir, number) / "start.json").exists()]


def is_superseded(run_dir: Path, attempt: int) -> bool:
    """Whether a newer attempt was started, so that nobody waits for what `attempt` still does."""
    return bool(started_after(run_dir, attempt))


def refuse_superseded(run_dir: Path, attempt: int) -> None:
    """Raise `PeerError` in a process of an attempt that goes on after a newer one was started."""
    if newer := started_after(run_dir, attempt):
        raise PeerError(f"attempt {attempt} was superseded by attempt {newer[-1]}: it ends here")


def is_passing(error: Exception) -> bool:
    """Whether a failure of storage may be over in a moment, as those of a shared filesystem often are."""
    cause = error.__cause__ if isinstance(error, StorageError) else error
    return isinstance(cause, OSError) and cause.errno in _PASSING


@stamina.retry(on=is_passing, attempts=None, timeout=_INSIST_S)
def write_start(run_dir: Path, record: StartRecord) -> None:
    """Write `start.json` durably, for a minute if need be; raises `StorageError`."""
    write_json(attempt_dir(run_dir, record.attempt) / "start.json", asdict(record))


@stamina.retry(on=is_passing, attempts=None, timeout=_INSIST_S)
def write_end(run_dir: Path, summary: EndSummary) -> None:
    """Write `end.json` durably, for a minute if need be, with the steps gained spelt out; raises `StorageError`."""
    content = {**asdict(summary), "steps_gained": summary.steps_gained}
    write_json(attempt_dir(run_dir, summary.attempt) / "end.json", content)


def read_start(directory: Path) -> StartRecord | None:
    """The start record in an attempt's directory, or None."""
    raw = read_json(directory / "start.json")
    try:
        return None if raw is None else StartRecord(**raw)
    except TypeError:
        return None


def read_end(directory: Path) -> EndSummary | None:
    """The end record in an attempt's directory, or None."""
    raw = read_json(directory / "end.json")
    try:
        if raw is None:
            return None
        raw.pop("steps_gained", None)
        return EndSummary(**{**raw, "failure": FailureClass(raw["failure"])})
    except (TypeError, KeyError, ValueError):
        return None


def admissible_checkpoints(run_dir: Path, attempt: int) -> list[str]:
    """What `attempt` may restore, the newest first.

    These are the committed checkpoints of the previous attempt, and those which that attempt was itself
    allowed to restore. The previous attempt is the latest with a start record: one without launched
    nothing.
    """
    starts = [
        item.start for item in list_attempts(run_dir) if item.number < attempt and item.start is not None
    ]
    if not starts:
        return []
    previous = starts[-1]
    listed = set(previous.checkpoints)
    committed = committed_checkpoints(run_dir / "checkpoints")
    return [str(item) for item in committed if item.attempt == previous.attempt or str(item) in listed]


def write_restored(directory: Path, step: int) -> None:
    """Record, in an attempt's directory, the step that its ranks began from (0: from nothing)."""
    write_json(directory / "restored.json", {"step": step})


def step_before(start: StartRecord, directory: Path) -> int:
    """Committed steps when the attempt began: those it restored, else those it might have restored.

    The newest checkpoint may turn out to be damaged: what counts as progress then is what comes after the older one.
    """
    restored = read_json(directory / "restored.json")
    return newest_step(start.checkpoints) if restored is None else int(restored["step"])


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace `path` whole or not at all, durably; raises `StorageError` naming the file."""
    try:
        replace_file(path, (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror}; free space or mend it, then run again"
        ) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None where the file is missing, torn or holds something else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _numbers(parent: Path) -> list[int]:
    try:
        names = [path.name for path in parent.iterdir()]
    except FileNotFoundError:
        return []
    return [int(match[1]) for name in names if (match := _ATTEMPT_NAME.fullmatch(name))]


def _load_attempt(run_dir: Path, number: int) -> Attempt:
    path = attempt_dir(run_dir, number)
    return Attempt(number, path, read_start(path), read_end(path))
