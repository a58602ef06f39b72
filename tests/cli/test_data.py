import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.recipes import digits_data, emoji_data
from hpctrain.recipes.prepared import Prepared


@pytest.mark.parametrize(("name", "size"), [("digits", ""), ("emoji", " --size 32")])
def test_it_says_what_there_is_and_what_comes_next(
    name: str, size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Replaced, because what is behind it is tested in tests/recipes, and this is about the words.
    for module, verb in ((digits_data, "prepare_digits"), (emoji_data, "prepare_emoji")):
        monkeypatch.setattr(
            module, verb, lambda root, say, verb=verb: say(verb) or Prepared(root, 4000, 1000, fresh=False)
        )
    with pytest.raises(SystemExit) as ended:
        main(["data", name, str(tmp_path)])
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines() == [
        f"prepare_{name}",
        f"{tmp_path}: 4,000 samples to train on, 1,000 to test on (already there)",
        f"next: hpctrain pack {tmp_path}/train packed/train{size}",
        f"next: hpctrain pack {tmp_path}/test packed/test{size}",
    ]


def test_a_missing_npm_ends_with_the_code_of_its_class(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpctrain.cli", "data", "emoji", str(tmp_path / "raw")]
    environment = os.environ | {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 78
    assert "npm is not on PATH" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "--help"])
    assert "hpctrain data digits" in capsys.readouterr().out
