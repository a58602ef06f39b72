"""Who posts the deputy, with srun a process of the test's making (see `Commands`)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hpctrain.launch import deputy_post
from hpctrain.launch.deputy_post import DeputyPost
from hpctrain.resilience.processes import Descendants
from tests.launch.conftest import Commands
from tests.resilience.conftest import wait_until

NODES = ["n1", "n2", "n3"]


@pytest.fixture
def post(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeputyPost]:
    path = f"{commands.folder}:/usr/bin:/bin"
    monkeypatch.setenv("PATH", path)
    monkeypatch.setattr(deputy_post, "_DISMISS_S", 0.5)
    commands.script("srun", "exec sleep 60")
    environment = {"PATH": path, "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7", "SLURM_GPUS_PER_NODE": "4"}
    made = DeputyPost("/ssd/python", environment)
    yield made
    made.dismiss()


def places(commands: Commands, count: int) -> list[str]:
    """The nodes of the first `count` deputies."""
    wait_until(lambda: len(commands.calls("srun")) >= count)
    words = [word for call in commands.calls("srun") for word in call]
    return [word.partition("=")[2] for word in words if word.startswith("--nodelist=")]


def test_one_is_enough(post: DeputyPost, commands: Commands, tmp_path: Path) -> None:
    for _ in range(3):
        post.keep(tmp_path, NODES)
    assert places(commands, 1) == ["n3"]
    (words,) = commands.calls("srun")
    assert {"--gres=none", "--mpi=none", "--ntasks=1", "--nodes=1"} <= set(words)
    assert words[-5:] == ["/ssd/python", "-m", "hpctrain.launch.deputy", str(tmp_path), "n1"]
    assert post.pid is not None
    environment = psutil.Process(post.pid).environ()
    assert "SLURM_GPUS_PER_NODE" not in environment
    assert environment["SLURM_JOB_ID"] == "7"


def test_a_living_srun_says_nothing_about_a_lost_node(
    post: DeputyPost, commands: Commands, tmp_path: Path
) -> None:
    post.keep(tmp_path, NODES)
    assert places(commands, 1) == ["n3"]
    first = post.pid
    post.keep(tmp_path, ["n1", "n2"])
    assert places(commands, 2) == ["n3", "n2"]
    assert first is not None
    assert not psutil.pid_exists(first)


def test_one_that_ended_is_replaced_elsewhere_but_not_at_once(
    post: DeputyPost, commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.script("srun", "exit 1")
    post.keep(tmp_path, NODES)
    assert places(commands, 1) == ["n3"]
    time.sleep(0.3)
    post.keep(tmp_path, NODES)
    time.sleep(0.3)
    assert places(commands, 1) == ["n3"], "a Slurm that refuses it is not asked every second"
    monkeypatch.setattr(deputy_post, "_AGAIN_S", 0.0)
    post.keep(tmp_path, NODES)
    assert places(commands, 2) == ["n3", "n2"]
    wait_until(lambda: psutil.Process(post.pid).status() == psutil.STATUS_ZOMBIE)
    post.keep(tmp_path, NODES)
    assert places(commands, 3) == ["n3", "n2", "n3"]


def test_nobody_but_this_node(post: DeputyPost, commands: Commands, tmp_path: Path) -> None:
    post.keep(tmp_path, ["n1"])
    assert post.pid is None
    assert commands.calls("srun") == []


def test_no_srun_no_deputy(tmp_path: Path) -> None:
    post = DeputyPost("/ssd/python", {"PATH": "/nowhere", "SLURMD_NODENAME": "n1"})
    post.keep(tmp_path, NODES)
    assert post.pid is None
    post.dismiss()


@pytest.mark.parametrize(("trap", "said"), [("exit 0", "asked"), ("", "")])
def test_it_is_asked_to_end_and_then_made_to(
    post: DeputyPost, commands: Commands, tmp_path: Path, trap: str, said: str
) -> None:
    """A srun that is killed leaves its step behind."""
    words = tmp_path / "words"
    note = f"printf asked > {words}; {trap}" if trap else ""
    commands.script("srun", f"trap '{note}' TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done")
    post.keep(tmp_path, NODES)
    wait_until((tmp_path / "ready").exists)
    pid = post.pid
    began_s = time.monotonic()
    post.dismiss()
    assert time.monotonic() - began_s < 5
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert (words.read_text() if words.exists() else "") == said


def test_the_end_of_an_attempt_spares_it(post: DeputyPost, tmp_path: Path) -> None:
    descendants = Descendants()
    post.keep(tmp_path, NODES)
    assert post.pid is not None
    descendants.spare(post.pid)
    descendants.end_all()
    assert psutil.Process(post.pid).status() != psutil.STATUS_ZOMBIE
    assert os.getpid() == psutil.Process(post.pid).ppid()
