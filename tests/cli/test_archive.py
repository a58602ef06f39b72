"""`hpctrain archive` and `hpctrain recall` as they are typed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.h5.packed import PackedSet, open_packed
from tests.staging.one_child import one_child
from tests.support import small_set


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with one_child():
        yield


@pytest.fixture
def packed(tmp_path: Path) -> PackedSet:
    (tmp_path / "cold").mkdir()
    return small_set(tmp_path / "set", 60, 16)


def typed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_archive_and_recall(packed: PackedSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = typed(capsys, "archive", packed.root, tmp_path / "cold", "--codec", "blosc-zstd")
    assert (code, err) == (0, "")
    archived = tmp_path / "cold" / "set"
    lines = out.splitlines()
    assert re.fullmatch(
        rf"archived {packed.root} as {archived}: 0\.\d MB, now 0\.\d MB, blosc-zstd, every chunk checked; "
        rf"{packed.root} was removed; identity {open_packed(archived).identity}",
        lines[0],
    )
    assert lines[1] == f"next: hpctrain recall {archived} {packed.root}"
    code, out, _ = typed(capsys, *lines[1].split()[2:], "--keep")
    assert code == 0
    assert out.endswith(f"{archived} stays; identity {packed.identity}\n")
    assert open_packed(packed.root).identity == packed.identity


def test_run_again_it_says_so(packed: PackedSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed(capsys, "archive", packed.root, tmp_path / "cold")
    code, out, _ = typed(capsys, "archive", packed.root, tmp_path / "cold")
    assert code == 0
    assert out.startswith(f"an earlier run had made {tmp_path / 'cold' / 'set'}; it was not made again\n")


def test_bad_input_is_one_message_and_the_right_code(
    packed: PackedSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, wanted, message in (
        (["archive", packed.root, tmp_path / "nowhere"], 64, "make it, or mount the archive"),
        (["recall", tmp_path / "cold" / "set", tmp_path / "back"], 64, "there is no such archived set"),
        (["archive", tmp_path / "cold", tmp_path], 64, "within each other"),
        (["archive", packed.root, "/proc"], 74, "/proc: cannot be written to"),
    ):
        code, out, err = typed(capsys, *arguments)
        assert (code, out) == (wanted, "")
        assert err.startswith("hpctrain: ")
        assert message in err
    raw = bytearray(packed.shards[0].path.read_bytes())
    raw[int(packed.shards[0].dense["label"].offsets[1])] ^= 1
    packed.shards[0].path.write_bytes(raw)
    code, _, err = typed(capsys, "archive", packed.root, tmp_path / "cold")
    assert code == 65
    assert "dataset 'label', chunk 1" in err
    assert packed.root.is_dir()


@pytest.mark.parametrize("verb", ["archive", "recall", "verify"])
def test_help_shows_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = typed(capsys, verb, "--help")
    assert code == 0
    assert f"Example: hpctrain {verb} " in out
    if verb == "archive":
        assert "A run that uses SET needs" in out
