from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.errors import ConfigError
from hpctrain.minicluster import packages


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without any of the programs; returns the folder that is its PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(packages, "_ADMIN_FOLDERS", str(tmp_path / "sbin"))
    monkeypatch.setattr(packages, "_LIBRARY_FOLDERS", (str(tmp_path / "lib"),))
    monkeypatch.setattr(packages, "POLICY", tmp_path / "policy-rc.d")
    return folder


def _program(path: Path, text: str = "exit 0") -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_each_missing_program_names_its_package(bare, tmp_path):
    programs = packages._BY_PROGRAM
    assert set(packages.missing_packages()) == {*programs.values(), "libpmix-dev"}
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libpmix.so").touch()
    for program in programs:
        if program != "slurmd":
            _program(bare / program)
    assert packages.missing_packages() == ["slurmd"]
    _program(tmp_path / "sbin" / "slurmd")  # where a plain user's PATH does not look
    assert packages.missing_packages() == []


def test_the_message_says_what_to_type():
    said = packages.missing_message(["munge", "slurmd"])
    assert "munge, slurmd" in said
    assert "--install" in said
    assert "apt-get install -y --no-install-recommends munge slurmd" in said


def _fake_apt(bare: Path, fails: str) -> Path:
    """An apt-get that notes what it was told, and whether services were held back; `fails` decides its exit code."""
    log, policy = bare.parent / "log", packages.POLICY
    _program(
        bare / "apt-get",
        f'[ -x {policy} ] && {policy} mariadb start; echo "$? $*" >> {log}; echo no such package >&2; {fails}',
    )
    return log


def test_lists_are_fetched_only_where_they_are_needed(bare):
    log = _fake_apt(bare, "exit 0")
    packages.install(["munge"])
    (line,) = log.read_text().splitlines()
    assert line.startswith("101 install -y --no-install-recommends munge")
    assert "DPkg::Lock::Timeout=120" in line
    assert not packages.POLICY.exists()


def test_a_machine_without_lists_fetches_them(bare):
    log = _fake_apt(bare, f"case $1 in update) : > {bare}/lists;; *) [ -e {bare}/lists ];; esac")
    packages.install(["munge"])
    assert [line.split()[1] for line in log.read_text().splitlines()] == ["install", "update", "install"]


def test_what_apt_says_is_passed_on(bare):
    _fake_apt(bare, "exit 100")
    with pytest.raises(ConfigError, match=r"apt-get install .* munge .* failed: no such package"):
        packages.install(["munge"])
    assert not packages.POLICY.exists()


def test_without_apt_the_message_says_so(bare):
    with pytest.raises(ConfigError, match="needs Debian or Ubuntu"):
        packages.install(["munge"])


def test_a_policy_of_the_machine_stays(bare):
    _program(packages.POLICY, "exit 7")
    log = _fake_apt(bare, "exit 0")
    packages.install(["munge"])
    assert log.read_text().startswith("7 install")
    assert packages.POLICY.exists()


def test_a_policy_left_by_a_kill_is_removed(bare):
    packages.POLICY.write_text(packages._HOLD_BACK)
    _fake_apt(bare, "exit 0")
    packages.install(["munge"])
    assert not packages.POLICY.exists()
