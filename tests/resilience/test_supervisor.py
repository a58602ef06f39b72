"""The supervisor over real mpirun and real processes; the ranks are `worker.py` (no torch, no MPI)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpctrain.config import RunConfig, parse_run
from hpctrain.errors import ConfigError, UsageError
from hpctrain.launch.local import LocalLauncher, LocalRanks, start_process
from hpctrain.resilience.attempts import ATTEMPT_VARIABLE, attempt_dir, list_attempts
from hpctrain.resilience.exits import FailureClass
from hpctrain.resilience.launching import Placement
from hpctrain.resilience.lease import Lease
from hpctrain.resilience.processes import Descendants
from hpctrain.resilience.rundir import adopt_config, open_run_dir
from hpctrain.resilience.supervisor import Supervisor
from tests.resilience.conftest import Lines, ends, make_config, processes_of, wait_for_step, wait_until

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("no_faults", "nothing_is_left")]
Supervise = Callable[..., int]


def faults(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HPCTRAIN_FAULTS", text)


def result(tmp_path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((tmp_path / "run" / "result.json").read_text())
    return content


def test_an_undisturbed_run(tmp_path: Path, supervise: Supervise, lines: Lines) -> None:
    assert supervise() == 0
    assert [end.failure for end in ends(tmp_path)] == [FailureClass.DONE]
    assert (result(tmp_path)["restarts"], result(tmp_path)["steps"]) == (0, 20)
    assert "finished with 0 restarts" in lines.text
    assert not (tmp_path / "run" / "owner.json").exists()


def test_a_finished_run_is_not_run_again(tmp_path: Path, supervise: Supervise, lines: Lines) -> None:
    assert supervise() == 0
    assert supervise() == 0
    assert len(ends(tmp_path)) == 1
    assert "is finished" in lines.text


def test_a_killed_rank_brings_a_relaunch_from_the_checkpoint(
    tmp_path: Path, supervise: Supervise, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(monkeypatch, "kill@step:rank=1,step=13,attempt=1")
    assert supervise(3) == 0
    first, second = ends(tmp_path)
    assert (first.failure, first.blamed_rank, first.steps_gained) == (FailureClass.KILLED, 1, 10)
    assert "exited on signal 9" in (first.launcher_says or "")
    assert second.step_before == 10
    assert result(tmp_path)["restarts"] == 1
    words = "attempt 1: rank 1 was killed (signal 9) after step 12; relaunching from step-000000010-a0001"
    assert words in lines.text


def test_a_relaunch_follows_at_once(
    tmp_path: Path, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(monkeypatch, "kill@step:rank=1,step=13,attempt=1")
    supervise()
    first, second = list_attempts(tmp_path / "run")
    assert first.end is not None
    assert second.start is not None
    assert second.start.started_unix_s - first.end.ended_unix_s < 0.3


def test_killed_in_every_phase_and_during_recovery(
    tmp_path: Path, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [
        "kill@start:rank=0,attempt=1",
        "kill@step:rank=1,step=7,attempt=2",
        "kill@start:rank=1,attempt=3",
    ]
    faults(monkeypatch, ";".join([*rules, "kill@step:rank=0,step=20,attempt=4"]))
    assert supervise(2) == 0
    assert [end.failure for end in ends(tmp_path)] == [*[FailureClass.KILLED] * 4, FailureClass.DONE]


def test_a_bug_is_retried_within_the_budget_and_then_explained(
    tmp_path: Path, supervise: Supervise, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(monkeypatch, "raise@step:rank=1,step=8")
    assert supervise(max_no_progress=2) == 70
    assert [end.steps_gained for end in ends(tmp_path)] == [5, 0, 0]
    last = lines.text[lines.text.index("Traceback") :]
    for words in (
        "InjectedFaultError: injected at 'step'",
        "gave up after 3 attempts: the last 2 attempts committed no newer step",
        "class  bug (exit code 70)",
        "rank 1: InjectedFaultError",
        "phase compute",
        "attempts/a0003/logs/mpirun.log",
        "it goes on from step-000000005-a0001",
    ):
        assert words in last


def test_the_users_error_is_never_retried(
    tmp_path: Path, supervise: Supervise, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    faults(monkeypatch, "explode@step")  # a rule that no rank can read: ConfigError in the rank
    assert supervise() == 78
    assert [end.failure for end in ends(tmp_path)] == [FailureClass.USER]
    assert "gave up after 1 attempt: another attempt would fail in the same way" in lines.text


def test_storage_errors_bring_a_back_off(
    tmp_path: Path, supervise: Supervise, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(monkeypatch, "enospc@step:rank=0,step=8,attempt=1;eio@step:rank=1,step=9,attempt=2")
    assert supervise(backoff_s=0.2) == 0
    assert [end.failure for end in ends(tmp_path)] == [FailureClass.IO, FailureClass.IO, FailureClass.DONE]
    assert "relaunching in 0.2 s" in lines.text
    assert "relaunching in 0.4 s" in lines.text


@pytest.mark.parametrize("action", ["hang", "stop"])
def test_a_hang_is_found_by_the_watchdogs_and_blamed(
    tmp_path: Path, supervise: Supervise, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_HANG_S", "1")
    faults(monkeypatch, f"{action}@step:rank=1,step=8,attempt=1")
    assert supervise(3) == 0
    first = ends(tmp_path)[0]
    assert (first.failure, first.blamed_rank) == (FailureClass.HANG, 1)
    log = tmp_path / "run" / "attempts" / "a0001" / "logs"
    assert "agree" in (log / "rank-0.stacks").read_text()


def test_a_killed_mpirun_takes_its_ranks_along(
    tmp_path: Path, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_STEPS", "60")

    def kill_mpirun() -> None:
        wait_for_step(tmp_path, 12)
        rank = json.loads((tmp_path / "run/attempts/a0001/ranks/1.pid.json").read_text())["pid"]
        psutil.Process(rank).parent().kill()  # type: ignore[union-attr]

    killer = threading.Thread(target=kill_mpirun)
    killer.start()
    assert supervise() == 0
    killer.join(20)
    assert [end.failure for end in ends(tmp_path)] == [FailureClass.KILLED, FailureClass.DONE]
    assert ends(tmp_path)[0].launcher_code == -signal.SIGKILL


def test_a_quiet_exit_is_shown_as_found(
    tmp_path: Path, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(monkeypatch, "exit@step:rank=1,step=8,attempt=1,code=3")
    assert supervise() == 0
    first = ends(tmp_path)[0]
    assert (first.failure, first.blamed_rank) == (FailureClass.OTHER, 1)
    assert "exited with code 3 and no end record" in first.reason


class ScriptLauncher(LocalLauncher):
    """Two ranks whose launcher is a command of the test's choice."""

    def __init__(self) -> None:
        super().__init__(2)

    def command(self, run_dir: Path, attempt: int) -> list[str]:
        raise OSError(11, "no more processes")

    def start(self, run_dir: Path, attempt: int, placement: Placement, config: RunConfig) -> LocalRanks:
        directory, descendants = attempt_dir(run_dir, attempt), Descendants()
        environment = os.environ | {ATTEMPT_VARIABLE: str(directory)}
        process = start_process(self.command(run_dir, attempt), environment, self.log(run_dir, attempt))
        return LocalRanks(process, directory, descendants)


