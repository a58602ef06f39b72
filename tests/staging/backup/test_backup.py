"""Backups and restores of real packed sets."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.h5.chunks import FileSource
from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.h5.packed import open_packed
from hpctrain.resilience import faults
from hpctrain.staging.backup import back_up, list_generations, restore
from hpctrain.staging.backup.store import open_store
from tests.staging.backup.sets import (
    bytes_of,
    chunk_place,
    content_of,
    damage_chunk,
    flip,
    make_set,
    place_in_store,
)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Versions of one set; not to be changed."""
    folder = tmp_path_factory.mktemp("sets")
    return [make_set(folder / f"v{version}", version) for version in range(3)]


@pytest.fixture
def data(sets: list[Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(sets[0], tmp_path / "data")


def test_each_generation_is_restored_byte_for_byte(sets: list[Path], tmp_path: Path) -> None:
    store = tmp_path / "store"
    reports = [back_up(folder, store, "digits") for folder in (*sets, sets[0])]
    assert len(open_packed(sets[0]).shards) == 2
    assert [report.generation.label for report in reports] == [f"digits@{n}" for n in (1, 2, 3, 4)]
    assert [report.new_chunks for report in reports[1:]] == [6, 6, 0]
    for number, folder in enumerate((*sets, sets[0]), 1):
        restore(store, f"digits@{number}", tmp_path / f"r{number}")
        assert content_of(tmp_path / f"r{number}") == content_of(folder)
    assert restore(store, "digits", tmp_path / "newest").generation.number == 4
    assert restore(store, "digits@2", tmp_path / "newest", overwrite=True).generation.number == 2
    assert content_of(tmp_path / "newest") == content_of(sets[1])


def test_what_is_reported_is_what_was_written(sets: list[Path], tmp_path: Path) -> None:
    store, seen = tmp_path / "store", list[tuple[int, int]]()
    first = back_up(sets[0], store, progress=lambda done, total: seen.append((done, total)))
    assert first.generation.name == "v0"
    assert first.read_bytes == bytes_of(sets[0]) == seen[-1][0] == seen[-1][1]
    assert first.added_bytes == bytes_of(store) - len((store / "store.json").read_bytes())
    before = bytes_of(store)
    second = back_up(sets[1], store, "v0")
    assert second.added_bytes == bytes_of(store) - before
    assert second.generation.added_bytes < second.added_bytes < before / 3


def test_one_percent_of_the_chunks_costs_little_more_than_one_percent(tmp_path: Path) -> None:
    """The bar is 1.5 %; here for chunks of 16 kB of two fields, where the names of chunks weigh most."""
    rng = np.random.default_rng(0)
    arrays = {
        "image": rng.integers(0, 256, (4000, 16, 16, 3), dtype=np.uint8),
        "label": rng.integers(0, 1000, 4000),
    }
    for name in ("before", "after"):
        pack_arrays(arrays, tmp_path / name, PackOptions(chunk_samples=20, shard_mib=1))
        arrays["image"][[777, 3210]] = 0  # much smaller when compressed: all behind it moves
        arrays["label"][[777, 3210]] += 1
    back_up(tmp_path / "before", tmp_path / "store", "x")
    report = back_up(tmp_path / "after", tmp_path / "store", "x")
    assert (report.num_chunks, report.new_chunks) == (400, 4)
    assert report.added_bytes < 0.015 * bytes_of(tmp_path / "after")


def test_sets_share_what_they_have_in_common(sets: list[Path], data: Path, tmp_path: Path) -> None:
    first = back_up(sets[0], tmp_path / "store")
    other = back_up(data, tmp_path / "store", name="another one")
    assert (other.generation.label, other.new_chunks) == ("another one@1", 0)
    assert other.added_bytes < first.added_bytes / 10
    restore(tmp_path / "store", "another one", tmp_path / "again")
    assert content_of(tmp_path / "again") == content_of(data)


def test_a_set_of_another_layout_keeps_its_own_chunks(sets: list[Path], tmp_path: Path) -> None:
    back_up(sets[0], tmp_path / "store")
    make_set(tmp_path / "one", shard_mib=9)
    report = back_up(tmp_path / "one", tmp_path / "store")
    assert report.new_chunks < report.num_chunks / 4
    restore(tmp_path / "store", "one", tmp_path / "again")
    assert content_of(tmp_path / "again") == content_of(tmp_path / "one")


def test_damaged_chunks_are_all_named_and_nothing_is_kept_as_good(data: Path, tmp_path: Path) -> None:
    for shard, field, chunk in ((0, "image", 3), (0, "number", 0), (1, "label", 1)):
        damage_chunk(data, shard, field, chunk)
    with pytest.raises(DataError) as refused:
        back_up(data, tmp_path / "store")
    message = str(refused.value)
    assert message.startswith("3 damaged chunks, so that no generation was made:")
    assert "shard-00000.h5: dataset 'image', chunk 3 of" in message
    assert "shard-00000.h5: dataset 'number', chunk 0 of" in message
    assert "shard-00001.h5: dataset 'label', chunk 1 of" in message
    assert f"hpctrain restore {tmp_path / 'store'} --repair {data}" in message
    assert list_generations(open_store(tmp_path / "store")) == ([], [])


@pytest.mark.parametrize("damage", ["metadata", "truncated", "gone", "manifest"])
def test_a_set_that_cannot_be_opened_is_refused(data: Path, tmp_path: Path, damage: str) -> None:
    path = data / ("dataset.json" if damage == "manifest" else "shard-00001.h5")
    if damage == "truncated":
        os.truncate(path, path.stat().st_size - 100)
    elif damage == "gone":
        path.unlink()
    else:
        flip(path, 0, 40)
    with pytest.raises(DataError, match=path.name):
        back_up(data, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_set_that_changes_while_it_is_read_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FileSource.read

    def touching(self: FileSource, *arguments: object) -> object:
        os.utime(data / "shard-00001.h5", (1, 1))
        return read(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(FileSource, "read", touching)
    with pytest.raises(DataError, match=r"changed while it was read \(shard-00001\.h5\)"):
        back_up(data, tmp_path / "store")
    monkeypatch.undo()
    back_up(data, tmp_path / "store")


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "a@1", "a\n", "x" * 201])
def test_names_that_cannot_be_are_refused(sets: list[Path], tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a set"):
        back_up(sets[0], tmp_path / "store", name)


@pytest.mark.parametrize("name", ["digits", "Größe 1", "-x", "a" * 200])
def test_other_names_will_do(sets: list[Path], tmp_path: Path, name: str) -> None:
    back_up(sets[0], tmp_path / "store", name)
    assert restore(tmp_path / "store", f"{name}@1", tmp_path / "again").generation.name == name


def test_the_name_is_that_of_the_directory_that_a_link_leads_to(data: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(data)
    assert back_up(tmp_path / "link", tmp_path / "store").generation.name == "data"


def test_a_full_disk_is_said_and_the_next_backup_goes_on(
    sets: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_rules", tuple(faults.parse_rules("enospc@backup.write:nth=40")))
    with pytest.raises(StorageError, match="No space left on device"):
        back_up(sets[0], tmp_path / "store")
    assert list((tmp_path / "store" / "segments").iterdir()) == []
    monkeypatch.setattr(faults, "_rules", tuple(faults.parse_rules("eio@restore.write:nth=9")))
    back_up(sets[0], tmp_path / "store")
    with pytest.raises(StorageError, match="Input/output error"):
        restore(tmp_path / "store", "v0", tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_what_is_missing_or_damaged_in_the_store_is_named_and_nothing_restored(
    sets: list[Path], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    back_up(sets[0], store, "x")
    back_up(sets[1], store, "x")
    path, offset, size = chunk_place(open_packed(sets[0]), 0, "image", 5)
    segment, at = place_in_store(store, path.read_bytes()[offset : offset + size])
    flip(segment, at)
    with pytest.raises(DataError) as refused:
        restore(store, "x@1", tmp_path / "again")
    assert f"shard-00000.h5: the {size} bytes at byte {offset} (object " in str(refused.value)
    assert "is damaged" in str(refused.value)
    assert str(refused.value).count("\n") == 2  # what it is, the one object, and what to do
    segment.unlink()
    with pytest.raises(DataError, match=r"shard-00001\.h5: all of it: a part of its recipe is gone"):
        restore(store, "x@1", tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("which", ["y", "x@3", "x@0", "x@", "x@one", "../x", "x@-1"])
def test_a_generation_that_is_not_there(sets: list[Path], tmp_path: Path, which: str) -> None:
    back_up(sets[0], tmp_path / "store", "x")
    if which == "x@":
        assert restore(tmp_path / "store", which, tmp_path / "again").generation.number == 1
        return
    with pytest.raises(UsageError, match=r"holds no (set|generation) .*; it holds: (x|1)$"):
        restore(tmp_path / "store", which, tmp_path / "again")


def test_targets_that_are_in_the_way(sets: list[Path], tmp_path: Path) -> None:
    back_up(sets[0], tmp_path / "store", "x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="is not ours to replace"):
        restore(tmp_path / "store", "x", tmp_path / "full", overwrite=True)
    with pytest.raises(UsageError, match="exists already"):
        restore(tmp_path / "store", "x", sets[1])
    with pytest.raises(UsageError, match="lie within each other"):
        restore(tmp_path / "store", "x", tmp_path / "store" / "sets" / "y")


def test_a_store_in_a_set_is_not_replaced_with_the_set(tmp_path: Path) -> None:
    data = make_set(tmp_path / "data")
    with pytest.raises(UsageError, match="lie within each other"):
        back_up(data, data / "store")
    back_up(data, tmp_path / "store", "x")
    (tmp_path / "store").rename(data / "store")
    with pytest.raises(UsageError, match="lie within each other"):
        restore(data / "store", "x", data, overwrite=True)
    assert [item.label for item in list_generations(open_store(data / "store"))[0]] == ["x@1"]


# Manifests that are damaged, or lie.


def forge(store: Path, **changes: object) -> None:
    """Change the manifest of x@1 and give it the right digest: whoever can write it can do that, too."""
    from hpctrain.staging.backup.generations import _digest

    path = store / "sets" / "x" / "000001.json"
    entry = json.loads(path.read_bytes())
    for key, value in changes.items():
        (entry if key in entry else entry["files"][0])[key] = value
    path.write_text(json.dumps(entry | {"digest": _digest(entry)}))


EMPTY: dict[str, object] = {"num_bytes": 0, "num_chunks": 0, "rest_bytes": 0, "pages": [], "rest": []}


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../../evil.h5"},
        {"files": [EMPTY | {"name": "/tmp/evil.h5"}]},
        {"files": [EMPTY | {"name": ".."}]},
        {"num_bytes": 2**63},
        {"num_bytes": -1},
        {"num_chunks": 10**18},
        {"pages": ["00"]},
        {"rest": ["zz"]},
        {"files": None},
        {"number": 7},
        {"created_s": "soon"},
    ],
)  # fmt: skip
def test_a_manifest_that_lies_is_refused(
    sets: list[Path], tmp_path: Path, changes: dict[str, object]
) -> None:
    back_up(sets[0], tmp_path / "store", "x")
    forge(tmp_path / "store", **changes)
    with pytest.raises(DataError, match=r"000001\.json: the manifest of x@1 is damaged"):
        restore(tmp_path / "store", "x", tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_sizes_that_lie_are_refused(sets: list[Path], tmp_path: Path) -> None:
    back_up(sets[0], tmp_path / "store", "x")
    forge(tmp_path / "store", num_bytes=2**62)
    with pytest.raises(DataError, match="pieces do not make up the file"):
        restore(tmp_path / "store", "x", tmp_path / "again")
    forge(tmp_path / "store", files=[])
    with pytest.raises(DataError, match=r"holds no dataset\.json"):
        restore(tmp_path / "store", "x", tmp_path / "again")


def test_other_generations_do_not_mind_a_damaged_manifest(sets: list[Path], tmp_path: Path) -> None:
    store = tmp_path / "store"
    back_up(sets[0], store, "x")
    back_up(sets[1], store, "x")
    flip(store / "sets" / "x" / "000002.json", 50)
    assert back_up(sets[2], store, "x").generation.number == 3
    generations, problems = list_generations(open_store(store))
    assert [item.number for item in generations] == [1, 3]
    assert len(problems) == 1
    assert "000002.json: the manifest of x@2 is damaged" in problems[0]
    restore(store, "x@1", tmp_path / "again")
