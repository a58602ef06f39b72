"""How long a run took to come back, where the time went, and what was lost: from the files of its run directory.

Moments are unix seconds of one machine's clock: those of events and records (`time.time`), and those that only who
made the fault can know, which are arguments here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Values
from benchmarks.training import BenchmarkFailed
from hpctrain.observe.events import read_events
from hpctrain.resilience.attempts import Attempt, EndSummary, StartRecord, list_attempts, read_json

_STEPPED: Final = frozenset(("step", "stop", "checkpoint"))
"""Events that say a step was finished: the loop reports steps only every 0.1 s or so."""


def relaunch_times(run_dir: Path, fault_unix_s: float, noticed_unix_s: float = math.inf) -> Values:
    """A fault during the first attempt, and a later one that went on.

    Gives `plain_start_s` (start record of the first attempt to its first step), `recovery_s` (fault to the next
    finished step), their difference `excess_s`, and `lost_steps` (reported before the fault and not restored).
    `recovery_s` is the sum of `detection_s` (until `noticed_unix_s`, or the end record if that came before),
    `ending_s` (until the end record), `placing_s` (until the next start record) and `start_s` (until the first step).

    Raises:
        BenchmarkFailed: the run directory does not show all that.
    """
    first, resumed = _first(run_dir), _resumed(run_dir)
    ended_s = _end(first).ended_unix_s
    noticed_s = min(max(noticed_unix_s, fault_unix_s), ended_s)
    started_s, stepped_s = _start(resumed).started_unix_s, first_step_unix_s(resumed.path)
    plain_start_s, recovery_s = _plain_start_s(first), stepped_s - fault_unix_s
    return {
        "plain_start_s": plain_start_s,
        "recovery_s": recovery_s,
        "excess_s": recovery_s - plain_start_s,
        "detection_s": noticed_s - fault_unix_s,
        "ending_s": ended_s - noticed_s,
        "placing_s": started_s - ended_s,
        "start_s": stepped_s - started_s,
        "lost_steps": _lost_steps(first, resumed),
    }


def warning_times(run_dir: Path, signal_unix_s: float, gone_unix_s: float, requeued_unix_s: float) -> Values:
    """A warning during the first attempt, on which all ranks left, and an attempt that went on.

    Gives, after the signal, `saved_s` (the last save is committed), `gone_s` (no process is left), `requeued_s`, and
    `warning_s`, the later of these two; `save_s` that the last save took; `excess_s`, the rest of `warning_s`; and
    `plain_start_s` and `lost_steps` as `relaunch_times`.

    Raises:
        BenchmarkFailed: the run directory does not show all that.
    """
    first, second = _first(run_dir), _attempt(run_dir, 1)
    saves = [event for event in _events(first.path) if event["kind"] == "checkpoint"]
    if not saves:
        raise BenchmarkFailed(f"{first.path}: nothing was saved on the warning; {_reason(first)}")
    save_s = float(saves[-1]["seconds"])
    warning_s = max(gone_unix_s, requeued_unix_s) - signal_unix_s
    return {
        "plain_start_s": _plain_start_s(first),
        "saved_s": float(saves[-1]["t"]) - signal_unix_s,
        "gone_s": gone_unix_s - signal_unix_s,
        "requeued_s": requeued_unix_s - signal_unix_s,
        "warning_s": warning_s,
        "save_s": save_s,
        "excess_s": warning_s - save_s,
        "lost_steps": _lost_steps(first, second),
    }


def first_step_unix_s(attempt: Path) -> float:
    """When rank 0 finished its first step of an attempt; raises `BenchmarkFailed` where it never did."""
    for event in _events(attempt):
        if event["kind"] == "step":
            return float(event["t"])
    raise BenchmarkFailed(f"{attempt}: no step was finished")


def last_step(attempt: Path) -> int:
    """The last step of an attempt that rank 0 reported; 0: none."""
    return max((int(event["step"]) for event in _events(attempt) if event["kind"] in _STEPPED), default=0)


def has_stepped(run_dir: Path, after: int) -> bool:
    """Whether an attempt with a higher number than `after` has finished a step."""
    return any(
        event["kind"] == "step"
        for item in list_attempts(run_dir)
        if item.number > after
        for event in _events(item.path)
    )


def _plain_start_s(attempt: Attempt) -> float:
    return first_step_unix_s(attempt.path) - _start(attempt).started_unix_s


def _resumed(run_dir: Path) -> Attempt:
    """The first attempt after the first one that finished a step."""
    for item in list_attempts(run_dir)[1:]:
        if any(event["kind"] == "step" for event in _events(item.path)):
            return item
    raise BenchmarkFailed(f"{run_dir}: no attempt finished a step after the first one")


def _first(run_dir: Path) -> Attempt:
    return _attempt(run_dir, 0)


def _attempt(run_dir: Path, index: int) -> Attempt:
    found = list_attempts(run_dir)
    if index >= len(found):
        raise BenchmarkFailed(f"{run_dir}: {len(found)} attempts were made, {index + 1} are needed")
    return found[index]


def _start(attempt: Attempt) -> StartRecord:
    if attempt.start is None:
        raise BenchmarkFailed(f"{attempt.path}: there is no start record")
    return attempt.start


def _end(attempt: Attempt) -> EndSummary:
    if attempt.end is None:
        raise BenchmarkFailed(f"{attempt.path}: there is no end record")
    return attempt.end


def _reason(attempt: Attempt) -> str:
    return "it has no end record" if attempt.end is None else attempt.end.reason


def _lost_steps(before: Attempt, after: Attempt) -> float:
    """Steps to be done again; 0 where more was restored than rank 0 came to report."""
    return float(max(0, last_step(before.path) - _restored_step(after.path)))


def _restored_step(attempt: Path) -> int:
    """The step an attempt began from; 0: from nothing."""
    raw = read_json(attempt / "restored.json")
    if raw is None:
        raise BenchmarkFailed(f"{attempt}: it did not come as far as restoring a state")
    return int(raw["step"])


def _events(attempt: Path) -> list[dict[str, Any]]:
    return read_events(attempt / "events" / "rank-0.jsonl")
