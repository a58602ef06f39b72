"""The programs that `staging_kills` kills: pack, backup, restore and the stager, and what must be right of each.

All work on sets of a few chunks, which are compared byte by byte with what they must be.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.staging_kills import Kind
from benchmarks.staging_sets import KIB, SetSpec, files_of, write_set
from hpctrain.cli import main as hpctrain
from hpctrain.h5.packed import open_packed
from hpctrain.staging.stored import file_keys_of, stored_chunks

SPEC: Final = SetSpec(num_chunks=24, chunk_bytes=64 * KIB, shard_mib=0.5)
OTHER: Final = SPEC.changed_by(12)
NAME: Final = "set"
_DAMAGED: Final = 3


class Pack(Kind):
    """`hpctrain pack`: the set appears whole or not at all, or takes the place of another at once."""

    point = "pack.write"
    variants = ("new", "overwrite")

    def make(self, folder: Path) -> None:
        """The samples, and what must come of them."""
        np.save(folder / "x.npy", SPEC.samples())
        _pack(folder / "x.npy", folder / "right")
        write_set(OTHER, folder / "before")

    def prepare(self, variant: str, fixture: Path, folder: Path) -> None:
        """Nothing, or another set in the place."""
        if variant == "overwrite":
            shutil.copytree(fixture / "before", folder / NAME)

    def run(self, variant: str, fixture: Path, folder: Path) -> None:
        """Pack."""
        _pack(fixture / "x.npy", folder / NAME, *(["--overwrite"] if (folder / NAME).exists() else []))

    def seen(self, variant: str, fixture: Path, folder: Path) -> str:
        """The set before, the new one, or none where there was none."""
        if variant == "new" and not (folder / NAME).exists():
            return ""
        return "" if not difference(folder / NAME, fixture / "before") else self.result("", fixture, folder)

    def result(self, variant: str, fixture: Path, folder: Path) -> str:
        """Byte by byte what an undisturbed run wrote."""
        return difference(folder / NAME, fixture / "right")


class Backup(Kind):
    """`hpctrain backup`, also with `--prune`: every generation that is listed can be restored, byte for byte."""

    point = "backup.write"
    variants = ("first", "second", "prune")

    def make(self, folder: Path) -> None:
        """Two sets, a store with the first, and one with both."""
        _two_sets(folder)
        shutil.copytree(folder / "one", folder / "both")
        hpctrain_quietly("backup", folder / "b", folder / "both", "--name", NAME)

    def prepare(self, variant: str, fixture: Path, folder: Path) -> None:
        """The store as it was before."""
        if variant != "first":
            shutil.copytree(fixture / ("one" if variant == "second" else "both"), folder / "store")

    def run(self, variant: str, fixture: Path, folder: Path) -> None:
        """Add the set "a" or "b", or keep one generation."""
        if variant == "prune":
            hpctrain(["backup", str(folder / "store"), "--prune", "1"])
        else:
            data = fixture / ("a" if variant == "first" else "b")
            hpctrain(["backup", str(data), str(folder / "store"), "--name", NAME])

    def seen(self, variant: str, fixture: Path, folder: Path) -> str:
        """All generations that are listed, and in a store that had some at least one."""
        labels = _labels(folder / "store") if (folder / "store" / "store.json").exists() else []
        if variant != "first" and not labels:
            return "no generation is left"
        return next(filter(None, (_wrong_generation(label, fixture, folder) for label in labels)), "")

    def result(self, variant: str, fixture: Path, folder: Path) -> str:
        """The newest generation is that of the set, all can be restored, and the store has no problem."""
        from hpctrain.staging.backup import check_store

        found = check_store(folder / "store").problems
        wanted = {"first": 1, "second": 2, "prune": 1}[variant]
        labels = _labels(folder / "store")
        if len(labels) < wanted or (variant == "prune" and len(labels) != 1):
            return f"the generations are {labels}"
        newest = max(labels, key=_number)
        right = difference_of_generation(newest, fixture / ("a" if variant == "first" else "b"), folder)
        return "; ".join(found) or right or self.seen(variant, fixture, folder)


class Restore(Kind):
    """`hpctrain restore` to a new place, over another set, and to repair damaged chunks in place."""

    point = "restore.write"
    variants = ("new", "overwrite", "repair")

    def make(self, folder: Path) -> None:
        """Two sets, and a store with the first."""
        _two_sets(folder)

    def prepare(self, variant: str, fixture: Path, folder: Path) -> None:
        """Nothing, another set, or the set with damaged chunks."""
        if variant == "overwrite":
            shutil.copytree(fixture / "b", folder / NAME)
        elif variant == "repair":
            shutil.copytree(fixture / "a", folder / NAME)
            _damage(folder / NAME)

    def run(self, variant: str, fixture: Path, folder: Path) -> None:
        """Restore, or repair."""
        store, target = str(fixture / "one"), str(folder / NAME)
        if variant == "repair":
            hpctrain(["restore", store, "--repair", target])
        else:
            more = ["--overwrite"] if (folder / NAME).exists() else []
            hpctrain(["restore", store, NAME, target, *more])

    def seen(self, variant: str, fixture: Path, folder: Path) -> str:
        """The set before or the new one whole; of a repair, no chunk that passes for right and is not."""
        if variant == "repair":
            return _wrong_chunks(folder / NAME, fixture / "a")
        if variant == "new" and not (folder / NAME).exists():
            return ""
        return "" if not difference(folder / NAME, fixture / "b") else self.result("", fixture, folder)

    def result(self, variant: str, fixture: Path, folder: Path) -> str:
        """Byte by byte the set that was backed up."""
        return difference(folder / NAME, fixture / "a")


def difference(found: Path, right: Path) -> str:
    """What differs between two folders in names or bytes; nothing: empty. Hidden files count."""
    if not found.is_dir():
        return f"{found.name} is not there"
    mine = {path.relative_to(found): path for path in files_of(found)}
    other = {path.relative_to(right): path for path in files_of(right)}
    if mine.keys() != other.keys():
        return f"{found.name} has the files {sorted(map(str, mine))}, not {sorted(map(str, other))}"
    differing = [str(name) for name in mine if mine[name].read_bytes() != other[name].read_bytes()]
    return f"{found.name}: other bytes in {', '.join(differing)}" if differing else ""


def difference_of_generation(label: str, right: Path, folder: Path) -> str:
    """What is wrong with a generation of the store once it is restored; nothing: empty."""
    target = folder / "restored"
    hpctrain_quietly("restore", folder / "store", label, target)
    try:
        return difference(target, right)
    finally:
        shutil.rmtree(target)


def hpctrain_quietly(*arguments: str | Path) -> None:
    """A command that must succeed; raises `RuntimeError` where it does not."""
    try:
        hpctrain([str(word) for word in arguments])
    except SystemExit as error:
        if error.code:
            raise RuntimeError(f"hpctrain {arguments[0]} ended with {error.code}") from error


def _pack(source: Path, target: Path, *more: str) -> None:
    """Raises `SystemExit` as a command line does, but where all is well."""
    hpctrain_quietly("pack", source, target, "--codec", "none", "--shard-mib", "0.5", "--threads", "2", *more)


def _two_sets(folder: Path) -> None:
    write_set(SPEC, folder / "a")
    write_set(OTHER, folder / "b")
    hpctrain_quietly("backup", folder / "a", folder / "one", "--name", NAME)


def _labels(store: Path) -> list[str]:
    from hpctrain.staging.backup import list_generations
    from hpctrain.staging.backup.store import open_store

    generations, problems = list_generations(open_store(store))
    if problems:
        raise RuntimeError(f"{problems}")
    return [generation.label for generation in generations]


def _number(label: str) -> int:
    return int(label.rpartition("@")[2])


def _wrong_generation(label: str, fixture: Path, folder: Path) -> str:
    """In these stores the first generation is of the set "a", those after it of "b"."""
    return difference_of_generation(label, fixture / ("a" if _number(label) == 1 else "b"), folder)


def _damage(root: Path) -> None:
    """Other bytes in some chunks."""
    packed = open_packed(root)
    stored = stored_chunks(packed, file_keys_of(packed))
    for number in range(_DAMAGED):
        slot = number * stored.num_slots // _DAMAGED
        with stored.paths[stored.files[slot]].open("r+b") as file:
            file.seek(int(stored.offsets[slot]) + 100)
            file.write(b"damaged")


def _wrong_chunks(root: Path, right: Path) -> str:
    """Chunks that verify and hold other bytes than the right set; and all else in its files that is other."""
    from hpctrain.h5.index import digest_of

    packed = open_packed(right)
    stored = stored_chunks(packed, file_keys_of(packed))
    for file, path in enumerate(stored.paths):
        mine = bytearray((root / path.name).read_bytes())
        other = path.read_bytes()
        for slot in np.flatnonzero(stored.files == file):
            begin, size = int(stored.offsets[slot]), int(stored.sizes[slot])
            chunk = bytes(mine[begin : begin + size])
            if digest_of(chunk) == int(stored.digests[slot]) and chunk != other[begin : begin + size]:
                return f"{stored.describe(int(slot))} verifies and is wrong"
            mine[begin : begin + size] = other[begin : begin + size]
        if mine != other:
            return f"{path.name}: other bytes outside its chunks"
    return ""


def _stager() -> Kind:
    from benchmarks.staging_kill_stager import Stager

    return Stager()


KINDS: Final[dict[str, Callable[[], Kind]]] = {
    "stager": _stager,
    "backup": Backup,
    "restore": Restore,
    "pack": Pack,
}
