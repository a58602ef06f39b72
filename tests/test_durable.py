"""Files are replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.durable import fsync_path, replace_file


def test_replaces_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for content in (b"one", b"two" * 1000, b""):
        replace_file(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["x"]


def test_a_failure_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.mkdir()  # a directory cannot be replaced by a file
    (path / "inside").write_text("old")
    with pytest.raises(OSError, match="x"):
        replace_file(path, b"new")
    assert (path / "inside").read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "missing" / "x", b"")


def test_fsync_takes_files_and_directories(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a")
    fsync_path(tmp_path / "x")
    fsync_path(tmp_path)
    with pytest.raises(FileNotFoundError):
        fsync_path(tmp_path / "none")
