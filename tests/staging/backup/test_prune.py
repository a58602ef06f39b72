"""Pruning: what is needed stays, what is not goes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import UsageError
from hpctrain.h5.packed import open_packed
from hpctrain.staging.backup import back_up, check_store, list_generations, prune, restore
from hpctrain.staging.backup import prune as prune_function
from hpctrain.staging.backup.store import make_store, open_store
from tests.staging.backup.sets import bytes_of, chunk_place, content_of, flip, make_set, place_in_store


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sets")
    return [make_set(folder / f"v{version}", version) for version in range(4)]


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set that has little in common with the others."""
    folder = tmp_path_factory.mktemp("strange") / "s"
    from hpctrain.h5.pack import PackOptions, pack_arrays
    from tests.support import small_arrays

    pack_arrays(small_arrays(300, seed=5), folder, PackOptions(chunk_samples=8))
    return folder


def labels(store: Path) -> list[str]:
    return [item.label for item in list_generations(open_store(store))[0]]


def check(store: Path, kept: dict[str, Path], target: Path) -> None:
    assert labels(store) == sorted(kept)
    assert check_store(store).problems == ()
    for which, folder in kept.items():
        restore(store, which, target, overwrite=True)
        assert content_of(target) == content_of(folder)


def test_the_newest_of_each_set_are_kept(sets: list[Path], tmp_path: Path) -> None:
    store = tmp_path / "store"
    for folder in sets:
        back_up(folder, store, "x")
    back_up(sets[0], store, "y")
    assert prune(store, 2).removed == ("x@1", "x@2")
    check(store, {"x@3": sets[2], "x@4": sets[3], "y@1": sets[0]}, tmp_path / "again")
    assert prune(store, 2).removed == ()
    assert back_up(sets[1], store, "x").generation.number == 5


def test_room_is_given_back_and_shared_chunks_stay(sets: list[Path], strange: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    back_up(sets[0], store, "x")
    first = bytes_of(store)
    back_up(strange, store, "x")
    both = bytes_of(store)
    back_up(sets[1], store, "x")
    report = prune(store, 1)
    assert report.removed == ("x@1", "x@2")
    assert report.bytes_before - report.bytes_after > 0.8 * (both - first)
    assert report.bytes_after == bytes_of(store / "segments")
    check(store, {"x@3": sets[1]}, tmp_path / "again")


def test_a_segment_that_is_mostly_dead_is_written_anew(
    sets: list[Path], strange: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    back_up(strange, store, "x")
    names = {path.name for path in (store / "segments").iterdir()}
    # Of the strange set only what it shares with this one is needed then.
    back_up(sets[0], store, "x")
    shared = {path.name for path in (store / "segments").iterdir()}
    prune(store, 1)
    left = {path.name for path in (store / "segments").iterdir()}
    assert not names & left
    assert len(left - shared) == 1
    check(store, {"x@2": sets[0]}, tmp_path / "again")


def test_many_small_segments_become_one(
    sets: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    for number in range(3):
        back_up(sets[number], store, "x")
    monkeypatch.setitem(prune_function.__globals__, "_MANY_SMALL", 3)
    prune(store, 9)
    assert len(list((store / "segments").iterdir())) == 1
    check(store, {f"x@{n + 1}": sets[n] for n in range(3)}, tmp_path / "again")


def test_a_damaged_object_is_not_moved_and_its_segment_stays(
    sets: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    for folder in sets[:2]:
        back_up(folder, store, "x")
    path, offset, size = chunk_place(open_packed(sets[1]), 0, "image", 0)  # in x@2 alone
    segment, at = place_in_store(store, path.read_bytes()[offset : offset + size])
    flip(segment, at)
    monkeypatch.setitem(prune_function.__globals__, "_MANY_SMALL", 2)  # so that all are moved
    report = prune(store, 9)
    assert report.problems == (f"{segment}, byte {at}, {size} bytes: damaged; its segment stays as it is",)
    assert len(list((store / "segments").iterdir())) == 2
    flip(segment, at)  # as if only reading it had failed
    check(store, {"x@1": sets[0], "x@2": sets[1]}, tmp_path / "again")


def test_keep_nothing_is_refused(sets: list[Path], tmp_path: Path) -> None:
    back_up(sets[0], tmp_path / "store", "x")
    with pytest.raises(UsageError, match="--prune 0: keep at least 1"):
        prune(tmp_path / "store", 0)


def test_an_empty_store(tmp_path: Path) -> None:
    from hpctrain.staging.backup.store import make_store

    make_store(tmp_path / "store")
    assert prune(tmp_path / "store", 1).removed == ()
    assert check_store(tmp_path / "store").num_objects == 0


def test_what_is_needed_is_not_moved_because_it_is_small(tmp_path: Path) -> None:
    """Records of objects of a few bytes are mostly heads."""
    store = make_store(tmp_path / "store")
    with store.exclusive(), store.writing():
        for number in range(20):
            store.put(bytes([number]))
    store.refresh()
    all_needed = np.ones(len(store.table.rows), np.bool_)
    moved = prune_function.__globals__["_segments_to_move"]
    assert moved(store, all_needed, False).tolist() == [False]
    assert moved(store, all_needed & (np.arange(20) < 8), False).tolist() == [True]
