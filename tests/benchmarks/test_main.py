from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support import ROOT


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_help_lists_the_names_and_an_example() -> None:
    answer = benchmarks("--help")
    assert answer.returncode == 0
    for word in ("storage", "precision", "Example: python -m benchmarks"):
        assert word in answer.stdout


@pytest.mark.parametrize("name", ["storage", "precision"])
def test_help_of_each(name: str) -> None:
    answer = benchmarks(name, "--help")
    assert answer.returncode == 0
    for word in ("--quick", "--json", "--markdown", "--dir", "Example"):
        assert word in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["memory"], 2, "memory"),
        (
            ["storage", "--json", "missing/folder/a.json"],
            64,
            "missing/folder/a.json: cannot be written there",
        ),
        (["precision", "--dir", "missing"], 64, "--dir missing: there is no such folder"),
    ],
)
def test_wrong_arguments(arguments: list[str], code: int, words: str) -> None:
    answer = benchmarks(*arguments)
    assert answer.returncode == code
    assert words in answer.stderr
    assert "Traceback" not in answer.stderr


def test_hpctrain_knows_nothing_of_its_benchmarks() -> None:
    pattern = re.compile(r"^\s*(from|import) benchmarks\b", re.MULTILINE)
    sources = list((ROOT / "hpctrain").rglob("*.py"))
    assert len(sources) > 20
    assert [path for path in sources if pattern.search(path.read_text(encoding="utf-8"))] == []


def ranks_are_starting(work: Path, said: str) -> bool:
    return len(list(work.glob("*/run/attempts/a0001/ranks/*.pid.json"))) == 2


def round_is_measured(work: Path, said: str) -> bool:
    return "round 2 of" in said


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("number", "moment"), [(signal.SIGINT, ranks_are_starting), (signal.SIGTERM, round_is_measured)]
)
def test_an_interruption_prints_what_was_measured_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals, moment: Callable[[Path, str], bool]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    report = tmp_path / "report.json"
    # Stands in for the data of a registry, as in conftest.py, and then runs the real command line.
    program = (
        "import sys; from benchmarks import training, __main__; from tests.benchmarks.conftest import write_digits; "
        "training.prepare_digits = write_digits; __main__.main()"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "precision",
        "--quick",
        "--dir",
        str(work),
        "--json",
        str(report),
    ]
    with open(tmp_path / "said", "w+", encoding="utf-8") as said:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        wait_until(lambda: moment(work, (tmp_path / "said").read_text(encoding="utf-8")), process)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "**Ended early: interrupted.**" in output
    assert "| float32 |" in output
    assert '"ended": "interrupted"' in report.read_text(encoding="utf-8")
    assert list(work.iterdir()) == []
    assert [
        item.pid
        for item in psutil.process_iter(["cmdline"])
        if str(work) in " ".join(item.info["cmdline"] or [])
    ] == []


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
