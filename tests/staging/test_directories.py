"""The configured directories, as they are on this node."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.config import StagingPlace
from hpctrain.errors import ConfigError
from hpctrain.staging.directories import places_here
from hpctrain.staging.node import Place


def test_variables_are_those_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_HERE", str(tmp_path))
    monkeypatch.setenv("HOME", "/home/someone")
    configured = [StagingPlace(path=Path("$SSD_HERE/a"), quota_gib=1.5), StagingPlace(path=Path("~/b"))]
    assert places_here(configured) == [Place(tmp_path / "a", 3 << 29), Place(Path("/home/someone/b"))]


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["$NOT_SET_HERE/x"], "variable is not set"),
        (["relative"], "not absolute"),
        (["$SSD_HERE/a", "$SSD_HERE/b/../a"], "there already"),
    ],
)
def test_bad_ones(paths: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_HERE", str(tmp_path))
    with pytest.raises(ConfigError, match=words):
        places_here([StagingPlace(path=Path(path)) for path in paths])
