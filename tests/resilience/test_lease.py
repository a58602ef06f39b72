from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.errors import ConfigError, StorageError
from hpctrain.resilience.attempts import attempt_dir, is_superseded, newest_attempt, next_attempt, write_json
from hpctrain.resilience.lease import JobIdentity, Lease, LeaseLostError, boot_id
from hpctrain.resilience.owner import Owner
from tests.resilience.conftest import wait_until
from tests.support import ROOT

HOLDER = """
import sys, time
from pathlib import Path
from hpctrain.resilience.lease import Lease
lease = Lease(Path(sys.argv[1]))
lease.acquire()
lease.beat(4)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "held\n"
        yield process
    process.kill()
    process.wait()


def test_a_live_owner_is_refused_by_name(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(ConfigError, match=rf"pid {holder.pid}, attempt 4.*kill {holder.pid}.*--dir"):
        Lease(tmp_path).acquire()
    holder.send_signal(signal.SIGSTOP)  # stopped is not dead
    with pytest.raises(ConfigError):
        Lease(tmp_path).acquire()


def test_a_killed_owner_is_taken_over_at_once(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    began_s = time.monotonic()
    with Lease(tmp_path) as lease:
        previous = lease.acquire()
        assert previous is not None
        assert (previous.pid, previous.attempt) == (holder.pid, 4)
    assert time.monotonic() - began_s < 1


def test_a_released_directory_has_no_owner(tmp_path: Path) -> None:
    for _ in range(2):
        with Lease(tmp_path) as lease:
            assert lease.acquire() is None
            assert (tmp_path / "owner.json").exists()
        assert not (tmp_path / "owner.json").exists()
    lease.release()


def test_two_leases_in_one_process(tmp_path: Path) -> None:
    with Lease(tmp_path) as lease:
        lease.acquire()
        with pytest.raises(ConfigError):
            Lease(tmp_path).acquire()


def put_owner(tmp_path: Path, heartbeat: int, job: str = "") -> None:
    owner = Owner("another-host", 77, "another boot", 2, heartbeat, job)
    temporary = tmp_path / "owner.tmp"
    temporary.write_text(json.dumps(asdict(owner)))
    temporary.replace(tmp_path / "owner.json")


def test_an_owner_on_another_host_is_alive_while_its_heart_beats(tmp_path: Path) -> None:
    put_owner(tmp_path, 1)
    beats = threading.Timer(0.3, put_owner, (tmp_path, 2))
    beats.start()
    with pytest.raises(ConfigError, match="host another-host, pid 77, attempt 2"):
        Lease(tmp_path, observe_s=5).acquire()
    beats.join()


def test_an_owner_on_another_host_whose_heart_stands_still_is_taken_over(tmp_path: Path) -> None:
    put_owner(tmp_path, 1)
    with Lease(tmp_path, observe_s=0.5) as lease:
        began_s = time.monotonic()
        previous = lease.acquire()
        assert previous is not None
        assert previous.host == "another-host"
        assert time.monotonic() - began_s >= 0.5


def test_an_owner_that_releases_while_it_is_observed(tmp_path: Path) -> None:
    put_owner(tmp_path, 1)
    release = threading.Timer(0.3, (tmp_path / "owner.json").unlink)
    release.start()
    with Lease(tmp_path, observe_s=20) as lease:
        began_s = time.monotonic()
        lease.acquire()
        assert time.monotonic() - began_s < 5
    release.join()


def test_after_a_refusal_the_lock_is_free(tmp_path: Path) -> None:
    put_owner(tmp_path, 1)
    beats = threading.Timer(0.2, put_owner, (tmp_path, 2))
    beats.start()
    with pytest.raises(ConfigError):
        Lease(tmp_path, observe_s=5).acquire()
    beats.join()
    with Lease(tmp_path, observe_s=0.3) as lease:
        assert lease.acquire() is not None


def test_beats_are_few_and_count_up(tmp_path: Path) -> None:
    with Lease(tmp_path) as lease:
        lease.acquire()
        for _ in range(100):
            lease.beat()
        assert json.loads((tmp_path / "owner.json").read_text())["heartbeat"] == 1
        lease.beat(3)
        found = json.loads((tmp_path / "owner.json").read_text())
        assert (found["heartbeat"], found["attempt"]) == (2, 3)


def test_damaged_owner_files_do_not_block(tmp_path: Path) -> None:
    for content in ("", "{", '{"host": "x"}'):
        (tmp_path / "owner.json").write_text(content)
        with Lease(tmp_path) as lease:
            assert lease.acquire() is None


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "owner.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"owner\.lock"):
        Lease(tmp_path).acquire()
    assert not (tmp_path / "elsewhere").exists()


def test_the_boot_has_a_name() -> None:
    wait_until(lambda: boot_id() == boot_id() != "")


ACTOR = """
import sys
from dataclasses import replace
from pathlib import Path
from hpctrain.errors import HpctrainError
from hpctrain.resilience import lease as module
from hpctrain.resilience.lease import JobIdentity, Lease
module.HEARTBEAT_S = 0.0  # every beat is due
host, job, restart = sys.argv[1:]
for line in sys.stdin:
    verb, _, argument = line.rstrip().partition(" ")
    try:
        if verb == "acquire":
            lease = Lease(Path(argument), JobIdentity(job, int(restart)) if job else None)
            lease._owner = replace(lease._owner, host=host or lease._owner.host)
            lease.acquire()
        elif verb == "beat":
            lease.beat(int(argument) if argument else None)
        else:
            getattr(lease, verb)()
        print("done", flush=True)
    except HpctrainError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""


