"""A store with missing or damaged objects: what is said of it, and how it heals."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpctrain.errors import DataError
from hpctrain.h5.packed import open_packed
from hpctrain.staging.backup import back_up, check_store, prune, restore
from hpctrain.staging.backup.generations import find_generation
from hpctrain.staging.backup.store import open_store
from tests.staging.backup.sets import (
    chunk_place,
    content_of,
    flip,
    make_set,
    place_in_store,
)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sets")
    return [make_set(folder / f"v{version}", version) for version in range(3)]


@pytest.fixture
def store(sets: list[Path], tmp_path: Path) -> Path:
    """Versions 0 and 1 of x, and version 2 of y."""
    for folder, name in zip(sets, "xxy", strict=True):
        back_up(folder, tmp_path / "store", name)
    return tmp_path / "store"


def bytes_in(data: Path, chunk: int) -> bytes:
    path, offset, size = chunk_place(open_packed(data), 0, "image", chunk)
    return path.read_bytes()[offset : offset + size]


def restores(store: Path, sets: list[Path], tmp_path: Path) -> None:
    for folder, which in zip(sets, ("x@1", "x@2", "y@1"), strict=True):
        restore(store, which, tmp_path / "again", overwrite=True)
        assert content_of(tmp_path / "again") == content_of(folder)


def test_a_whole_store(store: Path, sets: list[Path], tmp_path: Path) -> None:
    seen = list[tuple[int, int]]()
    report = check_store(store, lambda done, total: seen.append((done, total)))
    assert (report.problems, report.notes, report.num_generations) == ((), (), 3)
    assert seen[-1] == (report.num_bytes, report.num_bytes)
    restores(store, sets, tmp_path)


def test_a_damaged_object_is_named_with_what_it_harms_and_put_back_by_the_next_backup(
    store: Path, sets: list[Path], tmp_path: Path
) -> None:
    common, changed = bytes_in(sets[0], 10), bytes_in(sets[1], 0)
    places = [place_in_store(store, content) for content in (common, changed)]
    for segment, at in places:
        flip(segment, at)
    found = check_store(store).problems
    assert len(found) == 2
    (of_all,) = (
        words for words in found if "harms x@1 shard-00000.h5, x@2 shard-00000.h5, y@1 shard" in words
    )
    (of_one,) = (words for words in found if words.endswith("harms x@2 shard-00000.h5"))
    assert f"damaged: {places[0][0]}, byte {places[0][1]}, {len(common)} bytes" in of_all
    assert f"damaged: {places[1][0]}" in of_one
    assert check_store(store).problems == found
    back_up(sets[2], store, "other")  # it has the one
    assert check_store(store).problems == (of_one,)
    back_up(sets[1], store, "x")
    report = check_store(store)
    assert report.problems == ()
    assert all("nothing needs it any more" in words for words in report.notes)
    assert len(report.notes) == 2
    restores(store, sets, tmp_path)
    prune(store, 9)
    restores(store, sets, tmp_path)


@pytest.mark.parametrize("how", ["gone", "truncated", "index"])
def test_segments_that_are_not_whole(store: Path, sets: list[Path], tmp_path: Path, how: str) -> None:
    segment, at = place_in_store(store, bytes_in(sets[0], 10))
    if how == "gone":
        segment.unlink()
    elif how == "truncated":
        os.truncate(segment, at + 1)
    else:
        flip(segment, segment.stat().st_size - 5)
    report = check_store(store)
    assert (report.problems == ()) == (how == "index")
    assert all("missing; harms" in words for words in report.problems)
    if how != "gone":
        assert f"{segment}: its index is damaged or cut off" in report.notes[0]
    if how != "index":
        with pytest.raises(DataError, match=r"x@1 cannot be rebuilt"):
            restore(store, "x@1", tmp_path / "again")
        back_up(sets[0], store, "x")
        back_up(sets[1], store, "x")
        assert back_up(sets[2], store, "y").problems == ((report.notes[0],) if how == "truncated" else ())
    assert check_store(store).problems == ()
    restores(store, sets, tmp_path)
    prune(store, 9)
    assert check_store(store).notes == ()
    restores(store, sets, tmp_path)


def test_a_damaged_recipe_heals_too(store: Path, sets: list[Path], tmp_path: Path) -> None:
    opened = open_store(store)
    recipe = next(item for item in find_generation(opened, "x@2").files if item.num_chunks)
    for name in (recipe.pages[0], recipe.rest[0]):
        flip(*place_in_store(store, opened.read(name)))
    assert len(check_store(store).problems) == 2
    with pytest.raises(DataError, match="not known what all generations need"):
        prune(store, 9)
    back_up(sets[1], store, "z")
    assert check_store(store).problems == ()
    prune(store, 9)
    restores(store, sets, tmp_path)


def test_a_damaged_manifest_is_said(store: Path) -> None:
    path = store / "sets" / "x" / "000001.json"
    flip(path, 100)
    (words,) = check_store(store).problems
    assert f"{path}: the manifest of x@1 is damaged" in words
    with pytest.raises(DataError, match="nothing was pruned"):
        prune(store, 1)
    path.unlink()
    assert prune(store, 1).removed == ()


def test_a_sector_that_cannot_be_read_hides_nothing(
    store: Path, sets: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system call is replaced: a disk with a bad sector is not to be had."""
    (bad_path, bad), (path, at) = (place_in_store(store, bytes_in(sets[0], chunk)) for chunk in (10, 11))
    flip(path, at)
    real = os.pread

    def pread(descriptor: int, num_bytes: int, offset: int) -> bytes:
        if offset == bad and os.readlink(f"/proc/self/fd/{descriptor}") == str(bad_path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, num_bytes, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        assert len(check_store(store).problems) == 2
        back_up(sets[0], store, "x")  # puts both back, elsewhere
        assert check_store(store).problems == ()
    restores(store, sets, tmp_path)
