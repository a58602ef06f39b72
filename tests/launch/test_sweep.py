"""Sweeps of many nodes, with srun a script of the test's making (see `Commands`)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.launch import sweep as module
from hpctrain.launch.sweep import helper_environment, step_environment, sweep, sweep_groups
from tests.launch.conftest import Commands

NODES = [f"n{number}" for number in range(1, 101)]


class Nodes:
    """A srun that says the names of its nodes, where none of them is in `dead`, and does `silent` otherwise."""

    def __init__(self, commands: Commands) -> None:
        self.commands = commands
        self.environment = {"PATH": f"{commands.folder}:/usr/bin:/bin"}
        self.behave()

    def behave(self, *dead: str, silent: str = "exit 1", alive: str = "") -> None:
        self.commands.script(
            "srun",
            f"""
            for word in "$@"; do case "$word" in --nodelist=*) nodes="${{word#*=}}";; esac; done
            IFS=,
            for node in $nodes; do case "$node" in {"|".join(dead) or "none"}) {silent};; esac; done
            {alive}
            printf "%s\\n" $nodes
            """,
        )

    def asked(self) -> list[list[str]]:
        words = [word for call in self.commands.calls("srun") for word in call]
        return [word.partition("=")[2].split(",") for word in words if word.startswith("--nodelist=")]


@pytest.fixture
def nodes(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    made = Nodes(commands)
    monkeypatch.setenv("PATH", made.environment["PATH"])
    for name, value in {"_SWEEP_TIMEOUT_S": 8.0, "_STRAGGLER_TIMEOUT_S": 1.0}.items():
        monkeypatch.setattr(module, name, value)
    return made


def test_chunks_and_singles_only_where_a_chunk_failed(nodes: Nodes, tmp_path: Path) -> None:
    nodes.behave("n40")
    assert sweep(NODES, tmp_path, nodes.environment) == {*NODES} - {"n40"}
    asked = nodes.asked()
    assert sorted(map(len, asked), reverse=True)[:4] == [32, 32, 32, 4]
    assert {node for (node,) in (group for group in asked if len(group) == 1)} == set(NODES[32:64])
    assert len(asked) == 4 + 32


def test_no_nodes_no_step(nodes: Nodes, tmp_path: Path) -> None:
    assert sweep([], tmp_path, nodes.environment) == set()
    assert nodes.asked() == []


def test_never_more_steps_at_once_than_there_is_room_for(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_STEPS", 3)
    count = f"set -- {tmp_path}/r/*; echo $# >> {tmp_path}/most"
    nodes.behave(alive=f"IFS=' '; : > {tmp_path}/r/$nodes; {count}; sleep 0.1; rm {tmp_path}/r/$nodes")
    (tmp_path / "r").mkdir()
    groups = [[node] for node in NODES[:12]]
    assert sweep_groups(groups, tmp_path, nodes.environment) == set(NODES[:12])
    most = [int(line) for line in (tmp_path / "most").read_text().split()]
    assert len(most) == 12
    assert max(most) in (2, 3)


def test_stragglers_have_time_after_the_last_answer_and_not_the_first(nodes: Nodes, tmp_path: Path) -> None:
    """Each answers within a second of the one before, and the last one not within a second of the first."""
    nodes.behave(
        "dead", silent="exec sleep 60", alive="sleep 0.${nodes#n}; case $nodes in n9) sleep 0.3;; esac"
    )
    began_s = time.monotonic()
    found = sweep_groups([["n1"], ["n5"], ["n9"], ["dead"]], tmp_path, nodes.environment)
    assert found == {"n1", "n5", "n9"}
    assert 1.2 + 1.0 <= time.monotonic() - began_s < 6


def test_a_step_that_was_refused_is_no_answer(nodes: Nodes, tmp_path: Path) -> None:
    """It says nothing about how long the others take."""
    nodes.behave("n1", alive="sleep 1.5")
    assert sweep_groups([["n1"], ["n2"]], tmp_path, nodes.environment) == {"n2"}


def test_a_time_of_its_own(nodes: Nodes, tmp_path: Path) -> None:
    nodes.behave("n1", silent="exec sleep 60")
    began_s = time.monotonic()
    assert sweep_groups([["n1", "n2"]], tmp_path, nodes.environment, 0.5) == set()
    assert time.monotonic() - began_s < 4


def test_a_step_that_cannot_be_started_is_no_answer(nodes: Nodes, tmp_path: Path) -> None:
    assert sweep(NODES, tmp_path, {"PATH": "/nowhere"}) == set()


def test_a_sweep_asks_for_nothing_but_the_nodes(nodes: Nodes, tmp_path: Path) -> None:
    given = {"SLURM_GPUS_PER_NODE": "4", "SLURM_JOB_ID": "7"}
    nodes.behave(alive=f"env > {tmp_path}/environment")
    sweep(["n1"], tmp_path, nodes.environment | given)
    (words,) = nodes.commands.calls("srun")
    assert {"--gres=none", "--mpi=none", "--overlap", "--no-kill", "--ntasks=1"} <= set(words)
    lines = (tmp_path / "environment").read_text().splitlines()
    assert "SLURM_JOB_ID=7" in lines
    assert not [line for line in lines if line.startswith("SLURM_GPUS")]


SHAPES = {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_DISTRIBUTION"} | {
    "SLURM_GPUS", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE"
}  # fmt: skip
PER_RANK = {"SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_TRES_PER_TASK"} | {
    "SLURM_CPUS_PER_TASK"
}
OTHERS = {"PATH", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_CONF", "SLURM_GPUS_ON_NODE", "SLURMD_NODENAME"}


@given(st.sets(st.sampled_from(sorted(SHAPES | PER_RANK | OTHERS))))
def test_what_steps_are_not_told(names: set[str]) -> None:
    environment = dict.fromkeys(names, "1")
    assert set(step_environment(environment)) == names - SHAPES
    assert set(helper_environment(environment)) == names & OTHERS
