"""How fast sets are staged, verified, backed up and moved, beside `cp` of the same files."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.harness import Values
from benchmarks.reading import device_bytes, forget
from benchmarks.staging_sets import SetSpec, files_of, size_of, write_set
from benchmarks.training import BenchmarkFailed
from hpctrain.durable import fsync_path
from hpctrain.h5.packed import open_packed
from hpctrain.staging.node import NodeStaging, Place
from hpctrain.staging.owners import NEVER, Deal, Uses
from hpctrain.staging.stored import file_keys_of, stored_chunks

RATE: Final = "mb_per_s"
_MB: Final = 1e6
_DEADLINE_S: Final = 300.0
_COLD_SHARE: Final = 0.9
_SET: Final = "set"


class StagingRates:
    """Staging and `cp` of the same files to the same filesystem, each with its fsync, by turns."""

    def __init__(self, sets: dict[str, Path], folder: Path) -> None:
        self._sets, self._target = sets, folder / "target"

    def settings(self) -> dict[str, Callable[[int], Values]]:
        """What is measured, by name: of each set, from the page cache and from the disk."""
        return {
            name_of(how, chunks, state): partial(self._timed, measure, root, state == "cold")
            for chunks, root in self._sets.items()
            for state in ("warm", "cold")
            for how, measure in (("staging", _stage), ("cp", _copy))
        }

    def _timed(self, measure: Callable[[Path, Path], Values], root: Path, cold: bool, _: int) -> Values:
        """Into an empty directory; the source's files are all in the page cache, or none of them is.

        Gives nothing where no bytes came from a device though they were to.
        """
        self._target.mkdir()
        for path in files_of(root):
            if cold:
                forget(path)
            else:
                path.read_bytes()
        before = device_bytes() or 0
        try:
            found = measure(root, self._target)
        finally:
            shutil.rmtree(self._target)
        # of cp, a process of its own, it is not known: it is told by the staging beside it
        is_cold = measure is not _stage or (device_bytes() or 0) - before >= _COLD_SHARE * size_of(root)
        return found if is_cold or not cold else {}


def name_of(how: str, chunks: str, state: str) -> str:
    """Of a setting of `StagingRates`."""
    return f"{how}, {chunks} chunks, {state}"


def _stage(root: Path, target: Path) -> Values:
    """As an agent does: from the order to stage until all is there and durable. Opening the set is not counted."""
    packed = open_packed(root)
    stored = stored_chunks(packed, file_keys_of(packed))
    first = np.arange(stored.num_slots, dtype=np.int64)
    deal = Deal(np.zeros(stored.num_slots, np.int32), first, num_nodes=1)
    uses = Uses(np.zeros(stored.num_slots, np.int32), first, np.full_like(first, NEVER))
    opening_s = time.perf_counter()
    with NodeStaging(stored, [Place(target)]) as node:
        begun_s = time.perf_counter()
        node.stage(deal, 0, uses)
        if not node.join(_DEADLINE_S):
            raise BenchmarkFailed(f"{root} was not staged within {_DEADLINE_S:g} s")
        ended_s = time.perf_counter()
        status = node.status()
    if status["present_bytes"] != stored.num_bytes or status["shared_bytes"] != stored.num_bytes:
        raise BenchmarkFailed(f"{root} was not staged whole, or not once: {status}, {node.take_words()}")
    seconds = ended_s - begun_s
    return {RATE: stored.num_bytes / _MB / seconds, "seconds": seconds, "opening_s": begun_s - opening_s}


def _copy(root: Path, target: Path) -> Values:
    """`cp --reflink=never`, then fsync of each file that it made."""
    begun_s = time.perf_counter()
    subprocess.run(
        ["cp", "--reflink=never", "-r", str(root), str(target / _SET)], check=True, timeout=_DEADLINE_S
    )
    for path in files_of(target):
        fsync_path(path)
    seconds = time.perf_counter() - begun_s
    return {RATE: size_of(root) / _MB / seconds, "seconds": seconds}


class Keeping:
    """Verify, backup, restore, archive and recall of one set, and `cp -r` of it, by turns.

    The second generation of the backup has `spec.changed` other chunks than the first.
    """

    def __init__(self, spec: SetSpec, folder: Path) -> None:
        self.spec = spec
        self._folder = folder / "keeping"
        self._folder.mkdir()
        self._first = write_set(spec.changed_by(0), self._folder / "first")
        self._second = write_set(spec, self._folder / "second")

    def settings(self) -> dict[str, Callable[[int], Values]]:
        """What is measured, by name."""
        measures: dict[str, Callable[[Path], Values]] = {
            "verify": self._verify,
            "backup, restore": self._back_up,
            "archive, recall": self._archive,
            "cp -r": self._copy,
        }
        return {name: partial(self._in_place, measure) for name, measure in measures.items()}

    def _in_place(self, measure: Callable[[Path], Values], _: int) -> Values:
        place = self._folder / "place"
        place.mkdir()
        for path in files_of(self._second):
            path.read_bytes()
        try:
            return measure(place)
        finally:
            shutil.rmtree(place)
            os.sync()  # what was removed is not written back into the next measurement

    def _verify(self, place: Path) -> Values:
        from hpctrain.staging.verify.verification import verify_set

        report = verify_set(self._second)
        if not report.sound:
            raise BenchmarkFailed(f"verify finds {report.findings[:3]}")
        return {"verify_mb_per_s": report.num_bytes / _MB / report.seconds}

    def _back_up(self, place: Path) -> Values:
        """Two generations, and the newest restored. What the store grew by is counted by the files themselves, too."""
        from hpctrain.staging.backup import back_up, restore

        store = place / "store"
        full = back_up(self._first, store, _SET)
        before = size_of(store)
        changed = back_up(self._second, store, _SET)
        grown = size_of(store) - before
        restored = restore(store, _SET, place / "restored")
        _compare(place / "restored", self._second)
        set_bytes = size_of(self._second)
        return {
            "backup_mb_per_s": full.read_bytes / _MB / full.seconds,
            "backup_again_mb_per_s": changed.read_bytes / _MB / changed.seconds,
            "backup_again_s": changed.seconds,
            "restore_mb_per_s": restored.generation.num_bytes / _MB / restored.seconds,
            "added_share": changed.added_bytes / set_bytes,
            "grown_share": grown / set_bytes,
            "changed_share": self.spec.changed / self.spec.num_chunks,
        }

    def _archive(self, place: Path) -> Values:
        """To the cold tier and back, as it is (not recompressed)."""
        from hpctrain.staging.cold.tier import archive_set, recall_set

        (place / "cold").mkdir()
        shutil.copytree(self._second, place / "shared" / _SET)
        set_bytes, begun_s = size_of(self._second), time.perf_counter()
        archive_set(place / "shared" / _SET, place / "cold")
        archived_s = time.perf_counter()
        recall_set(place / "cold" / _SET, place / "back")
        recalled_s = time.perf_counter()
        _compare(place / "back", self._second)
        return {
            "archive_mb_per_s": set_bytes / _MB / (archived_s - begun_s),
            "recall_mb_per_s": set_bytes / _MB / (recalled_s - archived_s),
        }

    def _copy(self, place: Path) -> Values:
        found = _copy(self._second, place)
        return {"cp_mb_per_s": found[RATE], "cp_s": found["seconds"]}


def _compare(found: Path, right: Path) -> None:
    """Raise `BenchmarkFailed` where the data of two sets differ: a rate of wrong bytes is none."""
    for path in right.glob("*.h5"):
        if path.read_bytes() != (found / path.name).read_bytes():
            raise BenchmarkFailed(f"{found / path.name} holds other bytes than {path}")