def test_a_result_survives_ranks_that_fall_over_afterwards(tmp_path: Path) -> None:
    class Falling(ScriptLauncher):
        def command(self, run_dir: Path, attempt: int) -> list[str]:
            return ["sh", "-c", f"echo '{{\"steps\": 20}}' > {run_dir}/result.json; kill -9 $$"]

    assert Supervisor(tmp_path / "run", make_config(), Falling()).run() == 0
    assert ends(tmp_path)[0].reason.startswith("finished; then:")
    assert result(tmp_path)["restarts"] == 0


def test_a_launcher_that_cannot_start_is_tried_again_and_given_up(tmp_path: Path, lines: Lines) -> None:
    assert Supervisor(tmp_path / "run", make_config(max_no_progress=2), ScriptLauncher()).run() == 72
    assert [end.failure for end in ends(tmp_path)] == [FailureClass.OTHER] * 2
    assert "no more processes" in ends(tmp_path)[0].reason


def test_a_launcher_that_lingers_is_killed_with_all_its_children(tmp_path: Path) -> None:
    class Lingering(ScriptLauncher):
        """Its two ranks end at once; it and a child in another session stay."""

        def command(self, run_dir: Path, attempt: int) -> list[str]:
            code = f"""
                import json, os, socket, subprocess, time
                for rank in range(2):
                    child = subprocess.Popen(["true"])
                    child.wait()
                    with open(f"{attempt_dir(run_dir, attempt)}/ranks/{{rank}}.pid.json", "w") as stream:
                        json.dump({{"host": socket.gethostname(), "pid": child.pid}}, stream)
                subprocess.Popen(["sleep", "60"], start_new_session=True)
                time.sleep(60)
            """
            return [sys.executable, "-c", textwrap.dedent(code)]

    began_s = time.monotonic()
    config = make_config(max_no_progress=1)
    assert Supervisor(tmp_path / "run", config, Lingering(), linger_s=0.5).run() == 72
    assert time.monotonic() - began_s < 10
    assert "the launcher did not end the others" in ends(tmp_path)[0].reason


