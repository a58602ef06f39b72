"""The supervisor in a batch job, over real mpirun and real processes; the job is played (see `FakeJob`)."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpctrain.config import RunConfig
from hpctrain.errors import ConfigError, HangError
from hpctrain.launch.local import LocalLauncher, LocalRanks
from hpctrain.observe.progress import LineProgress
from hpctrain.resilience.attempts import StartRecord, list_attempts, next_attempt, write_start
from hpctrain.resilience.exits import FailureClass
from hpctrain.resilience.launching import Launcher, Placement
from hpctrain.resilience.lease import JobIdentity, Lease, LeaseLostError
from hpctrain.resilience.rundir import adopt_config, open_run_dir
from hpctrain.resilience.scratch import scratch_prefix
from hpctrain.resilience.supervisor import Supervisor
from tests.resilience.conftest import WORKER, FakeJob, Lines, ends, make_config, wait_for_step

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("no_faults", "nothing_is_left")]
Supervise = Callable[..., int]
Later = Callable[[Callable[[], object]], None]
FAR_S, NEAR_S = 100_000.0, 500.0


@pytest.fixture(autouse=True)
def long_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps for a minute; and a signal that comes too late does not end the tests."""
    monkeypatch.setenv("WORKER_STEPS", "3000")
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def later() -> Iterator[Later]:
    """Runs something beside the supervisor, which needs the main thread."""
    threads: list[threading.Thread] = []

    def later(what: Callable[[], object]) -> None:
        threads.append(threading.Thread(target=what))
        threads[-1].start()

    yield later
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def warn() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_before_the_walltime_all_ranks_save_and_the_job_comes_back(
    tmp_path: Path, supervise: Supervise, lines: Lines
) -> None:
    job = FakeJob(left_s=6.0)
    began_s = time.monotonic()
    assert supervise(job=job, leave_margin_s=3.0) == 75
    assert 2.0 < time.monotonic() - began_s < 6.0, "as late as possible, and not later"
    (end,) = ends(tmp_path)
    assert (end.failure, end.asked_to_leave) == (FailureClass.LEAVE, True)
    assert end.step_after == end.ranks[0]["step"], "no step is lost"
    assert job.come_backs == 1
    assert "left on the end of the job's time: all ranks saved their state and left" in lines.text
    assert f"next from step-{end.step_after:09d}-a0001" in lines.text
    assert "job 7 comes back" in lines.text


