"""Verifying data: every stored chunk of a packed set, or of HDF5 files of any origin; all that is wrong is named.

A packed set has a digest beside every chunk, and a manifest that says what its files must hold. Other files have
neither: their chunks are decoded, which finds damage where a codec or a Fletcher32 sum notices it. What the kernel
still holds of the files in memory is taken from there.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.fields import Field
from hpctrain.h5.manifest import MANIFEST, field_from, read_manifest
from hpctrain.h5.packed import identity_of
from hpctrain.staging.cold.archived import SIDECAR, read_sidecar
from hpctrain.staging.verify.check import Checker, FileWork, Progress
from hpctrain.staging.verify.child import Child
from hpctrain.staging.verify.findings import Finding, VerifyReport
from hpctrain.staging.verify.look import look_at_shard, of_error
from hpctrain.staging.verify.user_files import data_files, look_at

__all__ = ["Finding", "Progress", "VerifyReport", "verify_set"]

_FILES_AHEAD: Final = 2
"""Files whose chunk tables are looked up while others are checked."""
_NOT_A_MANIFEST: Final = (KeyError, TypeError, AttributeError, ValueError, ArithmeticError, SyntaxError)
"""What comes of a manifest whose own digest is right, but whose entries are not what they should be."""


class _Look(Protocol):
    """Finds out what is to be checked in a file."""

    def __call__(self, child: Child) -> FileWork: ...


def verify_set(
    root: Path, *, decode: bool = False, threads: int = 0, progress: Progress | None = None
) -> VerifyReport:
    """Check every chunk of a packed set, or of HDF5 files (one, or those of a folder).

    `decode`: also decode chunks that have a digest. `threads` 0: all cores. `progress` is called with bytes done and
    bytes in all. What is wrong with the data is in the report, not raised. Raises `UsageError` for a path that is not
    there or holds nothing of the kind.
    """
    started_s, root = time.monotonic(), Path(root).absolute()
    report = VerifyReport(root, decode)
    manifest = _read_manifest(root, report)
    if manifest is None:
        paths = data_files(root, needed=report.sound)
        looks: list[tuple[Path, _Look]] = [(path, partial(look_at, path)) for path in paths]
    else:
        looks = list(manifest.looks())
        paths = [path for path, _ in looks]
    works: list[FileWork] = []
    with Child() as child, ThreadPoolExecutor(1, thread_name_prefix="look") as pool:
        try:
            Checker(decode, threads).run(
                _kept(_ahead(pool, child, looks), works),
                sum(map(_bytes_of, paths)),
                report,
                progress or (lambda done, total: None),
            )
        except BaseException:  # Ctrl-C, too: nobody waits for the child any more
            child.kill()
            pool.shutdown(cancel_futures=True)
            raise
    report.findings += _about_whole(root, works) if manifest is None else manifest.about_whole(works)
    report.seconds = time.monotonic() - started_s
    return report


@dataclass(frozen=True)
class _Manifest:
    """What a manifest says of its shards."""

    root: Path
    fields: dict[str, Field]
    entries: list[dict[str, Any]]
    chunk_samples: int
    num_samples: int
    identity: str

    @classmethod
    def parse(cls, root: Path, manifest: dict[str, Any]) -> _Manifest:
        """Raises one of `_NOT_A_MANIFEST` for entries of wrong types."""
        return cls(
            root,
            {name: field_from(name, entry) for name, entry in manifest["fields"].items()},
            [
                {
                    "file": Path(str(i["file"])).name,
                    "num_samples": int(i["num_samples"]),
                    "bytes": int(i["bytes"]),
                }
                for i in manifest["shards"]
            ],
            int(manifest["chunk_samples"]),
            int(manifest["num_samples"]),
            str(manifest["identity"]),
        )

    def looks(self) -> Iterator[tuple[Path, _Look]]:
        """What finds out about each shard."""
        first_sample = 0
        for entry in self.entries:
            yield self.root / entry["file"], partial(self._look, entry, first_sample)
            first_sample += entry["num_samples"]

    def _look(self, entry: dict[str, Any], first_sample: int, child: Child) -> FileWork:
        return child.call(look_at_shard, self.root, entry, self.fields, self.chunk_samples, first_sample)

    def about_whole(self, works: list[FileWork]) -> list[Finding]:
        """What is wrong with the set although each shard is what the manifest says of it."""
        path, found = self.root / MANIFEST, _about_sidecar(self.root)
        samples = sum(entry["num_samples"] for entry in self.entries)
        if samples != self.num_samples or not works:
            words = f"{samples} samples in {len(works)} shards, but it says {self.num_samples}"
            found.append(Finding(path, "structure", words))
        if any(work.findings for work in works):
            return found
        indexes = [
            sorted((part.index for part in work.parts), key=lambda index: index.dataset) for work in works
        ]
        identity = identity_of(
            (index.dataset, index.shape, index.dtype, index.digests)
            for shard in indexes
            for index in shard
            if index.digests is not None
        )
        if identity != self.identity:
            words = f"identity {self.identity}, but that of the digests beside the chunks is {identity}"
            found.append(Finding(path, "structure", words))
        return found


def _read_manifest(root: Path, report: VerifyReport) -> _Manifest | None:
    """The manifest; None where there is none, or none that can be used: that is a finding."""
    path = root / MANIFEST
    if not os.path.lexists(path):
        return None
    try:
        return _Manifest.parse(root, read_manifest(root))
    except DataError as error:
        report.findings.append(of_error(path, error))
    except StorageError as error:
        report.findings.append(of_error(path, error))
    except _NOT_A_MANIFEST as error:
        report.findings.append(Finding(path, "structure", f"not a manifest: {error!r}"))
    return None


def _ahead(pool: ThreadPoolExecutor, child: Child, looks: Iterable[tuple[Path, _Look]]) -> Iterator[FileWork]:
    """What is to be checked in each file, in order; looked up a little ahead, in one thread, which has the child."""
    waiting: deque[Future[FileWork]] = deque()
    for path, look in looks:
        waiting.append(pool.submit(_looked, path, look, child))
        if len(waiting) > _FILES_AHEAD:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _kept(files: Iterator[FileWork], works: list[FileWork]) -> Iterator[FileWork]:
    for work in files:
        works.append(work)
        yield work


def _looked(path: Path, look: _Look, child: Child) -> FileWork:
    try:
        return look(child)
    except (DataError, StorageError) as error:  # the child could not take it
        return FileWork(path, findings=[of_error(path, error)])


def _about_whole(root: Path, works: list[FileWork]) -> list[Finding]:
    """A packed set whose manifest is not there."""
    manifest = root / MANIFEST
    if not root.is_dir() or os.path.lexists(manifest) or not any(work.is_packed for work in works):
        return []
    words = f"there is no such file, but the files of {root} have digests, as those of a packed set do"
    return [Finding(manifest, "missing", words)]


def _about_sidecar(root: Path) -> list[Finding]:
    """What is wrong with the file beside an archived set."""
    try:
        read_sidecar(root)
    except (DataError, StorageError) as error:
        return [of_error(root / SIDECAR, error)]
    return []


def _bytes_of(path: Path) -> int:
    """Its size; 0 where it is not there: that is found when it is looked at."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
