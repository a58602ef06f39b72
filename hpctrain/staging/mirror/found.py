"""The mirrors on a node as a person sees them: which there are, how full, and removing them. Opens no set."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.errors import DataError, HpctrainError, StorageError, UsageError
from hpctrain.resilience.faults import fault_point
from hpctrain.staging import disk
from hpctrain.staging.mirror.byte_locks import is_locked, try_lock
from hpctrain.staging.mirror.files import INSTEAD, MAP, OWNER, PLANTED, SIZES, guarded, open_mirror
from hpctrain.staging.mirror.record import Record, boot_id
from hpctrain.staging.private import by_descriptor, open_private, open_private_file, private_path


@dataclass(frozen=True)
class MirrorStatus:
    """What a mirror holds.

    Attributes:
        identity: of its set.
        path: of the mirror.
        present_chunks, total_chunks, present_bytes, total_bytes: what is there by the map, and what could be.
        quota_bytes: of the last owner; None where the record is missing or damaged.
        is_memory: whether it takes memory of the node.
        is_owned: whether a process owns it now.
        is_of_this_boot: whether it was filled since the node was started; else its chunks are verified before use.
    """

    identity: str
    path: Path
    present_chunks: int
    total_chunks: int
    present_bytes: int
    total_bytes: int
    quota_bytes: int | None
    is_memory: bool
    is_owned: bool
    is_of_this_boot: bool


def mirrors_under(directory: Path) -> list[MirrorStatus]:
    """The mirrors of this user under a configured directory; makes nothing. Raises `ConfigError`, `StorageError`."""
    try:
        parent = open_private(directory, planted=PLANTED, instead=INSTEAD, make=False)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{directory}: cannot be read: {error.strerror or error}") from error
    found = []
    try:
        for name in sorted(os.listdir(parent)):
            if (by_descriptor(parent) / name / OWNER).is_file():  # else an unpacked environment, or a lock
                with contextlib.suppress(FileNotFoundError):  # being removed
                    found.append(_look_at(parent, private_path(directory, name)))
    except OSError as error:
        raise StorageError(f"{directory}: cannot be read: {error.strerror or error}") from error
    finally:
        os.close(parent)
    return found


def remove_mirror(path: Path) -> bool:
    """Remove a mirror that nobody owns: `path` is `DIRECTORY/hpctrain-UID/IDENTITY`; one that is gone is no error.

    Returns False, and removes nothing, where a process owns it. Killed half-way it leaves a mirror with fewer chunks,
    which can be removed again. Raises `UsageError` where there is something else, `ConfigError` and `StorageError`.
    """
    directory = path.parent.parent
    if path != private_path(directory, path.name):
        raise UsageError(f"{path} is no mirror of uid {os.getuid()}; see `hpctrain stage --status`")
    try:
        with guarded(directory, make=False) as parent:
            opened = open_mirror(parent, path, make=False)
            try:
                return _remove(parent, opened, path)
            finally:
                os.close(opened)
    except FileNotFoundError:
        return True
    except OSError as error:
        if isinstance(error, HpctrainError):
            raise
        raise StorageError(f"{path}: cannot be removed: {error.strerror or error}") from error


def _remove(parent: int, opened: int, path: Path) -> bool:
    """The map goes first, so that what is left half removed holds no chunks; the lock goes last."""
    names = os.listdir(opened)
    if OWNER not in names:
        raise UsageError(f"{path} is no mirror: it has no {OWNER}; see `hpctrain stage --status`")
    owner = open_private_file(opened, OWNER, path, make=False)
    try:
        if not try_lock(owner, 0, exclusive=True):
            return False
        for name in sorted(names, key=lambda name: (name == OWNER, name != MAP, name)):
            fault_point("staging.write")
            os.unlink(name, dir_fd=opened)
        os.rmdir(path.name, dir_fd=parent)
    finally:
        os.close(owner)
    return True


def _look_at(parent: int, path: Path) -> MirrorStatus:
    descriptor = open_mirror(parent, path, make=False)
    try:
        return _status(path, descriptor)
    finally:
        os.close(descriptor)


def _status(path: Path, descriptor: int) -> MirrorStatus:
    folder = by_descriptor(descriptor)
    try:
        record = Record.read(folder)
    except DataError:  # the next owner empties it
        record = None
    with (folder / OWNER).open("rb") as owner:
        is_owned = is_locked(owner.fileno(), 0)
    present = np.frombuffer((folder / MAP).read_bytes(), np.uint8) == 1
    sizes = np.frombuffer((folder / SIZES).read_bytes(), np.int64)
    if record is None or len(sizes) != len(present):
        sizes = np.zeros(len(present), np.int64)
    else:
        present = present | (sizes == 0)
    return MirrorStatus(
        identity=path.name,
        path=path,
        present_chunks=int(present.sum()),
        total_chunks=len(present),
        present_bytes=int(sizes[present].sum()),
        total_bytes=int(sizes.sum()),
        quota_bytes=None if record is None else record.quota_bytes,
        is_memory=disk.mount_of(descriptor).is_memory,
        is_owned=is_owned,
        is_of_this_boot=record is not None and record.boot_id == boot_id(),
    )
