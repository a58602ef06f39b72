"""From what an attempt left behind to its `end.json`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.names import newest_step
from hpctrain.resilience.attempts import (
    EndSummary,
    StartRecord,
    admissible_checkpoints,
    attempt_dir,
    step_before,
)
from hpctrain.resilience.exits import FailureClass, read_end_records
from hpctrain.resilience.launching import Launcher
from hpctrain.resilience.processes import started_ranks
from hpctrain.resilience.rundir import is_finished
from hpctrain.resilience.verdict import Evidence, Verdict, judge, rank_summaries
from hpctrain.resilience.words import read_log


@dataclass(frozen=True)
class Seen:
    """What the supervisor saw of an attempt.

    `launcher_code`: the launcher's exit code (None: never started). `says`: why the attempt had to be killed, if it
    had. `lost_node`: a node that failed. `last_step`: the last step in the events (-1: none).
    """

    launcher_code: int | None
    says: str | None
    lost_node: str | None
    last_step: int
    asked_to_leave: bool


def summarize(run_dir: Path, start: StartRecord, launcher: Launcher, seen: Seen) -> EndSummary:
    """The verdict on an attempt, and what came of it."""
    directory = attempt_dir(run_dir, start.attempt)
    evidence = _evidence(run_dir, directory, start, launcher, seen)
    verdict = _judge(evidence, run_dir)
    return EndSummary(
        attempt=start.attempt,
        failure=verdict.failure,
        code=verdict.code,
        reason=verdict.reason,
        blamed_rank=verdict.rank,
        blamed_node=verdict.node,
        asked_to_leave=seen.asked_to_leave,
        step_before=step_before(start, directory),
        step_after=newest_step(admissible_checkpoints(run_dir, start.attempt + 1)),
        ranks=rank_summaries(evidence.records, start.num_ranks),
        launcher_code=seen.launcher_code,
        launcher_says=evidence.word.quote if evidence.word is not None else seen.says,
        started_unix_s=start.started_unix_s,
        ended_unix_s=time.time(),
    )


def _evidence(run_dir: Path, directory: Path, start: StartRecord, launcher: Launcher, seen: Seen) -> Evidence:
    log, ranks = read_log(launcher.log(run_dir, start.attempt)), started_ranks(directory)
    return Evidence(
        num_ranks=start.num_ranks,
        records=read_end_records(directory),
        hosts={rank: process.host for rank, process in ranks.items()},
        last_step=seen.last_step,
        word=launcher.word(log, {rank: process.pid for rank, process in ranks.items() if process.is_here}),
        log=log,
        supervisor_says=seen.says,
        lost_node=seen.lost_node,
        launcher_code=seen.launcher_code,
    )


def _judge(evidence: Evidence, run_dir: Path) -> Verdict:
    """The verdict; a result that is there is not lost because a rank fell over on its way out."""
    verdict = judge(evidence)
    if verdict.failure is FailureClass.DONE or not is_finished(run_dir):
        return verdict
    return Verdict(FailureClass.DONE, 0, verdict.rank, verdict.node, f"finished; then: {verdict.reason}")
