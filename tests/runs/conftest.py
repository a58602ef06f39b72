"""One data set and one undisturbed run of 3 ranks, which many tests compare with."""

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
    folder = tmp_path_factory.mktemp("undisturbed")
    done = train(toy_run(folder, data), 3, folder / "run")
    assert done.returncode == 0, done.stderr
    return result(folder / "run")