class Actor:
    """A supervisor's lease in a process of its own. Its lock is real; the host's name is not: a machine has one."""

    def __init__(self, host: str, job: str, restart: int) -> None:
        self.restart = restart
        self.process = subprocess.Popen(
            [sys.executable, "-c", ACTOR, host, job, str(restart)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, verb: str, argument: object = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{verb} {argument}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 30)[0], "no answer in 30 s"
        return self.process.stdout.readline().rstrip()

    def do(self, verb: str, argument: object = "") -> str:
        self.ask(verb, argument)
        return self.answer()

    def end(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def actor() -> Iterator[Callable[..., Actor]]:
    """Starts processes that hold a lease; they end with the test."""
    actors: list[Actor] = []

    def start(host: str = "", job: str = "", restart: int = 0) -> Actor:
        actors.append(Actor(host, job, restart))
        return actors[-1]

    yield start
    for one in actors:
        one.end()


def owner_json(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "owner.json").read_text())


def start_attempt(run_dir: Path, lease: Lease) -> int:
    """As a supervisor does it: the number, the lease, the start record."""
    number = next_attempt(run_dir)
    lease.beat(number)
    write_json(attempt_dir(run_dir, number) / "start.json", {})
    return number


def make_due(lease: Lease) -> Lease:
    lease._beaten_s = -1e9
    return lease


def test_a_requeued_job_takes_over_from_its_zombie(tmp_path: Path, actor: Callable[..., Actor]) -> None:
    """The old supervisor lives and holds the lock; it notices at its next beat, and leaves the new owner alone."""
    zombie = actor(job="12", restart=0)
    assert zombie.do("acquire", tmp_path) == "done"
    assert zombie.do("beat", 3) == "done"
    began_s = time.monotonic()
    with Lease(tmp_path, JobIdentity("12", 1)) as lease:
        previous = lease.acquire()
        assert time.monotonic() - began_s < 1
        assert previous is not None
        assert (previous.pid, previous.attempt, previous.restart) == (zombie.process.pid, 3, 0)
        for verb in ("check", "beat"):
            assert zombie.do(verb).startswith("LeaseLostError: run directory"), verb
        assert zombie.do("release") == "done"
        mine = owner_json(tmp_path)
        assert (mine["pid"], mine["job"], mine["restart"]) == (os.getpid(), "12", 1)
        make_due(lease).beat()
        with pytest.raises(ConfigError, match="restart 1"):  # the lock at the path is the new owner's
            Lease(tmp_path).acquire()
    assert not (tmp_path / "owner.json").exists()


def test_an_earlier_start_is_refused_even_if_the_later_one_is_dead(
    tmp_path: Path, actor: Callable[..., Actor]
) -> None:
    """It comes late from a node that was cut off, and there will be a still later start."""
    later = actor(job="12", restart=2)
    later.do("acquire", tmp_path)
    later.end()
    with pytest.raises(ConfigError, match=r"later start.*restart 2; this is restart 1.*remove owner\.json"):
        Lease(tmp_path, JobIdentity("12", 1)).acquire()
    with Lease(tmp_path, JobIdentity("12", 3)) as lease:
        assert lease.acquire() is not None


def test_two_supervisors_of_one_start_are_not_told_to_cancel_their_own_job(
    tmp_path: Path, actor: Callable[..., Actor]
) -> None:
    first = actor(job="12", restart=1)
    first.do("acquire", tmp_path)

    def never(job: str) -> bool:
        pytest.fail(f"asked for {job}")

    with pytest.raises(ConfigError, match=f"kill {first.process.pid}"):
        Lease(tmp_path, JobIdentity("12", 1), is_alive=never).acquire()
    first.end()
    with Lease(tmp_path, JobIdentity("12", 1), is_alive=never) as lease:
        assert lease.acquire() is not None


@pytest.mark.parametrize("job", [None, JobIdentity("13", 0)])
@pytest.mark.parametrize("locked", [True, False])
def test_a_live_job_is_refused_by_its_number(
    tmp_path: Path, actor: Callable[..., Actor], job: JobIdentity | None, locked: bool
) -> None:
    """Also while it waits to be started again, and nobody holds the lock."""
    other = actor("n1", "12", 0)
    other.do("acquire", tmp_path)
    other.do("beat", 3)
    if not locked:
        other.end()
    wanted = (
        r"in use by Slurm job 12 \(host n1, attempt 3\): wait for it, or end it with `scancel 12`, or choose "
        "another --dir"
    )
    asked: list[str] = []
    with pytest.raises(ConfigError, match=wanted):
        Lease(tmp_path, job, is_alive=lambda number: asked.append(number) or True).acquire()
    assert asked == ["12"]


@pytest.mark.parametrize("locked", [True, False])
def test_a_job_that_is_gone_is_taken_over_at_once(
    tmp_path: Path, actor: Callable[..., Actor], locked: bool
) -> None:
    """Its process on another host may go on, and holds the lock then: Slurm has given that node up."""
    gone = actor("n1", "12", 0)
    gone.do("acquire", tmp_path)
    if not locked:
        gone.end()
        put_owner(tmp_path, 1, job="12")  # as if the lock were local to the node
    began_s = time.monotonic()
    with Lease(tmp_path, JobIdentity("13", 0), is_alive=lambda _: False) as lease:
        assert lease.acquire() is not None
        assert time.monotonic() - began_s < 1
        lease.check()
        if locked:
            assert "LeaseLostError" in gone.do("beat")


def test_a_live_process_on_this_host_is_refused_whatever_slurm_says(
    tmp_path: Path, actor: Callable[..., Actor]
) -> None:
    here = actor(job="12")
    here.do("acquire", tmp_path)
    for known in (False, None):
        with pytest.raises(ConfigError, match=f"Slurm job 12.*kill {here.process.pid}"):
            Lease(tmp_path, JobIdentity("13", 0), is_alive=lambda _, known=known: known).acquire()
    assert here.do("beat") == "done"


def test_where_slurm_knows_nothing_the_heartbeat_decides(tmp_path: Path, actor: Callable[..., Actor]) -> None:
    put_owner(tmp_path, 1, job="12")
    beats = threading.Timer(0.3, put_owner, (tmp_path, 2), {"job": "12"})
    beats.start()
    with pytest.raises(ConfigError, match="another-host"):
        Lease(tmp_path, JobIdentity("13", 0), observe_s=5).acquire()
    beats.join()
    with Lease(tmp_path, JobIdentity("13", 0), observe_s=0.5) as lease:
        began_s = time.monotonic()
        assert lease.acquire() is not None
        assert time.monotonic() - began_s >= 0.5


@pytest.mark.parametrize("restarts", [(1, 1, 1, 1), (1, 1, 2, 2)])
@pytest.mark.parametrize("before", ["zombie", "dead", "nobody"])
def test_of_all_that_want_it_at_once_one_is_the_owner(
    tmp_path: Path, actor: Callable[..., Actor], restarts: tuple[int, ...], before: str
) -> None:
    """Real processes in many rounds: one is left, of the latest start; whoever had it in between knows that it lost."""
    actors = [actor(job="12", restart=restart) for restart in restarts]
    zombie = actor(job="12", restart=0)
    for number in range(15):
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        if before != "nobody":
            assert zombie.do("acquire", run_dir) == "done"
        if before == "dead":
            owner = (run_dir / "owner.json").read_bytes()
            zombie.do("release")
            (run_dir / "owner.json").write_bytes(owner)
        for one in actors:
            one.ask("acquire", run_dir)
        answers = [one.answer() for one in actors]
        assert all(answer == "done" or answer.startswith("ConfigError") for answer in answers), answers
        winners = [one for one, answer in zip(actors, answers, strict=True) if answer == "done"]
        left = [one for one in winners if one.do("check") == "done"]
        assert len(left) == 1, answers
        assert left[0].process.pid == owner_json(run_dir)["pid"]
        if before != "nobody":
            assert left[0].restart == max(restarts)
        left[0].do("release")


def test_a_lock_that_was_replaced_while_slurm_was_asked_is_not_kept(tmp_path: Path) -> None:
    """In that time the job came back, took over, and gave the directory back: what was locked is no longer the lock."""
    put_owner(tmp_path, 1, job="12")

    def comes_back(_job: str) -> bool:
        with Lease(tmp_path, JobIdentity("12", 1)) as back:
            back.acquire()
        return False

    with Lease(tmp_path, JobIdentity("13", 0), is_alive=comes_back) as lease:
        assert lease.acquire() is None
        with pytest.raises(ConfigError):
            Lease(tmp_path).acquire()


def test_a_newer_attempt_is_a_loss_whatever_owner_json_says(tmp_path: Path) -> None:
    with Lease(tmp_path) as lease:
        lease.acquire()
        start_attempt(tmp_path, lease)
        number = next_attempt(tmp_path)
        lease.check()  # the directory alone does not count
        write_json(attempt_dir(tmp_path, number) / "start.json", {})
        with pytest.raises(LeaseLostError, match="has attempt 2") as caught:
            lease.check()
        assert caught.value.exit_code == 78
        before = (tmp_path / "owner.json").read_bytes()
        lease.beat()  # not due: nothing is asked and nothing written
        with pytest.raises(LeaseLostError):
            make_due(lease).beat()
        assert (tmp_path / "owner.json").read_bytes() == before
    assert (tmp_path / "owner.json").exists(), "the owner's name is not removed by the one that lost"


def test_attempts_of_before_are_no_loss(tmp_path: Path) -> None:
    for _ in range(3):
        with Lease(tmp_path) as lease:
            lease.acquire()
            lease.check()
            start_attempt(tmp_path, lease)
            number = next_attempt(tmp_path)
            write_json(attempt_dir(tmp_path, number) / "start.json", {})
            lease.beat(number)  # told late, it is still our own
            lease.check()


@pytest.mark.parametrize("content", [None, "", "{", '{"host": "x"}', "[]"])
def test_a_missing_or_torn_owner_file_is_mended(tmp_path: Path, content: str | None) -> None:
    with Lease(tmp_path, JobIdentity("12", 1)) as lease:
        lease.acquire()
        start_attempt(tmp_path, lease)
        wanted = owner_json(tmp_path)
        if content is None:
            (tmp_path / "owner.json").unlink()
        else:
            (tmp_path / "owner.json").write_text(content)
        lease.check()
        make_due(lease).beat()
        assert owner_json(tmp_path) == {**wanted, "heartbeat": wanted["heartbeat"] + 1}


def test_an_owner_file_of_before_jobs_is_read(tmp_path: Path) -> None:
    old = {"host": "another-host", "pid": 7, "boot_id": "another boot", "attempt": 2, "heartbeat": 5}
    write_json(tmp_path / "owner.json", old)
    with Lease(tmp_path, JobIdentity("12", 1), observe_s=0.2) as lease:
        assert lease.acquire() == Owner(**old, job="", restart=0)


def test_a_number_taken_by_a_zombie_is_never_started(tmp_path: Path) -> None:
    """Its mkdir hung while the node was cut off. The attempt under way is not disturbed by the directory."""
    zombie = Lease(tmp_path, JobIdentity("12", 0))
    zombie.acquire()
    start_attempt(tmp_path, zombie)
    with Lease(tmp_path, JobIdentity("12", 1)) as lease:
        lease.acquire()
        mine = start_attempt(tmp_path, lease)
        with pytest.raises(LeaseLostError):
            start_attempt(tmp_path, zombie)
        zombie.release()
        make_due(lease).beat()
        assert (mine, newest_attempt(tmp_path)) == (2, 3)
        assert not is_superseded(tmp_path, mine)
        assert start_attempt(tmp_path, lease) == 4


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from([0, 1, "beat", "attempt", "stray directory"]), max_size=12))
def test_late_writes_of_zombies_cost_the_owner_nothing(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str | int]
) -> None:
    """What a zombie (of restart 0 or 1) decided before it was cut off may land at any time after."""
    run_dir = tmp_path_factory.mktemp("run")
    zombies = [Lease(run_dir, JobIdentity("12", restart)) for restart in (0, 1)]
    late = []
    for zombie in zombies:
        zombie.acquire()
        start_attempt(run_dir, zombie)
        late.append(owner_json(run_dir))
    with Lease(run_dir, JobIdentity("12", 2)) as lease:
        lease.acquire()
        for step in steps:
            if isinstance(step, int):
                write_json(run_dir / "owner.json", late[step])
            elif step == "beat":
                make_due(lease).beat()
                assert owner_json(run_dir)["restart"] == 2
            elif step == "attempt":
                start_attempt(run_dir, lease)
            else:
                next_attempt(run_dir)
        lease.check()
        for zombie in zombies:
            if owner_json(run_dir)["restart"] == 2 or "attempt" in steps:
                with pytest.raises(LeaseLostError):
                    zombie.check()
            zombie.release()


def test_without_locks_the_heartbeat_decides_on_one_host_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre mounted without `-o flock`; no such filesystem is here, so flock is made to say what it says there."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    first = Lease(tmp_path)
    assert first.acquire() is None
    stop = threading.Event()

    def live() -> None:
        while not stop.wait(0.05):
            first._beaten_s = 0.0  # as if its five seconds were over
            first.beat()

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="in use by"):
            Lease(tmp_path, observe_s=2.0).acquire()
    finally:
        stop.set()
        thread.join(10)
    dead = Lease(tmp_path, observe_s=0.3).acquire()
    assert dead is not None
    assert dead.pid == os.getpid()
