"""Private directories: nobody else can plant anything, and what is refused says how to mend it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError
from hpctrain.staging.mirror import Mirror, mirrors_under
from hpctrain.staging.private import (
    by_descriptor,
    open_private,
    open_private_at,
    open_private_file,
    private_path,
)
from tests.staging.mirrors_support import made_up_set

WORDS = {"planted": "data", "instead": "choose another"}
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give directories to others")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = private_path(tmp_path)
    folder.mkdir(mode=0o700)
    return folder


def refused(tmp_path: Path, message: str) -> None:
    for opens in (lambda: open_private(tmp_path, **WORDS), lambda: Mirror(tmp_path, made_up_set([1]))):
        with pytest.raises(ConfigError, match=message):
            opens()


def test_is_made_for_the_user_alone(tmp_path: Path) -> None:
    os.umask(before := os.umask(0))
    descriptor = open_private(tmp_path / "deep" / "er", **WORDS)
    path = private_path(tmp_path / "deep" / "er")
    assert path.name == f"hpctrain-{os.getuid()}"
    assert os.path.samestat(os.fstat(descriptor), path.stat())
    assert path.stat().st_mode & 0o7777 == 0o700
    assert os.umask(before) == before
    os.close(descriptor)


def test_what_is_missing_is_not_made_for_a_look(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "no"):
        with pytest.raises(FileNotFoundError):
            open_private(directory, **WORDS, make=False)
        assert mirrors_under(directory) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o755, 0o701])
def test_what_others_may_use_is_refused(tmp_path: Path, own: Path, mode: int) -> None:
    own.chmod(mode)
    refused(
        tmp_path,
        rf"with mode {mode:04o}; it must .* 0700, because others could plant data .*remove it, or choose",
    )


@as_root
def test_what_belongs_to_others_is_refused(tmp_path: Path, own: Path) -> None:
    os.chown(own, 65534, 65534)
    refused(tmp_path, "belongs to uid 65534 with mode 0700; it must belong to uid 0")


def test_a_link_or_a_file_is_refused(tmp_path: Path, own: Path) -> None:
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    refused(tmp_path, "is a link or no directory; remove it, or choose another")
    with pytest.raises(ConfigError, match="is a link or no directory"):
        mirrors_under(tmp_path)
    own.unlink()
    own.write_text("")
    refused(tmp_path, "is a link or no directory")


def test_the_users_own_choice_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    os.close(open_private(tmp_path / "link", **WORDS))
    assert private_path(tmp_path / "disk").is_dir()


@pytest.mark.parametrize("kind", ["link", "mode", "file"])
def test_the_mirror_itself_is_checked_too(tmp_path: Path, own: Path, kind: str) -> None:
    path = own / "feed"
    if kind == "link":
        (tmp_path / "planted").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "planted")
    elif kind == "mode":
        path.mkdir()
        path.chmod(0o777)
    else:
        path.write_text("")
    with pytest.raises(ConfigError, match=r"hpctrain-\d+/feed"):
        Mirror(tmp_path, made_up_set([1]))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, own: Path, name: str) -> None:
    descriptor = open_private(tmp_path, **WORDS)
    with pytest.raises(ValueError, match="no name of a directory"):
        open_private_at(descriptor, name, own, **WORDS)
    os.close(descriptor)


@pytest.mark.parametrize("kind", ["link", "dangling", "directory", "fifo"])
@pytest.mark.parametrize("name", ["present.map", "0.data", "owner.lock"])
def test_what_is_no_file_is_refused(tmp_path: Path, own: Path, kind: str, name: str) -> None:
    path = own / "feed" / name
    path.parent.mkdir(mode=0o700)
    (tmp_path / "other").write_text("kept")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / ("other" if kind == "link" else "none"))
    with pytest.raises(ConfigError, match=rf"{name} is (a link or )?no file.*; remove it"):
        Mirror(tmp_path, made_up_set([1]))
    assert (tmp_path / "other").read_text() == "kept"
    assert not (tmp_path / "none").exists()


@as_root
def test_files_of_others_are_refused(tmp_path: Path, own: Path) -> None:
    (own / "file").write_text("")
    os.chown(own / "file", 65534, 65534)
    descriptor = open_private(tmp_path, **WORDS)
    with pytest.raises(ConfigError, match="is no file of uid 0; remove it"):
        open_private_file(descriptor, "file", own)
    os.close(descriptor)


def test_a_descriptor_leads_to_what_was_opened(tmp_path: Path, own: Path) -> None:
    descriptor = open_private(tmp_path, **WORDS)
    own.rename(tmp_path / "moved")
    (by_descriptor(descriptor) / "file").write_text("x")
    assert (tmp_path / "moved" / "file").read_text() == "x"
    os.close(descriptor)
