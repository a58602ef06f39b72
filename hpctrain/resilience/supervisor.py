"""The supervisor: launches attempts, learns how their ranks ended, goes on until the run is done."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from hpctrain import __version__
from hpctrain.config import RunConfig
from hpctrain.errors import ConfigError, HangError, HpctrainError
from hpctrain.observe.events import EventLog
from hpctrain.observe.progress import Progress
from hpctrain.resilience.attempts import (
    ATTEMPT_VARIABLE,
    EndSummary,
    StartRecord,
    admissible_checkpoints,
    attempt_dir,
    next_attempt,
    write_end,
    write_start,
)
from hpctrain.resilience.clock import JobClock
from hpctrain.resilience.exits import FailureClass
from hpctrain.resilience.explain import failure_lines
from hpctrain.resilience.history import past_outcomes
from hpctrain.resilience.launching import Job, Launcher, Placement, Ranks
from hpctrain.resilience.lease import JobIdentity, Lease, LeaseLostError, boot_id
from hpctrain.resilience.policy import Action, ActionKind, AttemptOutcome, Surroundings, decide, nowhere_to_go
from hpctrain.resilience.processes import end_strays
from hpctrain.resilience.rundir import adopt_config, check_world, complete_result, is_finished, open_run_dir
from hpctrain.resilience.signals import StopFlag
from hpctrain.resilience.summary import Seen, summarize
from hpctrain.resilience.wait import AttemptWatch

_POLL_S = 0.1
_REAP_S = 5.0
_WARNINGS = ("SIGUSR1", "SIGUSR2")
"""What batch systems send ahead of the end (`sbatch --signal`); the other signals mean now."""


class Supervisor:
    """Brings one run to its end.

    Args:
        run_dir: the run directory; made if missing.
        config: the resolved run description.
        launcher: places and starts the ranks.
        job: the batch job that this process runs in; None: there is none.
        task_dir: folder in which ranks look for the Task's module first.
        progress: where the user is told; none: nothing is said.
        linger_s: how long the launcher may outlive its ranks before everything is killed.
        is_alive: whether a job waits or runs, where its queue can be asked from here without being in a job.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        launcher: Launcher,
        *,
        job: Job | None = None,
        task_dir: Path | None = None,
        progress: Progress | None = None,
        linger_s: float = 10.0,
        is_alive: Callable[[str], bool | None] = lambda _job: None,
    ) -> None:
        self._run_dir = run_dir.resolve()
        self._config = config
        self._launcher = launcher
        self._job = job
        self._task_dir = (task_dir or Path.cwd()).resolve()
        self._progress = progress or Progress()
        self._linger_s = linger_s
        self._flag = StopFlag()
        if job is None:
            self._lease = Lease(self._run_dir, is_alive=is_alive)
        else:
            self._lease = Lease(self._run_dir, JobIdentity(job.id, job.restart), is_alive=job.is_alive)
        self._clock = JobClock(job, config.resilience.leave_margin_s, config.cluster.walltime_s)
        self._history: list[AttemptOutcome] = []
        self._heeded = 0
        self._leaving: str | None = None
        self._obstacle: str | None = None
        self._lost_node: str | None = None

    def run(self) -> int:
        """Launch attempts until the run is done, hopeless, or asked to leave; returns the exit code.

        Raises:
            UsageError: more ranks than lanes.
            ConfigError: another run or a live supervisor has the directory, or ranks cannot be launched.
            LeaseLostError: another supervisor has taken the run over; nothing of this one is left running.
        """
        self._launcher.check(self._config)
        placement = self._first_placement()
        open_run_dir(self._run_dir, self._config)
        with self._lease:
            previous = self._lease.acquire()
            adopt_config(self._run_dir, self._config)
            if is_finished(self._run_dir):
                self._progress.say(
                    f"{self._run_dir} is finished: see result.json there, or choose another --dir"
                )
                return 0
            if previous is not None:
                strays = end_strays(self._run_dir, ATTEMPT_VARIABLE)
                self._progress.say(
                    f"took over from another supervisor ({previous}); {strays} of its processes were left on this host"
                )
            if self._job is not None:
                self._job.keep_script(self._run_dir)
                self._history = past_outcomes(self._run_dir, self._job.submission)
            self._flag.install()
            try:
                return self._run(placement)
            finally:
                self._progress.close()
                self._flag.restore()

    def _run(self, placement: Placement) -> int:
        """Attempts, and what comes after the last one."""
        try:
            action = self._attempts(placement)
        except LeaseLostError:
            raise  # what runs on the nodes now is the new owner's
        except BaseException:
            self._launcher.clean(self._run_dir)
            raise
        self._lease.check()  # much time may have passed: what is swept, or requeued, may be another's by now
        self._launcher.clean(self._run_dir)
        if action.kind is ActionKind.REQUEUE and self._job is not None:
            # Last of all: from here on Slurm may end this process at any moment.
            self._lease.check()
            comeback = self._job.come_back()
            self._progress.say(comeback.words)
            self._lease.release(keep_claim=comeback.assured)
        return action.code

    def _first_placement(self) -> Placement:
        placement = self._launcher.place(self._run_dir, self._config, again=False)
        if placement is None:
            raise ConfigError("the job has not enough nodes for the ranks of this run: submit it with more")
        check_world(placement.num_ranks, self._config.lanes.num_lanes)
        return placement

    def _attempts(self, placement: Placement) -> Action:
        """One attempt after the other; one at least, since only attempts are counted: a job that is too short must end.

        Without that, a time limit below `leave_margin_s` would be requeued for ever.
        """
        while True:
            end = self._attempt(placement)
            action = self._decide()
            if action.kind is ActionKind.RELAUNCH:
                placement, action = self._place_again(placement, action)
            if action.kind is not ActionKind.RELAUNCH:
                self._finish(end, action)
                return action
            self._announce_relaunch(end, action, placement)
            self._pause(action.delay_s)
            if self._asked_to_leave():
                break
        self._progress.say(
            f"left on {self._leaving} between two attempts; run the same command again to resume"
        )
        kind = ActionKind.LEAVE if self._job is None else ActionKind.REQUEUE
        return Action(kind, FailureClass.LEAVE.exit_code)

    def _decide(self) -> Action:
        obstacle = self._obstacle
        if obstacle is None and not self._clock.has_room(self._progress.pace):
            obstacle = f"{self._clock.left_s() or 0:.0f} s are left of the job, too few for another attempt"
        around = Surroundings(queued=self._job is not None, obstacle=obstacle)
        return decide(self._history, self._config.resilience, around)

    def _place_again(self, placement: Placement, action: Action) -> tuple[Placement, Action]:
        """Where the next attempt can run; another action where it cannot."""
        self._lease.check()  # placing sweeps the nodes, which may be the new owner's
        try:
            found = self._launcher.place(self._run_dir, self._config, again=True)
            words = "not enough nodes are left that answer"
        except HangError as error:
            found, words = None, str(error)
        if found is None:
            around = Surroundings(queued=self._job is not None)
            return placement, nowhere_to_go(self._history[-1], around, words)
        return found, action

    def _attempt(self, placement: Placement) -> EndSummary:
        """One launch, from its number to its end record."""
        self._lease.check()
        number = next_attempt(self._run_dir)
        self._lease.beat(number)  # before the start record, which makes the number count (see `Lease.check`)
        directory = attempt_dir(self._run_dir, number)
        start = self._start_record(number, placement)
        write_start(self._run_dir, start)
        log = EventLog(directory / "events" / "supervisor.jsonl")
        ranks = placement.num_ranks
        log.emit("attempt", attempt=number, num_ranks=ranks, checkpoints=start.checkpoints[:1])
        self._progress.follow(directory / "events")
        launcher_code, says = self._launch_and_wait(number, placement)
        self._progress.poll()
        self._lease.check()
        end = self._record_end(start, launcher_code, says)
        gained = end.steps_gained
        log.emit("attempt_end", attempt=number, failure=end.failure, reason=end.reason, steps_gained=gained)
        log.close()
        return end

    def _launch_and_wait(self, number: int, placement: Placement) -> tuple[int | None, str | None]:
        """Run one attempt to its end; no process of it is left afterwards, or `_obstacle` says so.

        Returns the launcher's exit code, and why the attempt had to be killed, if it had.
        """
        try:
            ranks = self._launcher.start(self._run_dir, number, placement, self._config)
        except HpctrainError:
            raise
        except OSError as error:  # no process or memory left on this host: may pass
            return None, f"the launcher could not be started: {error}"
        try:
            says = self._wait(ranks, number, placement)
        finally:
            self._end(ranks)
        return self._launcher_code(ranks), says

    def _launcher_code(self, ranks: Ranks) -> int | None:
        """The launcher's exit code; None where even SIGKILL did not end it."""
        try:
            return ranks.process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return None

    def _end(self, ranks: Ranks) -> None:
        try:
            ranks.end()
        except HangError as error:
            if self._job is None:
                raise
            self._obstacle = str(error)  # the queue ends what does not end here

    def _wait(self, ranks: Ranks, number: int, placement: Placement) -> str | None:
        """Wait for the launcher, passing stop requests on; returns why everything must be killed, if so."""
        directory = attempt_dir(self._run_dir, number)
        watch = AttemptWatch(directory, placement.num_ranks, self._config.resilience, self._linger_s)
        while True:
            try:
                ranks.process.wait(_POLL_S)
                return None
            except subprocess.TimeoutExpired:
                pass
            self._lease.beat()
            self._progress.poll()
            if self._asked_to_leave():
                ranks.ask_to_leave()
            overdue = self._overdue(ranks) or watch.overdue()
            if overdue is not None:
                return overdue

    def _overdue(self, ranks: Ranks) -> str | None:
        """Why this attempt must be killed now, for reasons outside it."""
        if self._flag.seen.count("SIGINT") > 1:
            return "interrupted twice"
        self._lost_node = ranks.lost_node()
        if self._lost_node is not None:
            return f"node {self._lost_node} failed"
        if self._leaving is not None and self._clock.is_over():
            return "no save was finished before the end of the job"
        return None

    def _asked_to_leave(self) -> bool:
        """Whether this supervisor was asked to stop, or its job's time is up; stays true."""
        new = self._flag.seen[self._heeded :]
        self._heeded += len(new)
        for name in new if self._leaving is None else ():
            # a warning from the batch system is not an order: the clock knows the best moment
            if self._job is None or name not in _WARNINGS or self._clock.warned():
                self._leaving = self._leaving or name
            else:
                self._progress.say(
                    f"{name}: {self._clock.left_s():.0f} s are left of the job; saving before its end"
                )
        if self._leaving is None and self._clock.leave_is_due(self._progress.pace):
            self._leaving = "the end of the job's time"
        return self._leaving is not None

    def _start_record(self, number: int, placement: Placement) -> StartRecord:
        job = self._job
        return StartRecord(
            attempt=number,
            num_ranks=placement.num_ranks,
            checkpoints=admissible_checkpoints(self._run_dir, number),
            task_dir=str(self._task_dir),
            host=socket.gethostname(),
            pid=os.getpid(),
            boot_id=boot_id(),
            nodes=list(placement.nodes),
            started_unix_s=time.time(),
            version=__version__,
            job="" if job is None else job.id,
            submission="" if job is None else job.submission,
            restart=0 if job is None else job.restart,
            submitted_unix_s=None if job is None else job.submitted_unix_s,
        )

    def _record_end(self, start: StartRecord, launcher_code: int | None, says: str | None) -> EndSummary:
        """Judge the attempt, and write it down."""
        seen = Seen(launcher_code, says, self._lost_node, self._progress.last_step, self._leaving is not None)
        end = summarize(self._run_dir, start, self._launcher, seen)
        write_end(self._run_dir, end)
        self._history.append(AttemptOutcome(end.failure, end.code, end.steps_gained > 0, end.asked_to_leave))
        return end

    def _announce_relaunch(self, end: EndSummary, action: Action, placement: Placement) -> None:
        wait = f" in {action.delay_s:g} s" if action.delay_s else ""
        lost = (
            f" on {placement.num_ranks} ranks without {', '.join(placement.lost)}" if placement.lost else ""
        )
        self._progress.say(
            f"attempt {end.attempt}: {end.reason}; relaunching{lost}{wait} from {self._resume_point(end)}"
        )

    def _resume_point(self, end: EndSummary) -> str:
        return next(
            iter(admissible_checkpoints(self._run_dir, end.attempt + 1)),
            "the beginning (nothing was saved yet)",
        )

    def _pause(self, delay_s: float) -> None:
        deadline_s = time.monotonic() + delay_s
        while not self._asked_to_leave() and (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _POLL_S))
            self._lease.beat()

    def _finish(self, end: EndSummary, action: Action) -> None:
        """Say how it ended, and what comes next."""
        self._progress.close()
        point = self._resume_point(end)
        if action.kind is ActionKind.DONE:
            restarts = complete_result(self._run_dir)
            self._progress.say(
                f"finished with {restarts} restart{'s' if restarts != 1 else ''}: {self._run_dir}/result.json"
            )
        elif action.kind is ActionKind.LEAVE:
            what = f"left on {self._leaving}: {end.reason}"
            self._progress.say(f"{what}; run the same command again to go on from {point}")
        elif action.kind is ActionKind.REQUEUE:
            asked = "" if self._leaving is None else f"left on {self._leaving}: "
            self._progress.say(
                f"attempt {end.attempt}: {asked}{end.reason}; {action.reason}; next from {point}"
            )
        else:
            log = self._launcher.log(self._run_dir, end.attempt)
            for line in failure_lines(self._run_dir, end, action, len(self._history), point, log):
                self._progress.say(line)
