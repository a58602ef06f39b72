"""The last words to the user when the supervisor gives up: what, where, why, and what to do next."""

from __future__ import annotations

from pathlib import Path

from hpctrain.resilience.attempts import EndSummary, attempt_dir
from hpctrain.resilience.exits import FailureClass, read_end_records, record_path
from hpctrain.resilience.policy import Action
from hpctrain.resilience.words import read_log

_TAIL_LINES = 12


def failure_lines(
    run_dir: Path, end: EndSummary, action: Action, attempts: int, resume_from: str, log: Path
) -> list[str]:
    """Lines to show, the most important last.

    Args:
        run_dir: the run directory.
        end: how the last attempt ended.
        action: the decision to stop.
        attempts: how many attempts were made in this submission.
        resume_from: the checkpoint that the next attempt would restore, or words for none.
        log: what the launcher printed.
    """
    directory = attempt_dir(run_dir, end.attempt)
    plural = "s" if attempts != 1 else ""
    node = [] if end.blamed_node is None else [f"  node   {end.blamed_node}"]
    return [
        *_details(directory, end, log),
        f"gave up after {attempts} attempt{plural}: {action.reason}",
        f"  class  {end.failure} (exit code {action.code})",
        f"  what   {end.reason}",
        *node,
        f"  log    {log}",
        f"  next   {advice(end)}; then run the same command again: it goes on from {resume_from}",
    ]


def _details(directory: Path, end: EndSummary, log: Path) -> list[str]:
    """The traceback of the rank to blame, else the end of the launcher's log."""
    record = read_end_records(directory).get(-1 if end.blamed_rank is None else end.blamed_rank)
    if record is not None and record.traceback:
        return [f"{record_path(directory, record.rank)} says:", *_tail(record.traceback)]
    return [f"{log} ends with:", *_tail(read_log(log))]


def _tail(text: str) -> list[str]:
    return [f"  | {line}" for line in text.splitlines()[-_TAIL_LINES:]]


def advice(end: EndSummary) -> str:
    """What to do next about an attempt that ended so, as an order without a full stop."""
    logs = f"attempts/a{end.attempt:04d}/logs"
    return {
        FailureClass.USER: "mend what the message names",
        FailureClass.HANG: f"look at the stacks in {logs}, or raise resilience.hang_timeout_s",
        FailureClass.IO: "mend the storage (space, quota, mount)",
        FailureClass.BUG: "mend the cause of the exception",
        FailureClass.KILLED: "find out who killed it (out of memory? see `dmesg`; fewer ranks need less)",
    }.get(end.failure, "find the cause in the log")
