"""Reads are tried again while that may help, on a file opened anew, and end in words that say how long."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import stamina

from hpctrain.errors import ConfigError, DataError, StorageError
from hpctrain.h5.chunks import FileSource, PageCache
from hpctrain.h5.dataset import open_dataset
from hpctrain.h5.filters import FilterPipeline
from hpctrain.h5.index import ChunkIndex
from hpctrain.h5.retry import MAX_TRIES, OpenFiles, is_passing, patiently

PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTRAIN_IO_PATIENCE_S", "0.3")


@pytest.fixture
def index(tmp_path: Path) -> ChunkIndex:
    """Eight chunks of a file without digests."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.arange(8 * 5000, dtype=np.uint16), chunks=(5000,))
    found = open_dataset(tmp_path / "x.h5", "x").index
    assert found is not None
    return found


def failing(numbers: list[int], then: Callable[[], Any] = lambda: "done") -> Callable[[], Any]:
    """An action that fails with these errors, one a call, before it succeeds."""
    left = iter(numbers)

    def action() -> Any:
        for number in left:
            raise OSError(number, os.strerror(number))
        return then()

    return action


class Faults:
    """`os.preadv` of the reader, failing on demand: no filesystem here returns these errors when asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._preadv, self.fails = os.preadv, lambda: 0
        self.failed: list[int] = []
        monkeypatch.setattr("hpctrain.h5.chunks.os.preadv", self)

    def __call__(self, descriptor: int, buffers: Any, offset: int) -> int:
        if number := self.fails():
            self.failed.append(number)
            raise OSError(number, os.strerror(number))
        return self._preadv(descriptor, buffers, offset)

    def fail(self, *numbers: int) -> None:
        """Fail the next calls with these."""
        left: Iterator[int] = iter(numbers)
        self.fails = lambda: next(left, 0)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


@pytest.mark.parametrize("number", PASSING)
def test_what_passes_is_tried_again(number: int) -> None:
    seen: list[int | None] = []
    action = failing([number, errno.EIO, number])
    assert patiently(action, lambda error: seen.append(error.errno)) == "done"
    assert seen == [number, errno.EIO, number]


def test_the_second_try_follows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTRAIN_IO_PATIENCE_S", "600")  # the first pause would be a second
    began_s = time.monotonic()
    assert patiently(failing([errno.ESTALE])) == "done"
    assert time.monotonic() - began_s < 0.5


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOSPC])
def test_other_errors_pass_at_once(number: int) -> None:
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        patiently(failing([number]))
    assert caught.value.strerror == os.strerror(number)
    with pytest.raises(OSError, match=os.strerror(number)):  # also as the outcome of a further try
        patiently(failing([errno.EIO, number]))


def test_patience_ends_and_the_last_error_says_after_what() -> None:
    began_s = time.monotonic()
    with pytest.raises(OSError, match=r"timed out \(\d+ tries in 0\.[3-9] s\)") as caught:
        patiently(failing([errno.EIO, *[errno.ETIMEDOUT] * 1000]))
    assert caught.value.errno == errno.ETIMEDOUT
    assert 0.3 <= time.monotonic() - began_s < 2


def test_tries_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = stamina.RetryingCaller(attempts=MAX_TRIES - 1, timeout=None, wait_initial=0, wait_jitter=0)
    monkeypatch.setattr("hpctrain.h5.retry._caller", lambda patience_s: quick)
    with pytest.raises(OSError, match=rf"\({MAX_TRIES} tries in"):
        patiently(failing([errno.EIO] * 1000))


def test_an_error_in_getting_ready_counts_as_a_try() -> None:
    ready = failing([errno.ESTALE, errno.EIO])
    assert patiently(failing([errno.ESTALE]), lambda error: ready()) == "done"


def test_no_patience_is_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTRAIN_IO_PATIENCE_S", "0")
    with pytest.raises(OSError, match=r"\(1 tries in"):
        patiently(failing([errno.EIO]))


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_patience_is_a_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HPCTRAIN_IO_PATIENCE_S", text)
    with pytest.raises(ConfigError, match="HPCTRAIN_IO_PATIENCE_S"):
        patiently(failing([errno.EIO]))


def test_nothing_is_written_for_every_try(capfd: pytest.CaptureFixture[str]) -> None:
    assert patiently(failing([errno.EIO] * 3)) == "done"
    assert capfd.readouterr() == ("", "")


def test_errors_without_a_number_do_not_pass() -> None:
    assert not is_passing(StorageError("no number"))
    assert not is_passing(ValueError(errno.EIO))


@pytest.mark.parametrize("page_cache", ["keep", "drop", "bypass"])
def test_a_chunk_is_read_in_spite_of_errors(index: ChunkIndex, faults: Faults, page_cache: PageCache) -> None:
    warnings: list[str] = []
    with FileSource(page_cache, warnings.append) as source:
        wanted = [bytes(source.read(index, chunk)) for chunk in range(8)]
        for chunk in range(8):
            faults.fail(errno.ESTALE, errno.EIO)
            assert bytes(source.read(index, chunk)) == wanted[chunk]
    assert wanted[1] == np.arange(5000, 10000, dtype=np.uint16).tobytes()
    assert len(faults.failed) == 16
    [warning] = warnings
    assert warning.startswith(f"{index.path}: Stale file handle (errno 116)")


def test_a_file_is_opened_anew(tmp_path: Path) -> None:
    """A stale handle stays stale: the further try reads what has the name now, and no descriptor is left over."""
    path, old = tmp_path / "x", tmp_path / "old"
    path.write_bytes(b"old")
    files = OpenFiles(lambda path: os.open(path, os.O_RDONLY))
    assert files.read(path, lambda file: os.pread(file, 3, 0)) == b"old"
    before = len(os.listdir("/proc/self/fd"))
    path.rename(old)
    path.write_bytes(b"new")
    fail = failing([errno.ESTALE], lambda: None)
    assert files.read(path, lambda file: fail() or os.pread(file, 3, 0)) == b"new"
    assert len(os.listdir("/proc/self/fd")) == before
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_another_file_of_that_name_is_refused(index: ChunkIndex, faults: Faults) -> None:
    """Without digests only the file's size, time and inode tell."""
    with FileSource() as source:
        source.read(index, 0)
        copy = index.path.with_name("copy")
        copy.write_bytes(index.path.read_bytes())
        copy.rename(index.path)
        source.read(index, 0)  # the old one is still open
        faults.fail(errno.ESTALE)
        with pytest.raises(DataError, match="changed since"):
            source.read(index, 0)


