"""Fetching published packages with the user's own npm or pip, held to one digest.

Both tools know the user's mirrors, proxies and credentials; the digest makes it irrelevant which mirror
answered. A package is kept in the user's cache (`$XDG_CACHE_HOME`, else `~/.cache`) and checked again at
every use.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from hpctrain.errors import ConfigError, DataError, StorageError
from hpctrain.h5.publish import publishing

Say = Callable[[str], None]
"""Takes one line of progress."""

FETCH_TIMEOUT_S: Final = 900.0
_NPM_REQUEST_TIMEOUT_MS: Final = 120_000
_SAID_LINES: Final = 8


@dataclass(frozen=True)
class Package:
    """One published file, called `file_name` by npm or pip; `sha256` of the whole file, in hexadecimal."""

    manager: Literal["npm", "pip"]
    name: str
    version: str
    file_name: str
    sha256: str
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def cache_dir() -> Path:
    """Where fetched packages are kept. `XDG_CACHE_HOME` moves it, unless relative (so says its standard)."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "hpctrain" / "packages"


def fetch(package: Package, say: Say, cache: Path | None = None) -> Path:
    """The checked file of a package: from the cache, else fetched.

    Raises `ConfigError` where npm or pip is missing, `StorageError` where the download fails or takes longer
    than `FETCH_TIMEOUT_S`, `DataError` where the file is not the one that was pinned.
    """
    kept = (cache or cache_dir()) / f"{package.name}-{package.version}"
    file = kept / package.file_name
    if file.is_file() and sha256_of(file) == package.sha256:
        return file
    command = _command(package)
    say(f"fetching {package} with {package.manager} ({package.size_bytes / (1 << 20):.1f} MiB)")
    with publishing(kept, marker=package.file_name, overwrite=True) as partial:
        scratch = partial / "scratch"  # npm's own cache too: nothing is kept twice in a home with a quota
        scratch.mkdir()
        _run(package, [*command, str(scratch)], partial)
        shutil.rmtree(scratch)
        check(partial / package.file_name, package)
    return file


def check(file: Path, package: Package) -> None:
    """Raise `DataError` unless `file` is the pinned one to the last bit."""
    if not file.is_file():
        found = sorted(path.name for path in file.parent.glob(f"*{file.suffix}"))
        raise DataError(
            f"{package.manager} left no {file.name} for {package}, but {found}; try another {package.manager}"
        )
    found_sha256 = sha256_of(file)
    if found_sha256 != package.sha256:
        raise DataError(
            f"{file.name}: sha256 is {found_sha256}, not {package.sha256}: this is not {package} as it was "
            "published, and nothing was taken from it; a proxy or mirror may have changed it: try another"
        )


def sha256_of(file: Path) -> str:
    """Hex digest of a file; raises `StorageError` where it cannot be read."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise StorageError(f"{file}: cannot be read: {error.strerror}; delete it and run again") from error


def _command(package: Package) -> list[str]:
    """The download command, less its last argument: a folder for the tool's own cache."""
    if package.manager == "npm":
        npm = shutil.which("npm")
        if npm is None:
            raise ConfigError(
                f"npm is not on PATH, and {package} is fetched with it: install Node.js (on many clusters: "
                "module load nodejs), or take the data set that needs only pip: hpctrain data digits DIR"
            )
        options = ["--ignore-scripts", "--loglevel=error", f"--fetch-timeout={_NPM_REQUEST_TIMEOUT_MS}"]
        return [npm, "pack", f"{package.name}@{package.version}", *options, "--fetch-retries=1", "--cache"]
    options = [
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--retries=2",
        "--dest=.",
    ]
    return [*_pip(package), "download", f"{package.name}=={package.version}", *options, "--cache-dir"]


def _pip(package: Package) -> list[str]:
    """This Python's pip, else the one on PATH (environments made by some tools come without)."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    pip = shutil.which("pip") or shutil.which("pip3")
    if pip is None:
        raise ConfigError(
            f"pip is missing, and {package} is fetched with it: run {sys.executable} -m ensurepip, then again"
        )
    return [pip]


def _run(package: Package, command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FETCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StorageError(
            f"{package.manager} did not fetch {package} within {FETCH_TIMEOUT_S:.0f} s; run again"
        ) from error
    if done.returncode != 0:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-_SAID_LINES:])
        raise StorageError(
            f"{package.manager} could not fetch {package} (exit {done.returncode}):\n{said}\n"
            "Without a way to its registry from here, run this command on a machine that has one and copy "
            f"{folder.parent} over; with one, run again"
        )
