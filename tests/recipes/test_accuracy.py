"""The bars that the recipes must reach, through the whole road: fetch, pack, stage, train on 2 ranks, evaluate."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support import hpctrain, read_json

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(400)]

BARS = {"digits": {"accuracy": 0.95}, "emoji": {"top5_seen": 0.25, "top5_unseen": 0.15}}


@pytest.mark.parametrize("recipe", BARS)
def test_recipe(recipe: str, tmp_path: Path) -> None:
    if recipe == "emoji" and shutil.which("npm") is None:
        assert "CI" not in os.environ, "in CI the emoji bars must be measured: install npm"
        pytest.skip("npm, which fetches the emoji pictures, is not on PATH")
    done = hpctrain(["demo", "--recipe", recipe, "--dir", tmp_path], timeout_s=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT EQUAL" not in done.stdout
    killed, plain = (
        read_json(tmp_path / recipe / name / "result.json") for name in ("run-killed", "run-undisturbed")
    )
    assert killed["state_digest"] == plain["state_digest"]
    assert (killed["restarts"], plain["restarts"]) == (1, 0)
    for metric, bar in BARS[recipe].items():
        assert plain["metrics"][metric] >= bar
    assert plain["staging"]["local_bytes"] > 0
    assert plain["staging"]["shared_bytes"] == 0, "the killed run had staged everything on this node"
