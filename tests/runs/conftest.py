"""One data set, and the undisturbed runs of 3 and of 2 ranks, which many tests compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.toy import result, toy_data, toy_run, train


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_data(tmp_path_factory.mktemp("toy-data")).root


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[str, Any]:
    return result_of(tmp_path_factory.mktemp("undisturbed"), data, 3)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[str, Any]:
    return result_of(tmp_path_factory.mktemp("pair"), data, 2)


def result_of(folder: Path, data: Path, ranks: int) -> dict[str, Any]:
    done = train(toy_run(folder, data), ranks, folder / "run")
    assert done.returncode == 0, done.stderr
    return result(folder / "run")
