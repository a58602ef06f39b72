"""Backups of packed sets: one store, many sets, many generations, and every piece of content once.

A set is cut where its HDF5 chunks begin and end, so that a chunk that did not change is the same *object* again, in
whichever file, generation or set it lies. What lies between the chunks (HDF5's own structures, the digests) is kept
too: files are rebuilt byte for byte. borg and restic do the like for any file, but are programs, not libraries, cut
where a rolling hash says so, and cannot tell a damaged chunk from a changed one; a packed set knows its digests.

    STORE/store.json             what this directory is
    STORE/lock                   held by who writes
    STORE/segments/*.segment     objects, many to a file: a parallel filesystem bears no million small files
    STORE/sets/NAME/000001.json  a generation: its files, and the objects that they are made of

An object is named by the SHA-256 of its bytes (the processors of today have instructions for it: 1.5 GB/s a core, twice
BLAKE2b's rate). The xxh3 digests of a set vouch for its chunks, but name nothing here: who wants to can make two
chunks of one xxh3. Every backup reads all of the set and compares every chunk with its digest, so that it also tells of
damage while the store still has the right bytes.

Segments appear by a rename when they are complete and durable, a generation when all its objects are. What a killed
backup left is used by the next one, or removed by the next prune.
"""

from hpctrain.staging.backup.check import CheckReport, check_store
from hpctrain.staging.backup.create import BackupReport, back_up
from hpctrain.staging.backup.generations import Generation, list_generations
from hpctrain.staging.backup.prune import PruneReport, prune
from hpctrain.staging.backup.rebuild import RestoreReport, restore
from hpctrain.staging.backup.repair import RepairReport, repair

__all__ = [
    "BackupReport",
    "CheckReport",
    "Generation",
    "PruneReport",
    "RepairReport",
    "RestoreReport",
    "back_up",
    "check_store",
    "list_generations",
    "prune",
    "repair",
    "restore",
]
