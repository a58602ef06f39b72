"""The libhdf5 road: one thread at a time, nothing shared with a child, and no file that was changed."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest

from hpctrain.errors import DataError
from hpctrain.h5.dataset import Dataset, open_dataset
from hpctrain.h5.index import file_key_of
from hpctrain.h5.library import SHARED, LibraryReader
from tests.h5.user_files import write

VALUES = np.arange(600, dtype=">i4").reshape(100, 6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "x.h5", x=(VALUES, {"chunks": (7, 4), **hdf5plugin.BZip2()}))


def read(reader: LibraryReader, path: Path, start: int, stop: int) -> np.ndarray:
    return reader.read(path, "x", file_key_of(path), start, stop)


def test_rows_in_native_byte_order_from_many_threads(path: Path) -> None:
    reader = LibraryReader()
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda start: read(reader, path, start, start + 3), range(90)))
    for start, found in enumerate(rows):
        assert found.dtype == np.dtype("=i4")
        assert found.tolist() == VALUES[start : start + 3].tolist()
    reader.close()
    assert read(reader, path, 99, 100).tolist() == VALUES[99:].tolist()
    reader.close()


def test_no_more_files_are_kept_open_than_allowed(tmp_path: Path) -> None:
    reader = LibraryReader(max_open_files=2)
    paths = [write(tmp_path / f"{i}.h5", x=np.arange(i, i + 4)) for i in range(5)]
    for _ in range(2):
        for i, path in enumerate(paths):
            assert read(reader, path, 0, 2).tolist() == [i, i + 1]
    links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()]
    assert len([link for link in links if link.startswith(str(tmp_path))]) == 2
    reader.close()


def test_a_file_that_was_changed_or_is_gone(path: Path) -> None:
    dataset = open_dataset(path, "x")
    assert dataset.road == "libhdf5"
    assert dataset.read_rows(0, 1).tolist() == VALUES[:1].tolist()
    write(path.with_name("y.h5"), x=(VALUES + 1, {"chunks": (7, 4), **hdf5plugin.BZip2()})).rename(path)
    with pytest.raises(DataError, match="changed since this run looked at it"):
        dataset.read_rows(0, 1)
    assert open_dataset(path, "x").read_rows(0, 1).tolist() == (VALUES[:1] + 1).tolist()
    path.unlink()
    with pytest.raises(DataError, match="there is no such file any more"):
        dataset.read_rows(0, 1)
    SHARED.close()


def test_a_chunk_that_does_not_decode(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["x"].id.write_direct_chunk((7, 0), b"no bzip2")
    dataset = open_dataset(path, "x")
    assert dataset.read_rows(0, 7).tolist() == VALUES[:7].tolist()
    with pytest.raises(
        DataError, match=r"x\.h5: dataset '/x': libhdf5 cannot read rows 7 to 9: .*; copy the file anew"
    ):
        dataset.read_rows(7, 9)


def child(dataset: Dataset, rows: list[list[int]]) -> None:
    os._exit(0 if dataset.read_rows(0, 2).tolist() == rows else 1)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_opens_its_own_file(path: Path) -> None:
    dataset = open_dataset(path, "x")
    assert dataset.read_rows(0, 2).tolist() == VALUES[:2].tolist()  # the file is open in the parent
    process = multiprocessing.get_context("fork").Process(target=child, args=(dataset, VALUES[:2].tolist()))
    process.start()
    process.join(timeout=30)
    assert process.exitcode == 0
    assert dataset.read_rows(5, 6).tolist() == VALUES[5:6].tolist()
    SHARED.close()
