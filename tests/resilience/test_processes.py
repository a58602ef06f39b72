from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hpctrain.resilience.attempts import ATTEMPT_VARIABLE, attempt_dir
from hpctrain.resilience.processes import (
    Descendants,
    end_strays,
    is_gone,
    pid_namespace,
    rank_pids,
    started_ranks,
)
from tests.resilience.conftest import wait_until

# A child that starts a grandchild in another session, says its pid and, if told so, leaves it an orphan.
FAMILY = """
import subprocess, sys, time
grandchild = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(grandchild.pid, flush=True)
if sys.argv[1] == "stay":
    time.sleep(60)
"""


def family(how: str) -> tuple[subprocess.Popen[str], int]:
    child = subprocess.Popen([sys.executable, "-c", FAMILY, how], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        return child, int(child.stdout.readline())


@pytest.mark.parametrize("how", ["stay", "leave an orphan"])
def test_no_descendant_survives(how: str) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        descendants = Descendants()
        child, grandchild = family(how)
        descendants.started(child.pid)
        if how != "stay":
            child.wait(20)
        assert grandchild in {process.pid for process in descendants.alive()}
        assert descendants.end_all() >= 1
        child.wait(20)
        assert descendants.alive() == []
        assert is_gone(grandchild)
        descendants.end_all()
        assert not psutil.pid_exists(grandchild), "its exit status was taken: no zombie stays"
        assert bystander.poll() is None, "a process that was there before is none of ours"
    finally:
        bystander.kill()
        bystander.wait()


def test_a_stopped_process_is_ended_too() -> None:
    descendants = Descendants()
    child, _ = family("stay")
    descendants.started(child.pid)
    child.send_signal(signal.SIGSTOP)
    descendants.end_all()
    assert child.wait(20) == -signal.SIGKILL


def test_signals_reach_descendants_only() -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        descendants = Descendants()
        child, _ = family("stay")
        assert descendants.send(signal.SIGTERM, {child.pid, bystander.pid, 2**22 + 1}) == {child.pid}
        assert child.wait(20) == -signal.SIGTERM
        assert bystander.poll() is None
        descendants.end_all()
    finally:
        bystander.kill()
        bystander.wait()


def test_strays_are_known_by_the_attempt_in_their_environment(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "ours-too-by-name"
    strays = [
        subprocess.Popen(["sleep", "60"], env=os.environ | {ATTEMPT_VARIABLE: str(attempt_dir(run_dir, 3))})
        for run_dir in (ours, other)
    ]
    try:
        wait_until(lambda: all(psutil.Process(stray.pid).name() == "sleep" for stray in strays))
        assert end_strays(ours, ATTEMPT_VARIABLE) == 1
        assert strays[0].wait(20) == -signal.SIGKILL
        assert strays[1].poll() is None
        assert end_strays(ours, ATTEMPT_VARIABLE) == 0
    finally:
        for stray in strays:
            stray.kill()
            stray.wait()


def test_pids_of_other_hosts_and_torn_files_are_left_out(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    (ranks / "0.pid.json").write_text('{"host": "another-host", "pid": 1}')
    (ranks / "1.pid.json").write_text("{")
    (ranks / "1.json").write_text("{}")
    assert rank_pids(tmp_path) == {}
    assert sorted(started_ranks(tmp_path)) == [0], "somewhere it runs; a file that is torn tells nothing yet"


def test_pids_of_another_namespace_are_left_out(tmp_path: Path) -> None:
    """A container on this host has its own pid 1: to signal ours would hit a bystander."""
    ranks, host = tmp_path / "ranks", socket.gethostname()
    ranks.mkdir()
    for rank, namespace in enumerate((pid_namespace(), "pid:[1]", None)):
        identity = {"host": host, "pid": 40 + rank} | (
            {} if namespace is None else {"pid_namespace": namespace}
        )
        (ranks / f"{rank}.pid.json").write_text(json.dumps(identity))
    assert rank_pids(tmp_path) == {0: 40, 2: 42}
    assert sorted(started_ranks(tmp_path)) == [0, 1, 2]


def test_the_pid_namespace_is_the_same_for_relatives_only() -> None:
    code = "from hpctrain.resilience.processes import pid_namespace; print(pid_namespace())"

    def say(*prefix: str) -> str:
        command = [*prefix, sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()

    assert say() == pid_namespace() != ""
    if os.getuid() != 0:
        pytest.skip("a pid namespace of its own takes root: run as root")
    assert say("unshare", "--pid", "--fork") not in ("", pid_namespace())


def test_a_family_that_is_spared_lives_on() -> None:
    descendants = Descendants()
    spared, grandchild = family("stay")
    child, _ = family("stay")
    try:
        for process in (spared, child):
            descendants.started(process.pid)
        descendants.spare(spared.pid)
        descendants.end_all()
        assert child.wait(20) == -signal.SIGKILL
        assert spared.poll() is None
        assert not is_gone(grandchild)
    finally:
        for pid in (grandchild, spared.pid):
            os.kill(pid, signal.SIGKILL)
        assert spared.wait(20) == -signal.SIGKILL
    descendants.end_all()  # one that has ended is no obstacle
