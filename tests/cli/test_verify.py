"""`hpctrain verify` as it is typed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.cli import main
from hpctrain.cli.verify import byte_progress
from hpctrain.h5.packed import PackedSet
from tests.staging.one_child import one_child
from tests.support import small_set


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with one_child():
        yield


@pytest.fixture
def packed(tmp_path: Path) -> PackedSet:
    return small_set(tmp_path / "set", 60, 16)


def verify(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def test_all_right(packed: PackedSet, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = verify(capsys, packed.root, "--decode")
    assert (code, err) == (0, "")
    assert out.startswith(f"{packed.root}: all right; 14 chunks in 1 files, decoded; ")


def test_what_is_bad_and_what_to_do(packed: PackedSet, capsys: pytest.CaptureFixture[str]) -> None:
    index = packed.shards[0].dense["image"]
    flip(index.path, int(index.offsets[3]))
    code, out, err = verify(capsys, packed.root)
    assert code == 65
    place = (
        f"chunk 3 (byte {index.offsets[3]}, {index.sizes[3]} bytes), samples 48 to 59: damaged: the digest is"
    )
    assert out.startswith(f"{index.path}, dataset 'image', {place}")
    assert (
        f"1 things are wrong with {packed.root}; mend it from a backup with `hpctrain restore STORE --repair"
        in err
    )
    code, out, _ = verify(capsys, packed.root, "--json")
    document = json.loads(out)
    assert code == 65
    assert (document["sound"], document["num_chunks"]) == (False, 14)
    (finding,) = document["findings"]
    assert (finding["chunk"], finding["samples"], finding["path"]) == (3, [48, 60], str(index.path))


def test_a_disk_that_does_not_give_the_bytes(packed: PackedSet, capsys: pytest.CaptureFixture[str]) -> None:
    path = packed.shards[0].path
    path.unlink()
    path.symlink_to(path)  # a link to itself: the system refuses to open it
    code, out, err = verify(capsys, packed.root)
    assert code == 74
    assert "unreadable" in out
    assert "the disk does not give some bytes" in err


def test_files_without_digests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.arange(100), chunks=(10,), compression="gzip")
    code, out, _ = verify(capsys, tmp_path / "x.h5")
    assert code == 0
    assert "note: 10 of 10 chunks have neither a digest nor a Fletcher32 sum" in out
    assert verify(capsys, tmp_path / "y.h5")[0] == 64


def test_progress_has_the_rate_and_what_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    with byte_progress() as show:
        show("verify", 0, 40_000_000)
        now_s = 5.0
        show("verify", 10_000_000, 40_000_000)
    assert capsys.readouterr().err == "verify: 10.0 of 40.0 MB, 2.0 MB/s, 15 s left\n"
