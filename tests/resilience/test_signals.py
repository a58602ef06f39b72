from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from hpctrain.resilience.signals import STOP_SIGNALS, StopFlag
from tests.resilience.conftest import wait_until


@pytest.fixture
def flag() -> StopFlag:
    made = StopFlag()
    made.install()
    yield made
    made.restore()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_only_sets_the_flag(flag: StopFlag, number: signal.Signals) -> None:
    assert not flag.requested
    os.kill(os.getpid(), number)
    wait_until(lambda: flag.requested)
    assert flag.signal_name == number.name


def test_further_signals_are_noted_and_change_nothing(flag: StopFlag) -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    wait_until(lambda: len(flag.seen) == 3)
    assert flag.signal_name == "SIGUSR1"
    assert flag.seen == ["SIGUSR1", "SIGTERM", "SIGUSR1"]


def test_handlers_are_given_back_even_after_installing_twice() -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    flag = StopFlag()
    flag.install()
    flag.install()
    flag.restore()
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before


def test_children_do_not_inherit_the_flag(flag: StopFlag) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        wait_until(lambda: "time.sleep" in " ".join(psutil.Process(child.pid).cmdline()))
        child.send_signal(signal.SIGUSR1)
        assert child.wait(10) == -signal.SIGUSR1
    finally:
        child.kill()
        child.wait()


def test_a_process_dies_with_its_parent(tmp_path: Path) -> None:
    """The parent starts a child, which reports and sleeps; SIGKILL of the parent must end the child."""
    report = tmp_path / "pid"
    child = f"""
        import os, time
        from hpctrain.resilience.signals import die_with_parent
        die_with_parent()
        with open({str(report)!r} + ".tmp", "w") as stream:
            stream.write(str(os.getpid()))
        os.rename({str(report)!r} + ".tmp", {str(report)!r})
        time.sleep(60)
    """
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {textwrap.dedent(child)!r}])"
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_until(report.exists)
    pid = int(report.read_text())
    parent.kill()
    parent.wait()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 5)


def test_a_parent_that_is_gone_already_is_an_error() -> None:
    code = "from hpctrain.resilience.signals import die_with_parent; die_with_parent(parent_pid=2**22 + 1)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert "PeerError: the launcher (pid 4194305) ended while this rank was starting" in result.stderr


def test_the_request_survives_exec(tmp_path: Path) -> None:
    report = tmp_path / "pid"
    code = f"""
import subprocess, time
from hpctrain.resilience.signals import parent_death_request
child = subprocess.Popen(["sleep", "60"], preexec_fn=parent_death_request(), start_new_session=True)
with open({str(report)!r} + ".tmp", "w") as stream:
    stream.write(str(child.pid))
import os; os.rename({str(report)!r} + ".tmp", {str(report)!r})
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_until(report.exists)
    pid = int(report.read_text())
    assert psutil.Process(pid).name() == "sleep"
    parent.kill()
    parent.wait()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 5)
