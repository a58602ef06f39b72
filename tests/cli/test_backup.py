"""`hpctrain backup` and `hpctrain restore` as they are typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.cli import main
from tests.staging.backup.sets import content_of, damage_chunk, flip, make_set, was_killed
from tests.support import hpctrain


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sets")
    return [make_set(folder / f"v{version}", version) for version in range(2)]


def ok(arguments: list[str | Path]) -> None:
    """Run it; an exit other than 0 is an error."""
    with pytest.raises(SystemExit) as ended:
        main([str(item) for item in arguments])
    assert not ended.value.code, ended.value.code


def code(arguments: list[str | Path]) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main([str(item) for item in arguments])
    return ended.value.code


def test_a_life_of_a_store(sets: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    for folder in (*sets, sets[0]):
        ok(["backup", folder, store, "--name", "digits"])
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"digits@2: 0\.1 MB read, 6 of \d+ chunks new, 0\.\d{3} MB added \(ratio \d+\.\d\), \d+\.\d MB/s; "
        r"identity [0-9a-f]{32}",
        lines[1],
    )
    ok(["backup", store, "--list"])
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["SET@GENERATION", "DATE", "(UTC)", "MB", "CHUNKS", "MB", "ADDED", "FROM"]
    assert [row.split()[0] for row in rows[1:]] == ["digits@1", "digits@2", "digits@3"]
    assert rows[2].endswith(str(sets[1]))
    ok(["restore", store, "digits@2", tmp_path / "again"])
    assert re.match(rf"{tmp_path}/again: digits@2, 3 files, 0\.1 MB", capsys.readouterr().out)
    assert content_of(tmp_path / "again") == content_of(sets[1])
    ok(["backup", sets[1], store, "--prune", "1", "--verify"])
    out = capsys.readouterr().out
    assert f"{store}: digits@1, digits@2 removed; " in out
    assert re.search(rf"{store}: \d+ objects, 0\.\d MB, \d+\.\d MB/s: all right; 2 generations", out)


def test_damage_is_named_mended_and_healed(
    sets: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, data = tmp_path / "store", make_set(tmp_path / "data")
    ok(["backup", data, store])
    path, offset = damage_chunk(data)
    assert code(["backup", data, store]) == 65
    assert "1 damaged chunks, so that no generation was made" in capsys.readouterr().err
    ok(["restore", store, "--repair", data])
    out = capsys.readouterr().out
    assert re.search(rf"mended: {path.name}: \d+ bytes at byte {offset}\n", out)
    assert "MB compared with data@1; 1 places mended, all right now" in out
    assert content_of(data) == content_of(sets[0])
    (segment,) = (store / "segments").iterdir()
    flip(segment, segment.stat().st_size // 2, 500)
    assert code(["backup", store, "--verify"]) == 65
    assert re.search(r"problems:\n  object [0-9a-f]{64}: damaged: .*; harms data@1", capsys.readouterr().err)
    assert code(["restore", store, "data", tmp_path / "again"]) == 65
    assert "data@1 cannot be rebuilt" in capsys.readouterr().err
    ok(["backup", data, store, "--verify"])
    ok(["restore", store, "data@1", tmp_path / "again"])
    assert content_of(tmp_path / "again") == content_of(data)


def test_a_repair_that_cannot_mend_all_ends_with_65(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ok(["backup", make_set(tmp_path / "old"), tmp_path / "store"])
    damage_chunk(make_set(tmp_path / "data", 1), 0, "image", 0)
    assert code(["restore", tmp_path / "store", "--repair", tmp_path / "data"]) == 65
    assert "1 pieces are damaged still, 0 were mended (compared with the digests of its chunks)" in (
        capsys.readouterr().err
    )


def test_a_damaged_manifest_is_a_warning_of_the_list(
    sets: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ok(["backup", sets[0], tmp_path / "store"])
    flip(tmp_path / "store" / "sets" / "v0" / "000001.json", 9)
    ok(["backup", tmp_path / "store", "--list"])
    assert "warning: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["backup", "a"], "name the store, too: hpctrain backup a DEST"),
        (["backup", "a", "b", "c"], "3 folders are given"),
        (["backup", "a", "--list", "--name", "x"], "give DATA, too"),
        (["backup", "a", "--list"], "is no backup store"),
        (["restore", "a"], "say what to restore and where"),
        (["restore", "a", "x"], "say what to restore and where"),
        (["restore", "a", "x", "y", "--repair", "z"], "give no DST"),
        (["restore", "a", "x", "y"], "is no backup store"),
    ],
)
def test_what_cannot_work(arguments: list[str | Path], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code(arguments) == 64
    assert said in capsys.readouterr().err


def test_a_kill_and_the_same_command_again(
    sets: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of its own, as a user would have it; the second one is a fork of this."""
    command: list[str | Path] = ["backup", sets[0], tmp_path / "store"]
    assert hpctrain(command, env={"HPCTRAIN_FAULTS": "kill@backup.write:nth=77"}).returncode == -9
    ok(command)
    command = ["restore", tmp_path / "store", "v0", tmp_path / "again"]
    rule = "kill@restore.write:nth=50"
    with monkeypatch.context() as patch:
        patch.setenv("HPCTRAIN_FAULTS", rule)
        assert was_killed(lambda: main([str(item) for item in command]), rule)
    assert not (tmp_path / "again").exists()
    ok(command)
    assert content_of(tmp_path / "again") == content_of(sets[0])