def test_a_file_that_is_gone_ends_it(index: ChunkIndex, faults: Faults) -> None:
    with FileSource() as source:
        source.read(index, 0)
        index.path.unlink()
        faults.fail(errno.ESTALE)
        with pytest.raises(DataError, match="no such file"):
            source.read(index, 0)


def test_an_error_that_stays_is_one_of_storage() -> None:
    """A real one: this pseudo file answers EIO wherever no memory is mapped, as at its beginning."""
    one = np.zeros(1, np.int64)
    index = ChunkIndex(
        Path("/proc/self/mem"),
        "x",
        (100,),
        np.dtype("u1"),
        (100,),
        FilterPipeline(()),
        one,
        one + 100,
        one.astype(np.uint32),
    )
    with FileSource() as source, pytest.raises(StorageError, match=r"\(\d+ tries in \d\.\d s\) \(errno 5\)"):
        source.read(index, 0)


def test_threads_that_share_a_file_do_not_cut_each_other_off(index: ChunkIndex, faults: Faults) -> None:
    chance, lock = random.Random(0), threading.Lock()

    def fails() -> int:
        with lock:
            return errno.ESTALE if chance.random() < 0.3 else 0

    before = len(os.listdir("/proc/self/fd"))
    with FileSource() as source:
        wanted = [bytes(source.read(index, chunk)) for chunk in range(8)]
        faults.fails = fails
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda chunk: bytes(source.read(index, chunk % 8)), range(400)))
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert found == wanted * 50
    assert len(faults.failed) > 50
