"""What the tests of the backup store share: sets that differ in some samples, damage, and children that are killed."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.h5.packed import PackedSet, open_packed
from hpctrain.resilience import faults
from hpctrain.staging.backup import segments
from tests.support import small_arrays

NUM_SAMPLES, CHUNK_SAMPLES = 400, 8


def make_set(folder: Path, version: int = 0, shard_mib: float = 0.012) -> Path:
    """A set of two shards with fields of every kind; in each version other samples differ from version 0."""
    folder.mkdir(parents=True)
    for name, content in _packed(version, shard_mib).items():
        (folder / name).write_bytes(content)
    return folder


@functools.cache
def _packed(version: int, shard_mib: float) -> dict[str, bytes]:
    """Its files; packed once, for every test needs some."""
    arrays = small_arrays(NUM_SAMPLES)
    changed = np.arange(version, NUM_SAMPLES, 150) if version else np.zeros(0, int)
    arrays["image"][changed] = 200 + version
    arrays["number"][changed] = -1 - version
    options = PackOptions(chunk_samples=CHUNK_SAMPLES, shard_mib=shard_mib)
    with tempfile.TemporaryDirectory() as folder:
        pack_arrays(arrays, Path(folder), options, ("a", "b", "c"))
        return content_of(Path(folder))


def content_of(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def bytes_of(folder: Path) -> int:
    return sum(map(len, content_of(folder).values()))


def flip(path: Path, offset: int, length: int = 1) -> None:
    """Damage bytes."""
    content = bytearray(path.read_bytes())
    for at in range(offset, offset + length):
        content[at] ^= 0xFF
    path.write_bytes(content)


def chunk_place(packed: PackedSet, shard: int, field: str, chunk: int) -> tuple[Path, int, int]:
    """File, offset and size of a chunk."""
    index = packed.shards[shard].dense[field]
    return index.path, int(index.offsets[chunk]), int(index.sizes[chunk])


def damage_chunk(data: Path, shard: int = 0, field: str = "image", chunk: int = 3) -> tuple[Path, int]:
    """Damage a chunk; gives its file and offset."""
    path, offset, size = chunk_place(open_packed(data), shard, field, chunk)
    flip(path, offset + size // 2)
    return path, offset


def place_in_store(store: Path, content: bytes) -> tuple[Path, int]:
    """The segment that holds these bytes, and where."""
    for path in sorted((store / "segments").glob(f"*{segments.SUFFIX}")):
        at = path.read_bytes().find(content)
        if at >= 0:
            return path, at
    raise AssertionError("no segment holds it")


def was_killed(action: Callable[[], object], rule: str) -> bool:
    """Do it in a child process under a fault rule, as in `kill@backup.write:nth=3`; whether the rule killed it.

    A fork, not a new interpreter: that is a hundred times faster, and the state of this process is what is wanted.
    """
    with warnings.catch_warnings():
        # From Python 3.12 on a fork beside threads warns; the one here is pytest-timeout's, which only sleeps.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(60)  # a hang is not taken for a kill: another signal
        code = 1
        try:
            faults._rules = tuple(faults.parse_rules(rule))
            action()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False
