"""Horovod's source: fetched from PyPI, held to one digest, unpacked and patched."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from hpctrain.errors import BuildError

HOROVOD_VERSION = "0.28.1"
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
FETCH_TIMEOUT_S = 900.0

# Part of the key of a build: raised whenever PATCHES changes what is compiled.
PATCH_VERSION = 2
# (file, text that stands there exactly once, what takes its place). Horovod 0.28.1 asks for C++14, which
# torch's headers refuse, and for Python's include folder through distutils, which Python 3.12 no longer has.
PATCHES = (
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD {cxx_standard})"),
    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD {cxx_standard})"),
    (
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_paths()['include'])",
    ),
    (
        "cmake/Modules/FindPytorch.cmake",
        "from torch.utils.cpp_extension import CUDA_HOME; "
        "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
        "import os; print(os.environ['HPCTRAIN_WITH_CUDA'] == '1')",
    ),
)


def check_sdist(path: Path) -> None:
    """Raise `BuildError` unless the file is Horovod's source distribution to the last bit."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BuildError(f"{path}: cannot read Horovod's source: {error.strerror}") from error
    if found != HOROVOD_SHA256:
        raise BuildError(
            f"{path}: sha256 is {found}, not {HOROVOD_SHA256}: this is not {SDIST_NAME} as it was released; "
            "nothing was built from it; delete the file and run again"
        )


def fetch_sdist(cache: Path, given: Path | None = None) -> Path:
    """The checked source archive: `given` by the user, else the one in the cache, else fetched with pip.

    A machine without a way to PyPI is served by `given`. Raises `BuildError` for a wrong digest or a failed
    download.
    """
    if given is not None:
        check_sdist(given)
        return given
    kept = cache / SDIST_NAME
    if kept.exists():
        check_sdist(kept)
        return kept
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as folder:
        _download(Path(folder))
        check_sdist(Path(folder, SDIST_NAME))
        os.replace(
            Path(folder, SDIST_NAME), kept
        )  # whole or not at all: an interruption leaves no half archive
    return kept


def _download(folder: Path) -> None:
    requirement = folder / "requirements.txt"
    requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n", encoding="ascii")
    # Without isolation: pip runs setup.py for the metadata, and what that needs is installed already.
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
    command += ["--no-binary", ":all:", "--no-build-isolation", "--require-hashes"]
    command += ["--dest", str(folder), "--requirement", str(requirement)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FETCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"pip did not fetch {SDIST_NAME} within {FETCH_TIMEOUT_S:.0f} s; run again"
        ) from error
    if done.returncode != 0:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise BuildError(
            f"pip could not fetch {SDIST_NAME}:\n{said}\nWithout a way to PyPI from here, fetch the file "
            f"elsewhere "
            f"(pip download --no-deps --no-binary :all: horovod=={HOROVOD_VERSION}) and pass it with --sdist"
        )


def unpack(sdist: Path, folder: Path, cxx_standard: int) -> Path:
    """Unpack a checked archive into `folder`, patch it, and return the source tree."""
    with tarfile.open(sdist) as archive:
        # Releases of 3.11 before .4 have no filters; the digest vouches for what is in the archive.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        archive.extractall(folder)
    source = folder / SDIST_NAME.removesuffix(".tar.gz")
    patch(source, cxx_standard)
    return source


def patch(source: Path, cxx_standard: int) -> None:
    """Apply `PATCHES`; raises `BuildError` where a text does not stand exactly once."""
    for name, old, new in PATCHES:
        path = source / name
        text = path.read_text(encoding="utf-8")
        if (count := text.count(old)) != 1:
            raise BuildError(
                f"{path}: {old!r} stands there {count} times, not once: this source is not {SDIST_NAME}"
            )
        path.write_text(text.replace(old, new.format(cxx_standard=cxx_standard)), encoding="utf-8")


def remove_tree(folder: Path) -> None:
    """Remove a scratch folder; what cannot be removed is left: it holds nothing of value."""
    shutil.rmtree(folder, ignore_errors=True)
