from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

from hpctrain.resilience.exits import FailureClass, read_end_records
from hpctrain.resilience.watchdog import Watchdog
from tests.resilience.conftest import wait_until

PRELUDE = """
import ctypes, os, sys, threading, time
from pathlib import Path
from hpctrain.resilience import watchdog
watchdog._GRACE_S, watchdog._REARM_S = 0.3, 0.2
dog = watchdog.Watchdog(Path(sys.argv[1]), 1, hang_timeout_s=0.5, start_timeout_s=5.0)
dog.start()
"""


def run(tmp_path: Path, code: str, timeout_s: float = 20.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PRELUDE + code, str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def stacks(tmp_path: Path) -> str:
    return (tmp_path / "logs" / "rank-1.stacks").read_text()


def test_a_missed_deadline_leaves_stacks_a_record_and_code_71(tmp_path: Path) -> None:
    result = run(tmp_path, "def lost_in_data():\n    time.sleep(60)\ndog.beat('data', 7)\nlost_in_data()")
    assert result.returncode == 71
    record = read_end_records(tmp_path)[1]
    assert (record.failure, record.code, record.phase, record.step) == (FailureClass.HANG, 71, "data", 7)
    assert "0.5 s" in (record.message or "")
    assert "lost_in_data" in stacks(tmp_path)


def test_signs_of_life_keep_a_rank_alive(tmp_path: Path) -> None:
    code = "for step in range(12):\n    dog.beat('compute', step)\n    time.sleep(0.1)\nprint(dog.current)\ndog.stop()"
    result = run(tmp_path, code)
    assert (result.returncode, result.stdout.strip()) == (0, "('compute', 11)")
    assert read_end_records(tmp_path) == {}
    assert stacks(tmp_path) == ""


def test_a_phase_may_state_its_own_deadline(tmp_path: Path) -> None:
    result = run(tmp_path, "dog.beat('evaluate', 1, timeout_s=30)\ntime.sleep(1.2)\ndog.stop()")
    assert result.returncode == 0


def test_the_first_phase_has_the_deadline_of_the_start(tmp_path: Path) -> None:
    result = run(tmp_path, "time.sleep(1.2)\nprint(dog.current)\ndog.stop()")
    assert (result.returncode, result.stdout.strip()) == (0, "('start', -1)")


def test_code_that_holds_the_interpreter_lock_is_ended_too(tmp_path: Path) -> None:
    code = "dog.beat('compute', 3)\ntime.sleep(0.45)\nctypes.PyDLL(None).sleep(60)"  # PyDLL keeps the lock
    began_s = time.monotonic()
    result = run(tmp_path, code)
    assert result.returncode == 1  # faulthandler's own exit: no record can be written without the lock
    assert time.monotonic() - began_s < 10
    assert "Timeout" in stacks(tmp_path)


def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    code = (
        PRELUDE
        + "dog.beat('data', 1, timeout_s=100)\nPath(sys.argv[1], 'pid').write_text(str(os.getpid()))\ntime.sleep(100)"
    )
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}, {str(tmp_path)!r}])"
    parent = subprocess.Popen([sys.executable, "-c", launcher])
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 5)


def test_stacks_go_to_stderr_where_the_disk_takes_none(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the directory should be")
    result = run(tmp_path, "dog.beat('data', 7)\ntime.sleep(60)")
    assert result.returncode == 71
    assert "Thread" in result.stderr


def test_a_beat_costs_next_to_nothing(tmp_path: Path) -> None:
    dog = Watchdog(tmp_path, 0, 60.0, 60.0)
    dog.start()
    began_s = time.perf_counter()
    for step in range(10_000):
        dog.beat("compute", step)
    elapsed_s = time.perf_counter() - began_s
    dog.stop()
    assert elapsed_s < 1.0, f"{elapsed_s / 10_000 * 1e6:.1f} us a beat"
