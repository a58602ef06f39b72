"""Made-up sets for tests of mirrors: chunks of known bytes, without a shared file."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hpctrain.h5.index import digest_of
from hpctrain.staging.mirror import Mirror
from hpctrain.staging.stored import StoredChunks
from tests.support import ROOT


def chunk_of(slot: int, size: int) -> bytes:
    """The bytes of a slot; those of no two slots are alike."""
    return np.random.default_rng(slot).bytes(size)


def made_up_set(
    sizes: Sequence[int],
    *,
    num_files: int = 1,
    has_digests: bool = True,
    gap_bytes: int = 0,
    mtime_ns: int = 1,
) -> StoredChunks:
    """A set of chunks of these sizes, dealt to the files in turn; a size below 0 is a chunk that was never written."""
    files = np.arange(len(sizes), dtype=np.int32) % num_files
    offsets, ends = np.full(len(sizes), -1, np.int64), np.full(num_files, gap_bytes, np.int64)
    for slot, size in enumerate(sizes):
        if size >= 0:
            offsets[slot] = ends[files[slot]]
            ends[files[slot]] += size + gap_bytes
    digests = [digest_of(chunk_of(slot, size)) if size > 0 else 0 for slot, size in enumerate(sizes)]
    return StoredChunks(
        identity="feed",
        paths=tuple(Path(f"/shared/part-{number}.h5") for number in range(num_files)),
        file_sizes=ends,
        file_keys=np.array([(end, mtime_ns, number) for number, end in enumerate(ends)], np.int64),
        files=files,
        offsets=offsets,
        sizes=np.maximum(sizes, 0).astype(np.int64),
        digests=np.array(digests, np.uint64) * np.uint64(has_digests),
        has_digests=has_digests,
    )


def write(mirror: Mirror, stored: StoredChunks, slot: int) -> None:
    """Write the bytes of a slot into an owned mirror."""
    content = chunk_of(slot, int(stored.sizes[slot]))
    mirror.write(slot, content, digest_of(content))


def owned(directory: Path, stored: StoredChunks, quota_bytes: int | None = None) -> Mirror:
    """A mirror, taken and adopted."""
    mirror = Mirror(directory, stored, quota_bytes)
    assert mirror.take()
    mirror.adopt("stop")
    return mirror


@contextlib.contextmanager
def python(code: str, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that runs `code`, with pipes in place of its streams; ended at the latest with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
