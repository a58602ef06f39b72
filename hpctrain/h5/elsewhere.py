"""Datasets whose data lie in other places: virtual datasets and external storage.

libhdf5 gives the fill value for what it does not find there, in silence. Here it is an error.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import h5py

from hpctrain.errors import DataError
from hpctrain.h5.index import RECOPY, file_key_of, open_file_key, open_h5

FileKeys = dict[Path, tuple[int, int, int]]
"""Files and what told them from others (`index.file_key_of`)."""

_MAX_DEPTH: Final = 16  # virtual datasets made of virtual datasets
_UNLIMITED: Final = 2**63


def check_sources(node: h5py.Dataset, depth: int = 0) -> FileKeys:
    """The other files that a virtual or external dataset has its data in.

    Raises `DataError`, naming the source, when the data are not where the dataset says.
    """
    plist = node.id.get_create_plist()
    if plist.get_external_count():
        return _check_external(node)
    if not node.is_virtual:
        return {}
    where = f"{node.file.filename}: virtual dataset {node.name!r}"
    if depth >= _MAX_DEPTH:
        raise DataError(
            f"{where} is made of virtual datasets more than {_MAX_DEPTH} deep; copy it into one file"
        )
    found: FileKeys = {}
    for filename, name in sorted({(item.file_name, item.dset_name) for item in node.virtual_sources()}):
        found |= _check_virtual(node, where, filename, name, depth)
    return found


def _check_virtual(node: h5py.Dataset, where: str, filename: str, name: str, depth: int) -> FileKeys:
    # A numbered source ("%b") ends where a number is missing; the first must be there.
    filename, name = (text.replace("%b", "0").replace("%%", "%") for text in (filename, name))
    if filename == ".":
        return _check_source_dataset(node.file, f"{where}: source {name!r} in the same file", name, depth)
    places = _virtual_places(Path(node.file.filename), filename)
    path = next((place for place in places if place.exists()), None)
    if path is None:
        looked_for = ", ".join(repr(str(place)) for place in dict.fromkeys(places))
        raise DataError(
            f"{where}: its source file {filename!r} is not there (looked for {looked_for}), its "
            "values would be the fill value: put the file there, or start with HDF5_VDS_PREFIX set to its folder"
        )
    with open_h5(path, RECOPY) as source:
        key = open_file_key(source)
        return {path: key} | _check_source_dataset(source, f"{where}: source {name!r} in {path}", name, depth)


def _check_source_dataset(file: h5py.File, where: str, name: str, depth: int) -> FileKeys:
    source = file.get(name)
    if not isinstance(source, h5py.Dataset):
        raise DataError(f"{where} is not there: its values would read as the fill value; {RECOPY}")
    return check_sources(source, depth + 1)


def _virtual_places(path: Path, filename: str) -> list[Path]:
    """Where libhdf5 looks for a source file of a virtual dataset, in order."""
    name = Path(filename)
    places = [name] if name.is_absolute() else []
    if name.is_absolute():  # where it is not there any more, libhdf5 looks for a file of that name elsewhere
        name = Path(name.name)
    prefix = _prefix("HDF5_VDS_PREFIX", path)
    if prefix:
        places.append(Path(prefix) / name)
    # Last, beside the file itself, where a symbolic link led to it.
    return [*places, path.absolute().parent / name, name.absolute(), path.resolve().parent / name]


def _prefix(variable: str, path: Path) -> str:
    """A folder from the environment, "" where it is not set.

    libhdf5 looks once, when h5py is imported: what was set later has no effect, so that only what this process was
    started with counts.
    """
    value = os.environ.get(variable, "")
    try:
        initial = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        initial = []
    if os.fsencode(f"{variable}={value}") not in initial:
        return ""
    return value.replace("${ORIGIN}", str(path.absolute().parent))


def _check_external(node: h5py.Dataset) -> FileKeys:
    """libhdf5 reads zeros where a file of external storage is too short."""
    keys: FileKeys = {}
    plist = node.id.get_create_plist()
    needed = node.size * node.id.get_type().get_size()
    for i in range(plist.get_external_count()):
        filename, offset, size = plist.get_external(i)
        part = min(needed, _UNLIMITED if size < 0 else size)
        needed -= part
        path = _external_place(Path(node.file.filename), os.fsdecode(filename))
        found = path.stat().st_size if path.exists() else -1
        if found < offset + part:
            state = "is not there" if found < 0 else f"has {found} bytes, {offset + part} are needed"
            raise DataError(
                f"{node.file.filename}: dataset {node.name!r} keeps its data in {os.fsdecode(filename)!r}, and "
                f"{str(path)!r} {state}; put the file there, or start in its folder, or with HDF5_EXTFILE_PREFIX "
                "set to it"
            )
        if found >= 0:
            keys[path] = file_key_of(path)
    return keys


def _external_place(path: Path, filename: str) -> Path:
    """Where libhdf5 looks for a file of external storage: relative to the current folder, unless told otherwise."""
    return (Path(_prefix("HDF5_EXTFILE_PREFIX", path)) / filename).absolute()
