"""The supervisor: launches attempts, learns how their ranks ended, goes on until the run is done."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Protocol

from hpctrain import __version__
from hpctrain.checkpoint.names import newest_step
from hpctrain.config import RunConfig
from hpctrain.errors import HpctrainError
from hpctrain.observe.events import EventLog
from hpctrain.observe.progress import Progress
from hpctrain.resilience.attempts import (
    ATTEMPT_VARIABLE,
    EndSummary,
    StartRecord,
    admissible_checkpoints,
    attempt_dir,
    next_attempt,
    step_before,
    write_end,
    write_start,
)
from hpctrain.resilience.exits import FailureClass, read_end_records
from hpctrain.resilience.explain import failure_lines
from hpctrain.resilience.lease import Lease, boot_id
from hpctrain.resilience.policy import Action, ActionKind, AttemptOutcome, decide
from hpctrain.resilience.processes import Descendants, end_strays, rank_pids
from hpctrain.resilience.rundir import adopt_config, check_world, complete_result, is_finished, open_run_dir
from hpctrain.resilience.signals import StopFlag
from hpctrain.resilience.verdict import Evidence, Verdict, judge, rank_summaries
from hpctrain.resilience.wait import AttemptWatch
from hpctrain.resilience.words import launcher_word, read_log

_POLL_S = 0.1


class Launcher(Protocol):
    """A door to the ranks: `hpctrain.launch.local.LocalLauncher` is one."""

    def check(self, config: RunConfig) -> None:
        """Raise `ConfigError` where ranks cannot be launched as `config` asks."""

    def start(
        self, run_dir: Path, attempt: int, num_ranks: int, config: RunConfig
    ) -> subprocess.Popen[bytes]:
        """Start the ranks of an attempt; the process ends when they have."""

    def clean(self, run_dir: Path) -> None:
        """Remove what a killed launcher may have left behind."""


class Supervisor:
    """Brings one run to its end.

    Args:
        run_dir: the run directory; made if missing.
        config: the resolved run description.
        num_ranks: ranks per attempt.
        launcher: starts them.
        task_dir: folder in which ranks look for the Task's module first.
        progress: where the user is told; none: nothing is said.
        linger_s: how long the launcher may outlive its ranks before everything is killed.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        num_ranks: int,
        launcher: Launcher,
        *,
        task_dir: Path | None = None,
        progress: Progress | None = None,
        linger_s: float = 10.0,
    ) -> None:
        self._run_dir = run_dir.resolve()
        self._config = config
        self._num_ranks = num_ranks
        self._launcher = launcher
        self._task_dir = (task_dir or Path.cwd()).resolve()
        self._progress = progress or Progress()
        self._linger_s = linger_s
        self._flag = StopFlag()
        self._lease = Lease(self._run_dir)
        self._history: list[AttemptOutcome] = []

    def run(self) -> int:
        """Launch attempts until the run is done, hopeless, or asked to leave; returns the exit code.

        Raises:
            UsageError: more ranks than lanes.
            ConfigError: another run or a live supervisor has the directory, or ranks cannot be launched.
        """
        check_world(self._num_ranks, self._config.lanes.num_lanes)
        self._launcher.check(self._config)
        open_run_dir(self._run_dir, self._config)
        with self._lease:
            dead = self._lease.acquire()
            adopt_config(self._run_dir, self._config)
            if is_finished(self._run_dir):
                self._progress.say(
                    f"{self._run_dir} is finished: see result.json there, or choose another --dir"
                )
                return 0
            if dead is not None:
                strays = end_strays(self._run_dir, ATTEMPT_VARIABLE)
                self._progress.say(
                    f"took over from a supervisor that died ({dead}); {strays} of its processes were left"
                )
            self._flag.install()
            try:
                return self._attempts()
            finally:
                self._flag.restore()
                self._launcher.clean(self._run_dir)
                self._progress.close()

    def _attempts(self) -> int:
        while not self._flag.requested:
            end = self._attempt()
            action = decide(self._history, self._config.resilience)
            if action.kind is not ActionKind.RELAUNCH:
                return self._finish(end, action)
            self._announce_relaunch(end, action)
            self._pause(action.delay_s)
        self._progress.say(
            f"left on {self._flag.signal_name} between two attempts; run the same command again to resume"
        )
        return FailureClass.LEAVE.exit_code

    def _attempt(self) -> EndSummary:
        """One launch, from its number to its end record."""
        number = next_attempt(self._run_dir)
        directory = attempt_dir(self._run_dir, number)
        start = self._start_record(number)
        write_start(self._run_dir, start)
        self._lease.beat(number)
        log = EventLog(directory / "events" / "supervisor.jsonl")
        log.emit("attempt", attempt=number, num_ranks=self._num_ranks, checkpoints=start.checkpoints[:1])
        self._progress.follow(directory / "events")
        launcher_code, says = self._launch_and_wait(number)
        self._progress.poll()
        end = self._record_end(start, launcher_code, says)
        gained = end.steps_gained
        log.emit("attempt_end", attempt=number, failure=end.failure, reason=end.reason, steps_gained=gained)
        log.close()
        return end

    def _launch_and_wait(self, number: int) -> tuple[int | None, str | None]:
        """Run one attempt to its end; no process of it is left afterwards.

        Returns the launcher's exit code, and why the attempt had to be killed, if it had.
        """
        descendants = Descendants()
        try:
            process = self._launcher.start(self._run_dir, number, self._num_ranks, self._config)
        except HpctrainError:
            raise
        except OSError as error:  # no process or memory left on this host: may pass
            return None, f"the launcher could not be started: {error}"
        try:
            descendants.started(process.pid)
            says = self._wait(process, attempt_dir(self._run_dir, number), descendants)
            return process.wait(), says
        finally:
            descendants.end_all()

    def _wait(
        self, process: subprocess.Popen[bytes], directory: Path, descendants: Descendants
    ) -> str | None:
        """Wait for the launcher, passing stop requests on; returns why everything was killed, if it was."""
        watch = AttemptWatch(directory, self._num_ranks, self._config.resilience, self._linger_s)
        asked: set[int] = set()
        while True:
            try:
                process.wait(_POLL_S)
                return None
            except subprocess.TimeoutExpired:
                pass
            self._lease.beat()
            self._progress.poll()
            if self._flag.requested:
                asked |= descendants.send(signal.SIGUSR1, set(rank_pids(directory).values()) - asked)
            overdue = "interrupted twice" if self._flag.seen.count("SIGINT") > 1 else watch.overdue()
            if overdue is not None:
                descendants.end_all()
                return overdue

    def _evidence(self, directory: Path, launcher_code: int | None, says: str | None) -> Evidence:
        log, pids = read_log(directory / "logs" / "mpirun.log"), rank_pids(directory)
        return Evidence(
            num_ranks=self._num_ranks,
            records=read_end_records(directory),
            pids=pids,
            last_step=self._progress.last_step,
            word=launcher_word(log, pids),
            log=log,
            supervisor_says=says,
            launcher_code=launcher_code,
        )

    def _start_record(self, number: int) -> StartRecord:
        host = socket.gethostname()
        return StartRecord(
            attempt=number,
            num_ranks=self._num_ranks,
            checkpoints=admissible_checkpoints(self._run_dir, number),
            task_dir=str(self._task_dir),
            host=host,
            pid=os.getpid(),
            boot_id=boot_id(),
            nodes=[host],
            started_unix_s=time.time(),
            version=__version__,
        )

    def _record_end(self, start: StartRecord, launcher_code: int | None, says: str | None) -> EndSummary:
        """Judge the attempt, and write it down."""
        evidence = self._evidence(attempt_dir(self._run_dir, start.attempt), launcher_code, says)
        verdict = self._judge(evidence)
        end = EndSummary(
            attempt=start.attempt,
            failure=verdict.failure,
            code=verdict.code,
            reason=verdict.reason,
            blamed_rank=verdict.rank,
            blamed_node=verdict.node,
            asked_to_leave=self._flag.requested,
            step_before=step_before(start, attempt_dir(self._run_dir, start.attempt)),
            step_after=newest_step(admissible_checkpoints(self._run_dir, start.attempt + 1)),
            ranks=rank_summaries(evidence.records, self._num_ranks),
            launcher_code=launcher_code,
            launcher_says=evidence.word.quote if evidence.word is not None else says,
            started_unix_s=start.started_unix_s,
            ended_unix_s=time.time(),
        )
        write_end(self._run_dir, end)
        self._history.append(AttemptOutcome(end.failure, end.code, end.steps_gained > 0, end.asked_to_leave))
        return end

    def _judge(self, evidence: Evidence) -> Verdict:
        """The verdict; a result that is there is not lost because a rank fell over on its way out."""
        verdict = judge(evidence)
        if verdict.failure is FailureClass.DONE or not is_finished(self._run_dir):
            return verdict
        return Verdict(FailureClass.DONE, 0, verdict.rank, verdict.node, f"finished; then: {verdict.reason}")

    def _announce_relaunch(self, end: EndSummary, action: Action) -> None:
        wait = f" in {action.delay_s:g} s" if action.delay_s else ""
        self._progress.say(
            f"attempt {end.attempt}: {end.reason}; relaunching{wait} from {self._resume_point(end)}"
        )

    def _resume_point(self, end: EndSummary) -> str:
        return next(
            iter(admissible_checkpoints(self._run_dir, end.attempt + 1)),
            "the beginning (nothing was saved yet)",
        )

    def _pause(self, delay_s: float) -> None:
        deadline_s = time.monotonic() + delay_s
        while not self._flag.requested and (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _POLL_S))
            self._lease.beat()

    def _finish(self, end: EndSummary, action: Action) -> int:
        self._progress.close()
        if action.kind is ActionKind.DONE:
            restarts = complete_result(self._run_dir)
            self._progress.say(
                f"finished with {restarts} restart{'s' if restarts != 1 else ''}: {self._run_dir}/result.json"
            )
        elif action.kind is ActionKind.LEAVE:
            point = self._resume_point(end)
            what = f"left on {self._flag.signal_name}: {end.reason}"
            self._progress.say(f"{what}; run the same command again to go on from {point}")
        else:
            for line in failure_lines(
                self._run_dir, end, action, len(self._history), self._resume_point(end)
            ):
                self._progress.say(line)
        return action.code