def supervise_apart(tmp_path: Path, **environment: str) -> subprocess.Popen[str]:
    """A supervisor in a process of its own, over 2 ranks, slow enough to be disturbed."""
    code = f"""
        import sys
        from pathlib import Path
        from tests.resilience.conftest import WORKER, make_config
        from hpctrain.launch.local import LocalLauncher
        from hpctrain.observe.progress import LineProgress
        from hpctrain.resilience.supervisor import Supervisor
        launcher = LocalLauncher(2, [sys.executable, str(WORKER)])
        run_dir = Path({str(tmp_path / "run")!r})
        sys.exit(Supervisor(run_dir, make_config(), launcher, progress=LineProgress(sys.stdout)).run())
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"WORKER_STEPS": "400", **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_asked_to_leave_all_ranks_save_and_go(tmp_path: Path, number: signal.Signals) -> None:
    supervisor = supervise_apart(tmp_path)
    wait_for_step(tmp_path, 7)
    supervisor.send_signal(number)
    output, _ = supervisor.communicate(timeout=20)
    assert supervisor.returncode == 75
    end = ends(tmp_path)[0]
    assert (end.failure, end.asked_to_leave) == (FailureClass.LEAVE, True)
    assert end.steps_gained >= 7
    assert f"left on {number.name}" in output
    assert f"go on from step-{end.step_after:09d}-a0001" in output


def test_a_run_that_left_resumes_with_another_number_of_ranks(
    tmp_path: Path, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = supervise_apart(tmp_path)
    wait_for_step(tmp_path, 7)
    supervisor.terminate()
    supervisor.communicate(timeout=20)
    left = ends(tmp_path)[0].step_after
    monkeypatch.setenv("WORKER_STEPS", str(left + 5))
    assert supervise(3) == 0
    assert ends(tmp_path)[1].step_before == left


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    supervisor = supervise_apart(tmp_path, HPCTRAIN_FAULTS="hang@step:rank=1,step=8")
    wait_for_step(tmp_path, 7)
    supervisor.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert supervisor.poll() is None
    supervisor.send_signal(signal.SIGINT)
    output, _ = supervisor.communicate(timeout=10)
    assert supervisor.returncode == 75
    assert "interrupted twice" in output


def test_everything_dies_with_a_killed_supervisor_and_the_next_one_goes_on(
    tmp_path: Path, supervise: Supervise, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = supervise_apart(tmp_path)
    wait_for_step(tmp_path, 12)
    supervisor.kill()
    supervisor.communicate(timeout=20)
    wait_until(lambda: processes_of(tmp_path / "run") == [], 5)
    monkeypatch.setenv("WORKER_STEPS", "30")
    assert supervise() == 0
    first, second = list_attempts(tmp_path / "run")
    assert first.end is None
    assert second.end is not None
    assert second.end.step_before >= 10
    assert "took over from another supervisor" in lines.text


def test_a_run_that_is_alive_is_refused(tmp_path: Path, supervise: Supervise) -> None:
    supervisor = supervise_apart(tmp_path)
    wait_for_step(tmp_path, 3)
    with pytest.raises(ConfigError, match=f"in use by .*pid {supervisor.pid}"):
        supervise()
    supervisor.terminate()
    supervisor.communicate(timeout=20)


def test_more_ranks_than_lanes_are_refused_before_anything_is_made(
    tmp_path: Path, supervise: Supervise
) -> None:
    with pytest.raises(UsageError, match=r"4 ranks.*3 lanes.*-n 3 or fewer"):
        supervise(4)
    with pytest.raises(UsageError, match="at least 1"):
        supervise(0)
    assert not (tmp_path / "run").exists()


def test_the_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    config = make_config()
    open_run_dir(tmp_path, config)
    with Lease(tmp_path) as lease:
        lease.acquire()
        adopt_config(tmp_path, config)
    other = parse_run({**config.model_dump(mode="json"), "train": {"epochs": 2, "seed": 9}})
    with pytest.raises(ConfigError, match=r"train.epochs: 1 -> 2; train.seed: 1 -> 9.*another --dir"):
        open_run_dir(tmp_path, other)
    gentler = parse_run({**config.model_dump(mode="json"), "resilience": {"max_attempts": 5}})
    open_run_dir(tmp_path, gentler)
    adopt_config(tmp_path, gentler)
    assert "max_attempts = 5" in (tmp_path / "run.toml").read_text()


def test_a_directory_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="not empty"):
        open_run_dir(tmp_path, make_config())
    with pytest.raises(ConfigError, match="another --dir"):
        open_run_dir(tmp_path / "thesis.tex", make_config())


def test_lease_and_signals_are_free_after_an_error(tmp_path: Path) -> None:
    class Broken(ScriptLauncher):
        def command(self, run_dir: Path, attempt: int) -> list[str]:
            raise ConfigError("no mpirun")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigError, match="no mpirun"):
        Supervisor(tmp_path / "run", make_config(), Broken()).run()
    assert signal.getsignal(signal.SIGTERM) is before
    with Lease(tmp_path / "run") as lease:
        assert lease.acquire() is None
