"""Checking stored chunks on all cores: long reads in the order of the file, then digests and, where asked, decoding.

Neighbouring chunks are read at once, in runs of 2 MiB, by several threads in the order in which they lie: that is
what disks and parallel filesystems read fastest. Memory is bounded by a run per thread (or one chunk, where it is
longer). A run that cannot be read is read again chunk by chunk, so that one bad sector does not hide its neighbours.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.chunks import pread_into, verify
from hpctrain.h5.filters import FLETCHER32, Buffer
from hpctrain.h5.index import ChunkIndex
from hpctrain.h5.scratch import Scratch
from hpctrain.h5.team import in_order
from hpctrain.staging.verify.findings import Finding, Kind, Part, VerifyReport

Progress = Callable[[int, int], None]
"""Called with bytes done, and bytes in all."""

_RUN_BYTES: Final = 2 << 20
_MIN_THREADS: Final = 4
"""Also on fewer cores: while some wait for the disk, others compute."""


@dataclass
class FileWork:
    """A file to be checked: its datasets, and what was found wrong while they were looked up."""

    path: Path
    parts: list[Part] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    file_bytes: int = 0
    is_packed: bool = False
    """Whether digests lie in it."""


class _Descriptor:
    """An open file; closed when the last run that needs it is gone."""

    def __init__(self, path: Path) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a hint, not for every kind of file
            os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


@dataclass(frozen=True)
class _Run:
    """Neighbouring chunks: (number of the part, chunk, offset, stop) of each, by offset."""

    parts: list[Part]
    file: _Descriptor
    chunks: list[tuple[int, int, int, int]]

    @property
    def begin(self) -> int:
        return self.chunks[0][2]

    @property
    def num_bytes(self) -> int:
        return max(stop for _, _, _, stop in self.chunks) - self.begin


class Checker:
    """Checks files one after the other; `decode`: also chunks that have a digest."""

    def __init__(self, decode: bool = False, threads: int = 0) -> None:
        self._decode = decode
        self._threads = threads or max(len(os.sched_getaffinity(0)), _MIN_THREADS)
        self._scratch = Scratch()

    def run(self, files: Iterable[FileWork], total_bytes: int, report: VerifyReport, show: Progress) -> None:
        """Check all files, and write down in the report what comes of it. Nothing is raised for what is wrong."""
        done_bytes = 0
        with ThreadPoolExecutor(self._threads, thread_name_prefix="verify") as pool:
            try:
                runs = self._runs(files, report)
                for run, found in in_order(pool, self._check, runs, 2 * self._threads, lambda: None):
                    report.findings += found
                    report.num_chunks += len(run.chunks)
                    report.num_bytes += sum(stop - offset for _, _, offset, stop in run.chunks)
                    done_bytes = min(done_bytes + run.num_bytes, total_bytes)
                    show(done_bytes, total_bytes)
            finally:  # of an interruption, too
                pool.shutdown(cancel_futures=True)

    def _runs(self, files: Iterable[FileWork], report: VerifyReport) -> Iterator[_Run]:
        for work in files:
            report.num_files += 1
            report.notes += work.notes
            report.findings += work.findings
            report.unvouched_chunks += sum(map(_unvouched, work.parts))
            try:
                yield from _runs_of(work)
            except OSError as error:
                words = f"cannot be opened: {error.strerror}"
                report.findings.append(Finding(work.path, "unreadable", words))

    def _check(self, run: _Run) -> tuple[_Run, list[Finding]]:
        """What is wrong in a run; called in several threads."""
        buffer, done = self._scratch.bytes("run", run.num_bytes), 0
        with contextlib.suppress(OSError):  # each chunk by itself, then
            done = pread_into(run.file.number, buffer, run.begin)
        view, begin = buffer.data, run.begin
        found: list[Finding] = []
        for number, chunk, offset, stop in run.chunks:
            part = run.parts[number]
            whole = stop - begin <= done
            try:
                stored: Buffer = (
                    view[offset - begin : stop - begin] if whole else _read_alone(part.index, chunk)
                )
                verify(part.index, chunk, stored)
                if self._decode or part.index.digests is None:
                    index = part.index
                    index.decode_into(
                        chunk, stored, self._scratch.array("chunk", index.chunk_shape, index.dtype)
                    )
            except (DataError, StorageError) as error:
                kind: Kind = "damaged" if isinstance(error, DataError) else "unreadable"
                found.append(part.finding(chunk, kind, _cause(part.index, chunk, error)))
        return run, found


def _unvouched(part: Part) -> int:
    """Chunks of which neither a digest nor a Fletcher32 sum says what they should be."""
    if part.index.digests is not None or any(i.id == FLETCHER32 for i in part.index.pipeline.filters):
        return 0
    return int(np.count_nonzero(part.index.offsets >= 0))


def _runs_of(work: FileWork) -> Iterator[_Run]:
    """The chunks of a file in runs. Raises `OSError` where it cannot be opened."""
    table = _chunk_table(work.parts)
    if not len(table):
        return
    file = _Descriptor(work.path)
    bounds = [0, *(np.flatnonzero(np.diff(table[:, 2] // _RUN_BYTES)) + 1).tolist(), len(table)]
    for start, stop in itertools.pairwise(bounds):
        yield _Run(work.parts, file, [tuple(row) for row in table[start:stop].tolist()])


def _chunk_table(parts: list[Part]) -> npt.NDArray[np.int64]:
    """All chunks that were written, by offset: number of the part, chunk, offset, stop; shape (chunks, 4)."""
    columns = [np.zeros((0, 4), np.int64)]
    for number, part in enumerate(parts):
        index = part.index
        chunks = np.flatnonzero(index.offsets >= 0)
        offsets = index.offsets[chunks]
        columns.append(
            np.stack((np.full_like(chunks, number), chunks, offsets, offsets + index.sizes[chunks]), 1)
        )
    table = np.concatenate(columns)
    return table[np.argsort(table[:, 2], kind="stable")]


def _read_alone(index: ChunkIndex, chunk: int) -> Buffer:
    """One chunk, with a fresh look at the file; asked for once, or a disk with many bad sectors would take days."""
    stored = np.empty(int(index.sizes[chunk]), np.uint8)
    try:
        descriptor = os.open(index.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = pread_into(descriptor, stored, int(index.offsets[chunk]))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror} (errno {error.errno})") from error
    if done != len(stored):
        raise DataError(f"the file ends after {done} of these bytes")
    return stored.data


def _cause(index: ChunkIndex, chunk: int, error: Exception) -> str:
    """The words of an error without the place and the mend, which are said elsewhere."""
    words = str(error).removesuffix(f"; {index.mend}").removeprefix(index.describe(chunk))
    return words.removeprefix(f"{index.path}").removeprefix(": ")
