"""Repairing a damaged set in place, from its own generation or from others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.h5.packed import open_packed
from hpctrain.staging.backup import back_up, repair
from tests.staging.backup.sets import (
    chunk_place,
    content_of,
    damage_chunk,
    flip,
    make_set,
    place_in_store,
    was_killed,
)

SHARDS = ("shard-00000.h5", "shard-00001.h5")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sets")
    return [make_set(folder / f"v{version}", version) for version in range(2)]


@pytest.fixture
def store(sets: list[Path], tmp_path: Path) -> Path:
    """It holds v0@1 and v0@2, which is version 1."""
    for folder in sets:
        back_up(folder, tmp_path / "store", "v0")
    return tmp_path / "store"


@pytest.fixture
def data(sets: list[Path], tmp_path: Path) -> Path:
    return shutil.copytree(sets[0], tmp_path / "data")


def test_single_chunks_are_mended_in_place(store: Path, data: Path, sets: list[Path]) -> None:
    path, offset = damage_chunk(data, 0, "image", 3)
    damage_chunk(data, 1, "number", 1)
    inode = path.stat().st_ino
    report = repair(store, data)
    assert len(report.mended) == 2
    assert report.mended[0].startswith("shard-00000.h5: ")
    assert report.mended[0].endswith(f" bytes at byte {offset}")
    assert (report.lost, report.truth) == ((), "v0@1")
    assert path.stat().st_ino == inode
    assert content_of(data) == content_of(sets[0])
    assert repair(store, data).mended == ()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: flip(data / SHARDS[0], 0, 100),  # HDF5's own structures
        lambda data: flip(data / SHARDS[1], 0, (data / SHARDS[1]).stat().st_size),  # all of a file
        lambda data: os.truncate(data / SHARDS[0], 1000),
        lambda data: os.truncate(data / SHARDS[0], (data / SHARDS[0]).stat().st_size + 5000),
        lambda data: (data / SHARDS[1]).unlink(),
    ],
)
def test_all_else_in_the_files_is_mended_too(
    store: Path, data: Path, sets: list[Path], damage: object
) -> None:
    damage(data)  # type: ignore[operator]
    assert repair(store, data).lost == ()
    assert content_of(data) == content_of(sets[0])


@pytest.mark.parametrize("damage", [lambda path: flip(path, 20), lambda path: path.unlink()])
def test_without_its_manifest_the_generation_must_be_named(
    store: Path, data: Path, sets: list[Path], damage: object
) -> None:
    damage(data / "dataset.json")  # type: ignore[operator]
    damage_chunk(shutil.copytree(sets[0], data.with_name("other")))
    with pytest.raises(DataError, match=r"cannot be told without it: .* NAME@GENERATION .* v0@1, v0@2"):
        repair(store, data)
    repair(store, data, "v0@1")
    assert content_of(data) == content_of(sets[0])
    with pytest.raises(UsageError, match=r"is not v0@2, but another set or generation"):
        repair(store, data, "v0")
    assert content_of(data) == content_of(sets[0])


def test_a_set_that_was_changed_since_is_mended_by_its_own_digests(store: Path, tmp_path: Path) -> None:
    changed = make_set(tmp_path / "changed", 7)
    whole = content_of(changed)
    path, _, _ = chunk_place(open_packed(changed), 1, "image", 2)
    same = damage_chunk(changed, 1, "image", 2)  # as in the generations
    table = open_packed(changed).shards[0].tables["text"]
    flip(table.path, int(table.offsets[0]) + 3)  # a table of offsets: the set cannot even be opened
    with pytest.raises(DataError):
        open_packed(changed)
    report = repair(store, changed)
    assert (len(report.mended), report.lost, report.truth) == (2, (), None)
    assert any(str(same[1]) in words for words in report.mended)
    assert content_of(changed) == whole
    assert path.exists()


def test_what_no_generation_has_is_named_and_the_rest_mended(store: Path, tmp_path: Path) -> None:
    changed = make_set(tmp_path / "changed", 7)  # sample 7 differs: it is in chunk 0
    damage_chunk(changed, 0, "image", 0)
    damage_chunk(changed, 0, "image", 4)
    report = repair(store, changed)
    assert len(report.mended) == 1
    assert len(report.lost) == 1
    assert "no object of" in report.lost[0]
    flip(changed / SHARDS[0], 0, 40)
    with pytest.raises(DataError, match="HDF5's own structures are damaged"):
        repair(store, changed)


def test_digests_that_are_damaged_mend_nothing(store: Path, tmp_path: Path) -> None:
    changed = make_set(tmp_path / "changed", 7)
    shard = open_packed(changed).shards[0]
    digests = shard.dense["image"].digests
    assert digests is not None
    flip(changed / SHARDS[0], (changed / SHARDS[0]).read_bytes().find(digests.tobytes()))
    before = content_of(changed)
    with pytest.raises(DataError, match="the digests in its files are damaged"):
        repair(store, changed)
    assert content_of(changed) == before


def test_damage_in_the_set_and_in_the_store(store: Path, data: Path, sets: list[Path]) -> None:
    path, offset, size = chunk_place(open_packed(sets[0]), 0, "image", 3)
    segment, at = place_in_store(store, path.read_bytes()[offset : offset + size])
    flip(segment, at)
    damage_chunk(data, 0, "image", 3)
    damage_chunk(data, 0, "image", 4)
    before = (data / SHARDS[0]).read_bytes()[offset : offset + size]
    report = repair(store, data)
    assert (len(report.mended), len(report.lost)) == (1, 1)
    assert "is damaged" in report.lost[0]
    assert (data / SHARDS[0]).read_bytes()[offset : offset + size] == before
    segment.unlink()
    report = repair(store, data)
    assert len(report.lost) == 3
    assert all("cannot be checked: a part of its recipe is gone" in words for words in report.lost)


def test_no_link_is_followed(store: Path, data: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    (data / SHARDS[0]).rename(target)
    flip(target, 0, 40)
    before = target.read_bytes()
    (data / SHARDS[0]).symlink_to(target)
    with pytest.raises(StorageError, match=rf"{SHARDS[0]}.* it is a link, and none is followed"):
        repair(store, data)
    assert target.read_bytes() == before


def test_only_a_directory_is_repaired(store: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a directory"):
        repair(store, tmp_path / "none")


def test_what_reads_back_otherwise_is_an_error(
    store: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that loses writes cannot be had: the write is left out."""
    damage_chunk(data)
    monkeypatch.setattr("hpctrain.staging.backup.work.os.pwrite", lambda *a: len(a[1]))
    with pytest.raises(StorageError, match="written, but read back otherwise"):
        repair(store, data)


def test_a_killed_repair_is_run_again(store: Path, data: Path, sets: list[Path]) -> None:
    damage_chunk(data, 0, "image", 1)
    damage_chunk(data, 0, "image", 2)
    flip(data / SHARDS[0], 0, 30)
    os.truncate(data / SHARDS[1], 4000)
    assert [
        was_killed(lambda: repair(store, data), f"kill@restore.write:nth={nth}") for nth in (1, 2, 4)
    ] == [True, True, True]
    repair(store, data)
    assert content_of(data) == content_of(sets[0])
