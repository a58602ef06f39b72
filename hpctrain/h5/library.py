"""The libhdf5 road: rows of datasets that only libhdf5 can read, through h5py.

It does not scale: h5py lets one thread of a process into libhdf5 at a time (its lock `phil`), and decoding happens
inside. More threads wait; more processes each have their own cache and metadata. So this road is for what the parallel
one cannot read, and `hpctrain inspect` says what a repacked file would save.

While a file is open here, it is open without locks; a program that opens it too, in the same process, must do so with
`h5py.File(path, locking=False)`.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError
from hpctrain.h5.index import H5PY_ERRORS, RECOPY, file_key_of, name_bytes, open_h5

_MAX_OPEN_FILES: Final = 64


class LibraryReader:
    """Reads through h5py: one thread at a time, files opened on first use and kept open, `max_open_files` at most.

    A forked child opens the files anew: handles of libhdf5 must not be shared between processes.
    """

    def __init__(self, max_open_files: int = _MAX_OPEN_FILES) -> None:
        self._max_open_files = max_open_files
        self._lock = threading.Lock()
        self._files: OrderedDict[Path, tuple[tuple[int, int, int], h5py.File]] = OrderedDict()
        self._pid = os.getpid()

    def read(
        self, path: Path, name: str, key: tuple[int, int, int], start: int, stop: int
    ) -> npt.NDArray[Any]:
        """Rows [start, stop) of a dataset, in native byte order; of a scalar, its value (shape ()).

        `key` is that of the file when the dataset was opened (`index.file_key_of`). Raises `DataError` when the file
        was changed since, or libhdf5 cannot read the rows; `StorageError` when the file cannot be opened.
        """
        if self._pid != os.getpid():  # before the lock: another thread of the parent may have held it
            self._lock, self._files, self._pid = threading.Lock(), OrderedDict(), os.getpid()
        with self._lock:
            file = self._open(path, key)
            try:
                values = read_node(file[name_bytes(name)], start, stop)
            except H5PY_ERRORS as error:
                raise DataError(
                    f"{path}: dataset {name!r}: libhdf5 cannot read rows {start} to {stop}: {error}; {RECOPY}"
                ) from error
        return native(values)

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        with self._lock:
            while self._files:
                self._files.popitem()[1][1].close()

    def _open(self, path: Path, key: tuple[int, int, int]) -> h5py.File:
        refuse_changed(path, key)
        if path in self._files and self._files[path][0] != key:
            self._files.pop(path)[1].close()
        if path not in self._files:
            self._files[path] = key, open_h5(path, RECOPY)
        self._files.move_to_end(path)
        while len(self._files) > self._max_open_files:
            self._files.popitem(last=False)[1][1].close()
        return self._files[path][1]


def refuse_changed(path: Path, key: tuple[int, int, int]) -> None:
    """Raise `DataError` where the file is not there any more, or is another one than that of `key`."""
    try:
        found = file_key_of(path)
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file any more; {RECOPY}") from error
    if found != key:
        raise DataError(
            f"{path}: changed since this run looked at it (size, time or file are others); put the old file back, "
            "or begin a new run"
        )


def read_node(node: h5py.Dataset, start: int, stop: int) -> npt.NDArray[Any]:
    """Rows of an open dataset as they are in the file; its value where it has no rows. Raises what h5py raises."""
    if node.shape is None:
        return np.empty(0, node.dtype)
    return np.asarray(node[start:stop] if node.shape else node[()], node.dtype.base)


def native(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values in native byte order; Python objects stay as they are."""
    if values.dtype.hasobject or values.dtype.isnative:
        return values
    return values.astype(values.dtype.newbyteorder("="))


SHARED: Final = LibraryReader()
"""The reader of this process: libhdf5 has one lock for all of it, so that several would only keep more files open."""
