"""Verifying HDF5 files that no manifest describes: what is in them is found out by a survey."""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.h5.advice import is_internal
from hpctrain.h5.index import DIGESTS_GROUP
from hpctrain.h5.manifest import MANIFEST
from hpctrain.h5.opening import HDF5_SUFFIXES
from hpctrain.h5.survey import survey
from hpctrain.staging.verify.check import FileWork
from hpctrain.staging.verify.child import Child
from hpctrain.staging.verify.findings import Finding
from hpctrain.staging.verify.look import look_at_file, read_by_library, words_of


def data_files(root: Path, needed: bool) -> list[Path]:
    """The HDF5 files of a path without a manifest.

    Raises `UsageError` for a path that is not there, and, where some are `needed`, for a folder that has none.
    """
    if not os.path.lexists(root):
        raise UsageError(f"{root}: there is no such file or folder")
    if not root.is_dir():
        return [root]
    try:
        paths = sorted(item for item in root.iterdir() if item.suffix.lower() in HDF5_SUFFIXES)
    except OSError as error:
        raise StorageError(f"{root}: cannot be listed: {error.strerror}") from error
    if not paths and needed:
        raise UsageError(
            f"{root} holds neither {MANIFEST} nor HDF5 files ({', '.join(sorted(HDF5_SUFFIXES))}); name a packed set, "
            "an HDF5 file, or a folder of those"
        )
    return [path for path in paths if not path.name.startswith(".")]


def look_at(path: Path, child: Child) -> FileWork:
    """A file that no manifest describes."""
    found = survey(path, verify_chunks=0)
    names = {item.name for item in found.datasets}
    datasets = [item for item in found.datasets if not is_internal(item)]
    digested = [item.name for item in datasets if f"/{DIGESTS_GROUP}{item.name}" in names]
    by_library = [item.name for item in datasets if item.road == "libhdf5"]
    work = FileWork(path)
    if not found.refused:
        parallel = [item.name for item in datasets if item.road == "parallel"]
        work = child.call(look_at_file, path, parallel, digested)
    words = [("", cause) for cause in (found.refused, found.cut) if cause]
    words += [(item.name, item.cause) for item in found.findings]
    work.findings[:0] = [Finding(path, "structure", words_of(path, cause), name) for name, cause in words]
    for name in by_library:
        work.findings += _read_by_library(child, path, name)
    if by_library:
        work.notes.append(
            f"{path}: {len(by_library)} datasets were read by libhdf5 only (first: {by_library[0]})"
        )
    return work


def _read_by_library(child: Child, path: Path, name: str) -> list[Finding]:
    found: list[Finding] = []
    first, block, num_rows = 0, 0, 1
    while first < num_rows:
        try:
            stop, num_rows, words = child.call(read_by_library, path, name, block)
        except (DataError, StorageError) as error:
            return [*found, Finding(path, "damaged", words_of(path, error, name), name)]
        if words:
            found.append(Finding(path, "damaged", words, name, samples=(first, stop)))
        first, block = stop, block + 1
    return found
