"""The README: every command in it is run, its example trains, its table is the models'."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.config import reference_markdown
from tests.support import ROOT, hpctrain, read_json

README = (ROOT / "README.md").read_text(encoding="utf-8")
RUN_ELSEWHERE = {
    "make demo": ".ci/run",
    "make test": ".ci/run",
    ". .venv/bin/activate": "Makefile",
    "python -m benchmarks storage --quick": "tests/benchmarks",
    "python -m benchmarks precision --quick": "tests/benchmarks",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


def test_the_field_table_is_the_models() -> None:
    assert reference_markdown() in README, "make it anew with the command in the README's comment"


def test_the_layout_is_the_tree() -> None:
    layout = README.split("## Where things are")[1]
    folders = {
        path.name
        for path in (ROOT / "hpctrain").iterdir()
        if path.is_dir() and not path.name.startswith("__")
    }
    for name in folders:
        assert re.search(rf"^  {name}/", layout, re.MULTILINE), (
            f"hpctrain/{name} is not in the README's picture"
        )
    for name in re.findall(r"^  (\w+)/", layout, re.MULTILINE):
        assert name in folders, f"the README shows hpctrain/{name}, which is not there"


def test_links_and_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert "://" in target or (ROOT / target).exists(), target


def test_commands_that_run_elsewhere_are_run_there() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    for command, where in RUN_ELSEWHERE.items():
        assert command in commands(), f"{command} is no longer in the README"
        if where == ".ci/run":
            assert command in ci
        elif where == "Makefile":
            assert ".venv" in (ROOT / where).read_text(), "the set-up makes no such environment"
        else:
            name = command.split()[3]
            tests = "".join(path.read_text() for path in (ROOT / where).glob("*.py"))
            assert f'"{name}"' in tests


@pytest.mark.slow
@pytest.mark.mpi
def test_the_example_runs_as_shown(tmp_path: Path) -> None:
    """Every other command, in order, in a folder with the two files that the README shows."""
    (task,) = blocks("python")
    (description,) = blocks("toml")
    (tmp_path / "my_task.py").write_text(task)
    (tmp_path / "my_run.toml").write_text(description)
    if (
        shutil.which("pip") is None
        and subprocess.run([sys.executable, "-m", "pip", "--version"], check=False).returncode
    ):
        pytest.skip("pip, which fetches the digits, is not there")
    for command in commands():
        if command in RUN_ELSEWHERE:
            continue
        program, *arguments = command.split()
        assert program == "hpctrain", command
        done = hpctrain(arguments, cwd=tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    result = read_json(tmp_path / "runs" / "my-run" / "result.json")
    assert result["metrics"]["accuracy"] > 0.5
