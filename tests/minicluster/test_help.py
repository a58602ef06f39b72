from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from hpctrain.cli import app, main
from hpctrain.cli.minicluster import minicluster
from hpctrain.minicluster import namespaces, spec
from hpctrain.minicluster.namespaces import environment_inside


def test_every_verb_has_an_example():
    verbs = [command.callback.__name__.replace("_", "-") for command in minicluster.registered_commands]
    assert {"up", "shell", "status", "down", "preempt"} <= set(verbs)
    assert {f"{fault}-node" for fault in ("kill", "reboot", "cut", "heal", "drain")} <= set(verbs)
    for verb in verbs:
        shown = CliRunner().invoke(app, ["minicluster", verb, "--help"], terminal_width=120).stdout
        assert f"Example: hpctrain minicluster {verb}" in shown


def test_nothing_to_end_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(spec, "STATE_ROOT", tmp_path)
    monkeypatch.setattr(namespaces, "_host_processes", lambda: [])  # a cluster of somebody's may be up
    shown = CliRunner().invoke(app, ["minicluster", "down", "--all"])
    assert shown.stdout == "there is no mini cluster on this machine\n"


def test_what_belongs_to_another_slurm_stays_outside(monkeypatch):
    monkeypatch.setattr(
        os, "environ", {"SBATCH_PARTITION": "x", "SRUN_X": "", "SLURM_CONF": "", "SCALE": "1"}
    )
    assert environment_inside() == {"SCALE": "1", "PATH": "/bin:/usr/bin:/usr/sbin:/sbin"}


@pytest.mark.parametrize("command", [["up"], ["down"], ["status"], ["shell", "true"], ["kill-node", "n1"]])
def test_others_than_root_are_told_what_they_need(command, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # who runs this may not be able to become somebody else
    with pytest.raises(SystemExit) as ended:
        main(["minicluster", *command])
    assert ended.value.code == 78
    assert "needs root" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["up", "--name", "../etc"], "small letters"),
        (["up", "--nodes", "0"], "1 to 200"),
        (["up", "--share", "/tmp/no/such"], "no such directory"),
        (["up", "--share", "/tmp/"], "every host has its own"),
        (["down", "--name", "a/b"], "small letters"),
    ],
)
def test_what_cannot_work_is_a_usage_error(command, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["minicluster", *command])
    assert ended.value.code == 64
    assert says in capsys.readouterr().err
