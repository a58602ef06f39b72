"""The store: what it takes for one, who may write, and objects by name."""

from __future__ import annotations

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.resilience.lockfile import LockFile
from hpctrain.staging.backup.generations import numbers_of, read_generation
from hpctrain.staging.backup.segments import name_of
from hpctrain.staging.backup.store import Store, make_store, open_store
from hpctrain.staging.backup.table import MissingObjectError, Table
from tests.staging.backup.sets import flip, place_in_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path / "store")


def put(store: Store, *contents: bytes) -> list[tuple[bytes, bool]]:
    with store.exclusive(), store.writing():
        found = [store.put(content) for content in contents]
    store.refresh()
    return found


def test_objects_are_kept_once_and_read_by_name(store: Store) -> None:
    names = put(store, b"one", b"two", b"one", b"")
    assert names == [
        (name_of(b"one"), True),
        (name_of(b"two"), True),
        (name_of(b"one"), False),
        (name_of(b""), True),
    ]
    assert put(store, b"two", b"three") == [(name_of(b"two"), False), (name_of(b"three"), True)]
    again = open_store(store.path)
    assert [again.read(name_of(content)) for content in (b"one", b"two", b"three", b"")] == [
        b"one", b"two", b"three", b"",
    ]  # fmt: skip
    with pytest.raises(MissingObjectError, match=rf"{name_of(b'four').hex()} is missing"):
        again.read(name_of(b"four"))


def test_a_damaged_object_is_not_given(store: Store) -> None:
    put(store, b"content one", b"content two")
    path, at = place_in_store(store.path, b"content one")
    flip(path, at)
    with pytest.raises(MissingObjectError, match=rf"is damaged: {path}, byte {at}, 11 bytes"):
        store.read(name_of(b"content one"))
    assert store.read(name_of(b"content two")) == b"content two"


def test_an_object_that_is_there_twice_is_read_where_it_is_whole(store: Store, tmp_path: Path) -> None:
    put(store, b"content")
    first = place_in_store(store.path, b"content")[0]
    for target in ("0" * 16, "f" * 16):
        shutil.copy(first, first.with_name(f"{target}.segment"))
    first.unlink()
    flip(*place_in_store(store.path, b"content"))
    store.refresh()
    assert store.read(name_of(b"content")) == b"content"
    row = store.table.row_of(name_of(b"content"))
    assert row is not None
    assert store.table.names[store.table.owners[row]].startswith("f")


def test_an_object_that_was_moved_meanwhile_is_found(store: Store) -> None:
    put(store, b"content")
    path = place_in_store(store.path, b"content")[0]
    path.rename(path.with_name(f"{'a' * 16}.segment"))
    assert store.read(name_of(b"content")) == b"content"


def test_one_writer_at_a_time(store: Store) -> None:
    with store.exclusive():
        other = open_store(store.path)
        with pytest.raises(StorageError, match="another backup or prune is at work on this store; wait"):
            other.exclusive().__enter__()
    with other.exclusive():
        pass


def test_a_writer_removes_what_a_killed_one_left_but_not_without_locks(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = store.segments / ".0123.segment.partial"
    left.touch()
    monkeypatch.setattr(
        LockFile, "is_real", property(lambda self: False, lambda self, value: None), raising=False
    )
    with store.exclusive():
        assert left.exists()
    monkeypatch.undo()
    with store.exclusive():
        assert not left.exists()


def test_a_segment_that_cannot_be_read_stops_writers_only(store: Store) -> None:
    put(store, b"content")
    (store.segments / "e.segment").mkdir()  # opening it works, reading gives EISDIR
    store.refresh()
    assert store.read(name_of(b"content")) == b"content"
    with pytest.raises(StorageError, match=r"e\.segment: cannot be read: Is a directory"):
        store.exclusive().__enter__()


def test_marked_records_count_no_more(store: Store) -> None:
    put(store, b"one", b"two")
    path, at = place_in_store(store.path, b"one")
    store.mark(path.name, [at])
    store.refresh()
    assert (store.has(name_of(b"one")), store.has(name_of(b"two"))) == (False, True)
    store.mark(path.name, [])
    store.refresh()
    assert store.has(name_of(b"one"))
    for nonsense in (b"{", b"3", b'["x"]'):
        path.with_name(f"{path.name}.damaged").write_bytes(nonsense)
        store.refresh()
        assert store.has(name_of(b"one"))


def test_an_error_while_writing_leaves_the_store_as_it_was(store: Store) -> None:
    def fail() -> None:
        with store.exclusive(), store.writing():
            store.put(b"content")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert list(store.segments.iterdir()) == []
    store.refresh()
    assert not store.has(name_of(b"content"))


def test_a_directory_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"holds 'thesis.tex' and is no backup store; choose a new or empty"):
        make_store(tmp_path)
    with pytest.raises(UsageError, match=r"is no backup store .* `hpctrain backup DATA"):
        open_store(tmp_path)
    with pytest.raises(UsageError, match="is not a directory"):
        make_store(tmp_path / "thesis.tex")


def test_a_store_whose_making_was_killed_is_made_again(tmp_path: Path) -> None:
    (tmp_path / ".store.json.tmp-12-ab").touch()
    assert make_store(tmp_path).has(b"") is False
    (tmp_path / "sets").rmdir()
    make_store(tmp_path)
    assert (tmp_path / "sets").is_dir()


@pytest.mark.parametrize("content", ["", "[]", '{"format": "hpctrain-backup", "version": 2}', "[" * 100_000])
def test_an_about_file_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "store.json").write_text(content)
    with pytest.raises(DataError, match=r"store\.json: not"):
        make_store(tmp_path)
    assert json.loads((make_store(tmp_path / "new").path / "store.json").read_bytes())["version"] == 1


def test_many_readers_find_what_a_prune_moved(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them miss it in the old table; one looks again, and the others use what it found."""
    put(store, b"content")
    reader = open_store(store.path)
    old, all_missed, real = reader.table, threading.Barrier(3), Table.read
    segment = place_in_store(store.path, b"content")[0]
    segment.rename(segment.with_name("moved.segment"))

    def read(table: Table, name: bytes) -> bytes:
        try:
            return real(table, name)
        finally:
            if table is old:
                all_missed.wait(30)

    monkeypatch.setattr(Table, "read", read)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(reader.read, [name_of(b"content")] * 3)) == [b"content"] * 3


def use(path: Path) -> None:
    store = open_store(path)
    for number in numbers_of(store, "x"):
        read_generation(store, "x", number)
    with store.exclusive():
        pass


@pytest.mark.parametrize("name", ["segments/x.segment", "sets/x/000001.json", "store.json"])
def test_no_pipe_is_waited_for(store: Store, name: str) -> None:
    put(store, b"content")
    path = store.path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(StorageError, match=rf"{path}: cannot be read: Illegal seek"):
        use(store.path)
    if name != "store.json":
        assert open_store(store.path).read(name_of(b"content")) == b"content"
