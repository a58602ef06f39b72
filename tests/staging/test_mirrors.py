"""The mirrors on a node, looked at and removed without opening their sets."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from hpctrain.errors import StorageError, UsageError
from hpctrain.staging.mirror import Mirror, mirrors_under, remove_mirror
from hpctrain.staging.private import private_path
from tests.staging.mirrors_support import made_up_set, owned, write

STORED = made_up_set([5000, 0, 70_000, 300], num_files=2)


def filled(directory: Path, identity: str = "feed") -> Mirror:
    stored = dataclasses.replace(STORED, identity=identity)
    mirror = owned(directory, stored, quota_bytes=10**6)
    write(mirror, stored, 0)
    return mirror


def test_status(tmp_path: Path) -> None:
    mirror, other = filled(tmp_path, "b"), filled(tmp_path, "a")
    other.close()
    (private_path(tmp_path) / "env-0123").mkdir(mode=0o700)  # an unpacked environment
    first, second = mirrors_under(tmp_path)
    assert (first.identity, second.identity) == ("a", "b")
    assert (first.is_owned, second.is_owned) == (False, True)
    assert second.path == mirror.path
    assert (second.present_chunks, second.total_chunks) == (2, 4)
    assert (second.present_bytes, second.total_bytes) == (5000, 75_300)
    assert second.quota_bytes == 10**6
    assert second.is_of_this_boot
    mirror.close()


def test_to_look_does_not_keep_anybody_from_owning(tmp_path: Path) -> None:
    filled(tmp_path).close()
    assert not mirrors_under(tmp_path)[0].is_owned
    mirror = Mirror(tmp_path, STORED)
    assert mirror.take()
    mirror.close()


@pytest.mark.parametrize("content", [None, b"{"], ids=["gone", "damaged"])
def test_status_without_a_record(tmp_path: Path, content: bytes | None) -> None:
    mirror = filled(tmp_path)
    mirror.close()
    (mirror.path / "mirror.json").unlink()
    if content is not None:
        (mirror.path / "mirror.json").write_bytes(content)
    (status,) = mirrors_under(tmp_path)
    assert (status.present_chunks, status.total_chunks, status.quota_bytes) == (1, 4, None)
    assert not status.is_of_this_boot


def test_status_of_one_that_was_opened_and_never_owned(tmp_path: Path) -> None:
    Mirror(tmp_path, STORED).close()
    (status,) = mirrors_under(tmp_path)
    assert (status.present_chunks, status.total_chunks) == (0, 4)


def test_status_after_a_restart_of_the_node(tmp_path: Path) -> None:
    mirror = filled(tmp_path)
    mirror.close()
    record = json.loads((mirror.path / "mirror.json").read_text())
    (mirror.path / "mirror.json").write_text(json.dumps({**record, "boot_id": "another"}))
    assert not mirrors_under(tmp_path)[0].is_of_this_boot


def test_removed_mirrors_are_gone_and_others_stay(tmp_path: Path) -> None:
    mirror, other = filled(tmp_path), filled(tmp_path, "other")
    assert not remove_mirror(mirror.path), "it is owned"
    assert mirror.present_bytes == 5000
    mirror.close()
    assert remove_mirror(mirror.path)
    assert not mirror.path.exists()
    assert remove_mirror(mirror.path), "again is no harm"
    assert [status.identity for status in mirrors_under(tmp_path)] == ["other"]
    other.close()


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    filled(tmp_path).close()
    environment = private_path(tmp_path) / "env-0123"
    environment.mkdir(mode=0o700)
    (environment / "bin").write_text("kept")
    (tmp_path / "feed").mkdir()
    for path in (environment, tmp_path / "feed", private_path(tmp_path), tmp_path):
        with pytest.raises(UsageError, match="is no mirror"):
            remove_mirror(path)
    assert (environment / "bin").read_text() == "kept"
    assert len(mirrors_under(tmp_path)) == 1


def test_what_cannot_be_removed_is_said(tmp_path: Path) -> None:
    mirror = filled(tmp_path)
    mirror.close()
    (mirror.path / "folder").mkdir()
    with pytest.raises(StorageError, match=r"feed: cannot be removed: Is a directory"):
        remove_mirror(mirror.path)
    os.rmdir(mirror.path / "folder")
    assert remove_mirror(mirror.path)
