"""The command line as a whole: what it loads, what its help says, how errors look."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hpctrain import __version__
from tests.support import ROOT, hpctrain

VERBS = (
    "pack",
    "inspect",
    "data",
    "run",
    "stage",
    "status",
    "attempts",
    "demo",
    "verify",
    "backup",
    "restore",
    "archive",
    "recall",
    "build-horovod",
    "env-archive",
    "minicluster",
)


def test_importing_it_loads_nothing_heavy() -> None:
    """On login nodes MPI_Init may abort, and help must come at once. Its time is compared with that of typer alone."""
    script = (
        "import time; t = time.perf_counter(); import typer; typer_s = time.perf_counter() - t\n"
        "import hpctrain.cli, sys; total_s = time.perf_counter() - t\n"
        "heavy = {'torch', 'mpi4py', 'horovod', 'h5py', 'numpy', 'numcodecs', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'loads {heavy}' if heavy else None if total_s < 0.5 or total_s < 2 * typer_s else f'{total_s} s')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_names_every_verb_and_an_example() -> None:
    done = hpctrain(["--help"], env={"COLUMNS": "120", "TERM": "dumb"})
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in VERBS)
    assert "hpctrain run RUN.toml -n 2" in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help_with_an_example(verb: str) -> None:
    done = hpctrain([verb, "--help"], env={"COLUMNS": "120", "TERM": "dumb"})
    assert done.returncode == 0
    assert f"Example: hpctrain {verb}" in done.stdout


def test_version() -> None:
    assert hpctrain(["--version"]).stdout.strip() == f"hpctrain {__version__}"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run", "none.toml"], 78, "cannot read the run description"),
        (["pack", "none", "out"], 64, "none"),
        (["demo", "--recipe", "cats"], 64, "choose one of: emoji, digits"),
        (["paint"], 2, "No such command"),
        (["run"], 2, "Missing argument"),
    ],
)
def test_errors_are_one_message_and_a_code(arguments: list[str], code: int, said: str) -> None:
    done = hpctrain(arguments, env={"COLUMNS": "120", "TERM": "dumb"})
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
