"""What happened to a run, attempt by attempt, read from its directory: nothing is written, locked or imported from it.

A directory may be half written or damaged: what can be read is told, and `missing` says what could not.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import StorageError, UsageError
from hpctrain.observe.account import Seconds
from hpctrain.observe.owner import Owner, read_owner
from hpctrain.observe.story import AttemptStory, Found, Ledger, find_attempt, tell_attempt
from hpctrain.resilience.attempts import admissible_checkpoints, list_attempts, read_json


@dataclass(frozen=True)
class Timeline:
    """A run: its attempts, the oldest first, and how far it is.

    `owner` is the live supervisor, `last_checkpoint` what the next attempt would start from, `latest` the numbers in
    the newest `step` event of the last attempt.
    """

    run_dir: Path
    name: str
    attempts: list[AttemptStory]
    finished: bool
    owner: Owner | None
    last_checkpoint: str | None
    latest: dict[str, Any]
    missing: list[str]

    @property
    def seconds(self) -> Seconds:
        """Where the time of the whole run went."""
        return sum((story.seconds for story in self.attempts), Seconds())

    @property
    def job(self) -> str:
        """The Slurm job of the last attempt; empty: none."""
        return self.attempts[-1].job if self.attempts else ""


def find_run_dir(path: Path) -> Path:
    """The run directory that a user means: the directory itself, or `runs/NAME` of a run description.

    Raises `UsageError` where there is none, `ConfigError` for a description that cannot be read.
    """
    if path.is_dir():
        if not ((path / "attempts").is_dir() or (path / "owner.lock").exists()):
            raise UsageError(f"{path} is no run directory: nothing was ever started in it; give runs/NAME")
        return path
    if not path.exists():
        raise UsageError(f"{path}: no such file or directory; give a run directory (runs/NAME) or a RUN.toml")
    if path.name == "run.toml" and (path.parent / "attempts").is_dir():
        return path.parent  # the description that lies in a run directory
    from hpctrain.config import load_run

    found = Path("runs") / load_run(path).name
    if not found.is_dir():
        raise UsageError(
            f"{found} does not exist: {path} was not started from this directory; if it was with --dir, give that one"
        )
    return found


def read_timeline(path: Path, now_unix_s: float) -> Timeline:
    """Read the run that `path` means (`find_run_dir`); `now_unix_s` is the end, so far, of an attempt that runs.

    Raises `UsageError` and `ConfigError` as `find_run_dir` does, `StorageError` where reading is refused.
    """
    try:
        return _read(find_run_dir(path), now_unix_s)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"{error.filename or path}: cannot be read: {error.strerror}; mend the permissions or the storage"
        ) from error


def _read(run_dir: Path, now_unix_s: float) -> Timeline:
    found = [find_attempt(attempt) for attempt in list_attempts(run_dir)]
    description, missing = _read_description(run_dir)
    next_number = found[-1].attempt.number + 1 if found else 1
    ledger = Ledger(
        found=found,
        owner=read_owner(run_dir, now_unix_s),
        restorable=admissible_checkpoints(run_dir, next_number),
        finished=(run_dir / "result.json").exists(),
        staged=bool(_section(description, "staging").get("dirs")),
        now_unix_s=now_unix_s,
    )
    if ledger.finished and read_json(run_dir / "result.json") is None:
        missing.append("result.json is damaged")
    return Timeline(
        run_dir=run_dir,
        name=str(description.get("name", run_dir.resolve().name)),
        attempts=[tell_attempt(ledger, place) for place in range(len(found))],
        finished=ledger.finished,
        owner=ledger.owner,
        last_checkpoint=next(iter(ledger.restorable), None),
        latest=_latest_step(found),
        missing=missing,
    )


def _read_description(run_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """`run.toml` as it is, unchecked, and what is wrong with it."""
    try:
        return tomllib.loads((run_dir / "run.toml").read_text(encoding="utf-8")), []
    except FileNotFoundError:
        return {}, ["run.toml is missing"]
    except (OSError, ValueError) as error:
        return {}, [f"run.toml cannot be read: {error}"]


def _section(description: dict[str, Any], name: str) -> dict[str, Any]:
    section = description.get(name)
    return section if isinstance(section, dict) else {}


def _latest_step(found: list[Found]) -> dict[str, Any]:
    events = found[-1].events if found else []
    event = next((event for event in reversed(events) if event["kind"] == "step"), {})
    return {name: value for name, value in event.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