def test_the_start_record_tells_job_submission_and_restart(
    tmp_path: Path, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_STEPS", "5")
    job = FakeJob(submission="7", restart=2)
    job.id = "9"  # a successor of the job that was submitted
    assert supervise(job=job) == 0
    start = list_attempts(tmp_path / "run")[0].start
    assert start is not None
    assert (start.job, start.submission, start.restart, start.submitted_unix_s) == ("9", "7", 2, 1.7e9)
    assert job.come_backs == 0, "a finished run does not come back"


def warned_job(supervise: Supervise, later: Later, tmp_path: Path, assured: bool) -> None:
    later(lambda: (wait_for_step(tmp_path, 3), warn()))
    assert supervise(job=FakeJob(assured=assured)) == 75


def test_a_job_that_comes_back_keeps_the_run(tmp_path: Path, supervise: Supervise, later: Later) -> None:
    warned_job(supervise, later, tmp_path, assured=True)
    with pytest.raises(ConfigError, match="in use by Slurm job 7"):
        Lease(tmp_path / "run", JobIdentity("8", 0), is_alive=lambda job: True).acquire()
    began_s = time.monotonic()
    with Lease(tmp_path / "run", JobIdentity("7", 1)) as lease:
        assert lease.acquire() is not None
    assert time.monotonic() - began_s < 2, "its next start takes over at once"


def test_a_job_that_does_not_come_back_leaves_the_run_to_others(
    tmp_path: Path, supervise: Supervise, later: Later, lines: Lines
) -> None:
    warned_job(supervise, later, tmp_path, assured=False)
    with Lease(tmp_path / "run", JobIdentity("8", 0), is_alive=lambda job: True) as lease:
        assert lease.acquire() is None
    assert "job 7 cannot come back" in lines.text


def test_a_warning_far_from_the_end_means_now(
    tmp_path: Path, supervise: Supervise, later: Later, lines: Lines
) -> None:
    job = FakeJob(left_s=FAR_S)
    later(lambda: (wait_for_step(tmp_path, 7), warn()))
    assert supervise(job=job) == 75
    (end,) = ends(tmp_path)
    assert (end.failure, end.steps_gained) == (FailureClass.LEAVE, end.ranks[0]["step"])
    assert job.come_backs == 1
    assert "left on SIGUSR1" in lines.text


def test_a_warning_near_the_end_waits_for_the_clock(
    tmp_path: Path, supervise: Supervise, later: Later, lines: Lines
) -> None:
    """The queue is asked when the warning comes: by then it says that the end is near."""
    job = FakeJob(left_s=NEAR_S)
    warned_at_step = 7

    def warn_twice() -> None:
        wait_for_step(tmp_path, warned_at_step)
        warn()
        wait_for_step(tmp_path, warned_at_step + 60)
        assert list_attempts(tmp_path / "run")[0].end is None
        job.left_s = 4.0
        warn()

    later(warn_twice)
    assert supervise(job=job, leave_margin_s=2.0) == 75
    (end,) = ends(tmp_path)
    assert end.failure is FailureClass.LEAVE
    assert end.step_after > warned_at_step + 60
    assert "SIGUSR1: 500 s are left of the job; saving before its end" in lines.text
    assert "left on the end of the job's time" in lines.text


def test_a_second_warning_changes_nothing(
    tmp_path: Path, supervise: Supervise, later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even while a rank is long about leaving: no kill, no second request, one return to the queue."""
    job = FakeJob(left_s=FAR_S)
    monkeypatch.setenv("HPCTRAIN_FAULTS", "sleep@step:rank=1,step=8,s=1.5")

    def warn_often() -> None:
        wait_for_step(tmp_path, 7)
        for _ in range(4):
            warn()
            time.sleep(0.2)

    later(warn_often)
    assert supervise(job=job) == 75
    (end,) = ends(tmp_path)
    assert (end.failure, end.step_after) == (FailureClass.LEAVE, 8)
    assert job.come_backs == 1


def test_where_no_save_can_finish_the_last_checkpoint_counts_and_it_is_said(
    tmp_path: Path, supervise: Supervise, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTRAIN_FAULTS", "hang@step:rank=1,step=8")
    job = FakeJob(left_s=6.0)
    assert supervise(job=job, leave_margin_s=4.0) == 75
    (end,) = ends(tmp_path)
    assert (end.failure, end.asked_to_leave, end.step_after) == (FailureClass.KILLED, True, 5)
    assert job.come_backs == 1
    assert "no save was finished before the end of the job" in lines.text
    assert "next from step-000000005-a0001" in lines.text


def test_leaving_without_progress_three_times_stops(
    tmp_path: Path, supervise: Supervise, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walltime that is too short for one save: the third start of the job does not come back."""
    monkeypatch.setenv("WORKER_COMMITS", "no")
    jobs = [FakeJob(left_s=4.0, restart=restart) for restart in range(3)]
    codes = [supervise(job=job, leave_margin_s=2.5) for job in jobs]
    assert codes == [75, 75, 72]
    assert [job.come_backs for job in jobs] == [1, 1, 0]
    assert [end.failure for end in ends(tmp_path)] == [FailureClass.LEAVE] * 3
    assert "gave up after 3 attempts: the last 3 attempts committed no newer step" in lines.text


def test_a_walltime_within_the_margin_does_not_loop_either(
    tmp_path: Path, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_COMMITS", "no")  # on a busy machine a rank gets to a step before it is killed
    jobs = [FakeJob(left_s=1.0, restart=restart) for restart in range(3)]
    codes = [supervise(job=job, leave_margin_s=3.0) for job in jobs]
    assert codes[:2] == [75, 75]
    assert codes[2] not in (0, 75)
    assert [job.come_backs for job in jobs] == [1, 1, 0]


@pytest.mark.parametrize(("submission", "attempts"), [("7", 2), ("8", 3)])
def test_attempts_of_an_earlier_supervisor_count_in_their_own_submission(
    tmp_path: Path, supervise: Supervise, submission: str, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One died with its batch host and left no end record."""
    monkeypatch.setenv("HPCTRAIN_FAULTS", "kill@start:rank=0")
    run_dir = tmp_path / "run"
    open_run_dir(run_dir, make_config())
    with Lease(run_dir) as lease:
        lease.acquire()
        adopt_config(run_dir, make_config())
    died = StartRecord(
        attempt=next_attempt(run_dir), num_ranks=2, checkpoints=[], task_dir="", host="gone", pid=1, boot_id="",
        nodes=["gone"], started_unix_s=1.0, version="", job=submission, submission=submission,
    )  # fmt: skip
    write_start(run_dir, died)
    job = FakeJob(restart=1)
    assert supervise(job=job, max_no_progress=2) == 72
    assert len(list_attempts(run_dir)) == attempts
    assert job.come_backs == 0


def test_a_crash_is_mended_within_the_job(
    tmp_path: Path, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_STEPS", "20")
    monkeypatch.setenv("HPCTRAIN_FAULTS", "kill@step:rank=1,step=13,attempt=1")
    job = FakeJob(left_s=FAR_S)
    assert supervise(job=job) == 0
    assert [end.failure for end in ends(tmp_path)] == [FailureClass.KILLED, FailureClass.DONE]
    assert job.come_backs == 0


def test_a_crash_with_little_time_left_goes_back_to_the_queue(
    tmp_path: Path, supervise: Supervise, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left would do for a save and not for another start-up: `JobClock.has_room`."""
    monkeypatch.setenv("HPCTRAIN_FAULTS", "kill@step:rank=1,step=13;sleep@start:s=3")
    job = FakeJob(left_s=8.0)
    assert supervise(job=job, leave_margin_s=2.0) == 75
    (end,) = ends(tmp_path)
    assert (end.failure, end.asked_to_leave) == (FailureClass.KILLED, False)
    assert "too few for another attempt" in lines.text
    assert job.come_backs == 1


class Shrinking(LocalLauncher):
    """Loses a node after every attempt, as far as it says; and ranks that cannot be ended, if told so."""

    def __init__(self, placements: list[Placement | HangError | None], immortal: bool = False) -> None:
        super().__init__(2, [sys.executable, str(WORKER)])
        self._placements = placements
        self._immortal = immortal

    def place(self, run_dir: Path, config: RunConfig, *, again: bool) -> Placement | None:  # type: ignore[override]
        found = self._placements.pop(0) if again else super().place(run_dir, config, again=False)
        if isinstance(found, HangError):
            raise found
        return found

    def start(self, run_dir: Path, attempt: int, placement: Placement, config: RunConfig) -> LocalRanks:
        ranks = super().start(run_dir, attempt, placement, config)
        if self._immortal:
            end = ranks.end

            def fail() -> None:
                end()
                raise HangError("job step 7.0 does not end")

            ranks.end = fail  # type: ignore[method-assign]
        return ranks


def shrink(tmp_path: Path, lines: Lines, launcher: Launcher, job: FakeJob | None) -> int:
    progress = LineProgress(lines)  # type: ignore[arg-type]
    return Supervisor(tmp_path / "run", make_config(), launcher, job=job, progress=progress).run()


def test_a_lost_node_is_left_out(tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKER_STEPS", "20")
    monkeypatch.setenv("HPCTRAIN_FAULTS", "kill@step:rank=1,step=13,attempt=1")
    launcher = Shrinking([Placement(("n1",), 1, lost=("n2",))])
    assert shrink(tmp_path, lines, launcher, FakeJob()) == 0
    start = list_attempts(tmp_path / "run")[1].start
    assert start is not None
    assert (start.nodes, start.num_ranks) == (["n1"], 1)
    assert "relaunching on 1 ranks without n2 from step-000000010-a0001" in lines.text


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize("found", [None, HangError("Slurm does not say which nodes job 7 has")])
def test_without_nodes_the_job_goes_back_to_the_queue(
    tmp_path: Path, lines: Lines, queued: bool, found: HangError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTRAIN_FAULTS", "kill@step:rank=1,step=8")
    job = FakeJob() if queued else None
    assert shrink(tmp_path, lines, Shrinking([found]), job) == (75 if queued else 72)
    assert len(ends(tmp_path)) == 1
    assert str(found or "not enough nodes are left that answer") in lines.text
    assert job is None or job.come_backs == 1


def test_ranks_that_cannot_be_ended_are_left_to_the_queue(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTRAIN_FAULTS", "kill@step:rank=1,step=8")
    job = FakeJob()
    assert shrink(tmp_path, lines, Shrinking([], immortal=True), job) == 75
    assert "job step 7.0 does not end; next from step-000000005-a0001" in lines.text
    assert job.come_backs == 1


def test_without_a_queue_they_are_an_error(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_STEPS", "5")
    with pytest.raises(HangError, match="does not end"):
        shrink(tmp_path, lines, Shrinking([], immortal=True), None)


def test_a_supervisor_deposed_while_it_looked_for_nodes_touches_nothing(
    tmp_path: Path, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host was cut off and healed: the job's next start owns the run, and what is on the nodes is that one's."""
    monkeypatch.setenv("HPCTRAIN_FAULTS", "kill@step:rank=1,step=7,attempt=1")
    job, cleaned = FakeJob(), []
    real_place, real_clean = LocalLauncher.place, LocalLauncher.clean
    later_start = Lease(tmp_path / "run", JobIdentity("7", 1))

    def place(self: LocalLauncher, run_dir: Path, config: RunConfig, *, again: bool) -> Placement | None:
        if not again:
            return real_place(self, run_dir, config, again=again)
        later_start.acquire()
        return None  # which would be a reason to requeue

    def clean(self: LocalLauncher, run_dir: Path) -> None:
        cleaned.append(list_attempts(run_dir)[-1].end)
        real_clean(self, run_dir)

    monkeypatch.setattr(LocalLauncher, "place", place)
    monkeypatch.setattr(LocalLauncher, "clean", clean)
    with later_start, pytest.raises(LeaseLostError, match="owned by another supervisor"):
        supervise(job=job)
    assert job.come_backs == 0
    assert cleaned == [None], "before the only launch, and never again"
    for path in Path("/tmp").glob(f"{scratch_prefix(tmp_path / 'run')}*"):
        shutil.rmtree(path)
    for path in Path("/dev/shm").glob(f"{scratch_prefix(tmp_path / 'run')}*"):
        shutil.rmtree(path)
