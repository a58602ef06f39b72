"""The README: every command in it is run, its example trains, its table is the models'."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hpctrain.config import parse_run, reference_markdown
from tests.slurm_support import require_minicluster
from tests.support import ROOT, hpctrain, read_json

README = (ROOT / "README.md").read_text(encoding="utf-8")
SLURM = README.split("## On a Slurm cluster")[1].split("\n## ")[0]
RUN_ELSEWHERE = {
    "make demo": ".ci/run",
    "make test": ".ci/run",
    ". .venv/bin/activate": "Makefile",
    "python -m benchmarks storage --quick": "tests/benchmarks",
    "python -m benchmarks precision --quick": "tests/benchmarks",
    "python -m benchmarks reader --quick": "tests/benchmarks",
    "python -m benchmarks recovery --quick": "tests/benchmarks",
    "python -m benchmarks staging --quick": "tests/benchmarks",
}


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str = README) -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("sh", text) for line in block.splitlines()]
    return [line for line in lines if line]


def test_the_field_table_is_the_models() -> None:
    assert reference_markdown() in README, "make it anew with the command in the README's comment"


def test_the_settings_that_are_shown_are_settings() -> None:
    (shown,) = re.findall(r"^```\n(\[data\]\n.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (description,) = blocks("toml")
    config = parse_run(tomllib.loads(description) | tomllib.loads(shown))
    assert config.data.fields.keys() == {"field", "label"}
    assert config.data.preprocess["field"].augment == ("flip", "noise:0.01")
    (staging,) = re.findall(r"^```\n(\[staging\]\n.*?)^```$", README, re.MULTILINE | re.DOTALL)
    config = parse_run(tomllib.loads(description) | tomllib.loads(staging))
    assert [place.quota_gib for place in config.staging.dirs] == [800, 16]


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
    """Every other command but those for Slurm, in order, in a folder with the two files that the README shows."""
    run_shown(
        [line for line in commands() if line not in RUN_ELSEWHERE and line not in commands(SLURM)], tmp_path
    )
    result = read_json(tmp_path / "runs" / "my-run" / "result.json")
    assert result["metrics"]["accuracy"] > 0.5


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.timeout(400)
def test_the_slurm_example_runs_as_shown(tmp_path: Path) -> None:
    require_minicluster()
    prepare = [line for line in commands() if line.startswith(("hpctrain data", "hpctrain pack"))]
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    name = f"t-readme-{os.getpid()}"  # somebody may have a cluster of the name that is shown
    shown = [line.replace("--name try", f"--name {name}") for line in commands(SLURM)]
    assert all(name in line for line in shown if "minicluster" in line)
    try:
        run_shown(prepare + shown, tmp_path)
    finally:
        hpctrain(["minicluster", "down", "--name", name])
    assert read_json(tmp_path / "runs" / "my-run" / "result.json")["metrics"]["accuracy"] > 0.5
    assert "finished with 0 restarts" in (tmp_path / "job.log").read_text()


def run_shown(lines: list[str], folder: Path) -> None:
    """Run command lines in a folder with the Task and the description of the README."""
    if (
        shutil.which("pip") is None
        and subprocess.run([sys.executable, "-m", "pip", "--version"], check=False).returncode
    ):
        pytest.skip("pip, which fetches the digits, is not there")
    (task,) = blocks("python")
    (description,) = blocks("toml")
    (folder / "my_task.py").write_text(task)
    (folder / "my_run.toml").write_text(description)
    bin_folder = Path(sys.executable).parent
    for command in lines:
        program, *arguments = command.split()
        if command.startswith("mkdir -p "):
            (folder / arguments[1]).mkdir(parents=True, exist_ok=True)
            continue
        assert program == "hpctrain", command
        environment = {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
        done = hpctrain(arguments, cwd=folder, env=environment, timeout_s=300)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
