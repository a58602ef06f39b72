"""A mirror: a sparse copy of a packed set's shards on the node, and the map of which chunks are present.

The shard files have the size and the offsets of the shared ones, so a chunk lies at the same place in both; the map is
one byte per stored chunk, written after the chunk. Ranks of a node share the mirror through the file system alone:
two that write the same chunk write the same bytes. The map is a hint, never a proof: the digest of every chunk is
checked whenever it is read (`hpctrain.staging.source`), so a map that outran its data after a power cut costs one more
read of the shared file.

Nobody else may plant chunks: directories are made 0700, opened without following links, and their owner and mode are
checked on the open descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from hpctrain.errors import ConfigError, StorageError
from hpctrain.h5.chunks import Allocate, fresh, pread_into
from hpctrain.h5.filters import Buffer
from hpctrain.h5.index import ChunkIndex
from hpctrain.h5.packed import PackedSet

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Mirror:
    """The mirror of one packed set under `directory` (on the node's SSD); made where it does not exist.

    Raises `ConfigError` where the directory belongs to somebody else or others may write to it, and `StorageError`
    where it cannot be made or opened.
    """

    def __init__(self, directory: Path, packed: PackedSet) -> None:
        self._slots = _slot_table(packed)
        self.num_chunks = sum(count for _, count in self._slots.values())
        self._files: dict[Path, int] = {}
        self._map = -1
        try:
            self._open(directory, packed)
        except OSError as error:
            self.close()
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"staging.dir = {directory}: {error.strerror}; choose another directory"
            ) from error
        self.path = directory / _user_folder() / packed.identity

    def has(self, index: ChunkIndex, chunk: int) -> bool:
        """Whether the map says that the chunk is present."""
        return os.pread(self._map, 1, self._slot(index, chunk)) == b"\1"

    def read(self, index: ChunkIndex, chunk: int, allocate: Allocate = fresh) -> Buffer:
        """The bytes at the chunk's place; not verified, short where the file is damaged. Raises `OSError`."""
        stored = allocate(int(index.sizes[chunk]))
        done = pread_into(self._files[index.path], stored, int(index.offsets[chunk]))
        return stored[:done].data

    def write(self, index: ChunkIndex, chunk: int, stored: Buffer) -> None:
        """Store a verified chunk and then mark it present. Raises `OSError` (a full disk among others)."""
        view, offset = memoryview(stored), int(index.offsets[chunk])
        while len(view):
            written = os.pwrite(self._files[index.path], view, offset)
            view, offset = view[written:], offset + written
        os.pwrite(self._map, b"\1", self._slot(index, chunk))

    def forget(self, index: ChunkIndex, chunk: int) -> None:
        """Mark a chunk absent, because its bytes turned out to be damaged."""
        os.pwrite(self._map, b"\0", self._slot(index, chunk))

    def present_chunks(self) -> int:
        """How many chunks the map says are present."""
        return os.pread(self._map, self.num_chunks, 0).count(1)

    def close(self) -> None:
        """Close the files; the mirror stays on the disk for the next attempt."""
        for descriptor in [*self._files.values(), self._map]:
            if descriptor >= 0:
                os.close(descriptor)
        self._files, self._map = {}, -1

    def _slot(self, index: ChunkIndex, chunk: int) -> int:
        base, _ = self._slots[index.path, index.dataset]
        return base + chunk

    def _open(self, directory: Path, packed: PackedSet) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        base = os.open(directory, _DIRECTORY & ~os.O_NOFOLLOW)  # the user's own choice may be a link
        try:
            own = _private_directory(base, _user_folder(), directory)
            try:
                mirror = _private_directory(own, packed.identity, directory / _user_folder())
            finally:
                os.close(own)
        finally:
            os.close(base)
        try:
            self._map = _sized_file(mirror, "present.map", self.num_chunks)
            for shard in packed.shards:
                self._files[shard.path] = _sized_file(mirror, shard.path.name, shard.path.stat().st_size)
        finally:
            os.close(mirror)


def _user_folder() -> str:
    return f"hpctrain-{os.getuid()}"


def _private_directory(parent: int, name: str, shown: Path) -> int:
    """Open `name` in the directory `parent`, made 0700 if it is not there; checked by descriptor."""
    with contextlib.suppress(
        FileExistsError
    ):  # ours from an earlier attempt, or somebody else's: checked below
        os.mkdir(name, 0o700, dir_fd=parent)
    try:
        descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ConfigError(
                f"{shown / name} is a link or no directory; remove it or choose another staging.dir"
            ) from error
        raise
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(descriptor)
        raise ConfigError(
            f"{shown / name} belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}; it must belong "
            f"to uid {os.getuid()} with mode 0700, because others could plant data there: remove it or choose another "
            "staging.dir"
        )
    return descriptor


def _sized_file(directory: int, name: str, size: int) -> int:
    """Open or make a file of `size` bytes (sparse where it is new)."""
    descriptor = os.open(name, _FILE, 0o600, dir_fd=directory)
    if os.fstat(descriptor).st_size != size:
        os.ftruncate(descriptor, size)
    return descriptor


def _slot_table(packed: PackedSet) -> dict[tuple[Path, str], tuple[int, int]]:
    """For each stored dataset: its first slot in the map, and its number of chunks."""
    table, base = {}, 0
    for shard in packed.shards:
        for index in [*shard.dense.values(), *shard.flat.values()]:
            table[index.path, index.dataset] = (base, len(index.offsets))
            base += len(index.offsets)
    return table
