"""Mirrors on real disks of other kinds: tiny, in memory, read-only, without holes. Each in a mount namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

DEADLINE_S = 60.0
PRELUDE = """
import errno, os, subprocess, sys
from pathlib import Path
from hpctrain.errors import StorageError
from hpctrain.staging.mirror import Mirror, mirrors_under, remove_mirror
from tests.staging.mirrors_support import chunk_of, made_up_set, owned, write
disk = Path(sys.argv[1])
stored = made_up_set([100_000] * 30, has_digests=False)
"""
FULL = """
mirror = owned(disk, stored)
assert 900_000 < mirror.quota_bytes <= 1 << 20
assert mirror.room_bytes() <= mirror.quota_bytes
for slot in range(5):
    write(mirror, stored, slot)
mirror.close()
again = owned(disk, stored)
assert 900_000 < again.quota_bytes <= 1 << 20, "what it holds counts as free"
assert again.room_bytes() < 550_000
again.close()
assert remove_mirror(again.path)
mirror = owned(disk, stored, quota_bytes=10**9)
assert mirror.is_memory and mirrors_under(disk)[0].is_memory
written = []
for slot in range(30):
    try:
        write(mirror, stored, slot)
        written.append(slot)
    except OSError as error:
        assert error.errno == errno.ENOSPC
        break
assert 5 < len(written) < 11 and mirror.read(len(written)) is None
assert mirror.present_bytes == 100_000 * len(written)
assert mirror.room_bytes() < 100_000
mirror.shrink()
assert mirror.room_bytes() == 0
assert mirror.evict(0) and mirror.room_bytes() == 100_000
write(mirror, stored, len(written))
for slot in written[1:] + [len(written)]:
    assert bytes(mirror.read(slot)) == chunk_of(slot, 100_000)
mirror.close()
(disk / "rest").write_bytes(b"")
with (disk / "rest").open("wb", buffering=0) as rest:
    try:
        while rest.write(bytes(4096)):
            pass
    except OSError:
        pass
again = Mirror(disk, stored)  # on the full disk
assert again.take()
print(again.adopt("stop"))
assert bytes(again.read(1)) == chunk_of(1, 100_000)
assert again.room_bytes() == 0
"""
NO_INODES = """
for number in range(100):
    try:
        (disk / str(number)).touch()
    except OSError:
        break
try:
    Mirror(disk, stored)
except StorageError as error:
    print(error)
"""
RAM = """
mirror = owned(disk, stored)
assert mirror.is_memory and mirror.quota_bytes > 1 << 20
write(mirror, stored, 0)
assert not mirror.evict(0), "ramfs has no holes"
assert bytes(mirror.read(0)) == chunk_of(0, 100_000)
mirror.forget(0)
assert mirror.read(0) is None
write(mirror, stored, 0)
assert mirror.present_bytes == 100_000
"""
READ_ONLY = """
mirror = owned(disk, stored)
write(mirror, stored, 0)
mirror.close()  # what is open for writing keeps a disk from becoming read-only
subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
try:
    Mirror(disk, stored)
except StorageError as error:
    print(error)
assert mirrors_under(disk)[0].present_chunks == 1
"""


def on_disk(folder: Path, kind: str, options: str, code: str) -> str:
    """Run code with such a filesystem mounted; skip where none can be mounted."""
    if shutil.which("unshare") is None:
        pytest.skip("no `unshare` here to mount a disk of its own with")
    folder.mkdir()
    mount = 'mount -t "$1" -o "$2" none "$0" || exit 77; shift 2; exec "$@"'
    rootless = [] if os.getuid() == 0 else ["--map-root-user"]
    command = ["unshare", *rootless, "--mount", "sh", "-c", mount, str(folder), kind, options]
    done = subprocess.run(
        [*command, sys.executable, "-W", "error", "-c", PRELUDE + code, str(folder)],
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no {kind} can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_memory_counts_as_memory_and_fills_up(tmp_path: Path) -> None:
    said = on_disk(tmp_path / "disk", "tmpfs", "size=1m", FULL)
    assert "its record cannot be written: No space left on device" in said or said == "None\n"


def test_a_disk_without_inodes(tmp_path: Path) -> None:
    said = on_disk(tmp_path / "disk", "tmpfs", "size=1m,nr_inodes=20", NO_INODES)
    assert "no mirror can be kept there: No space left on device; mend that or choose another" in said


def test_memory_without_a_limit_and_without_holes(tmp_path: Path) -> None:
    on_disk(tmp_path / "disk", "ramfs", "defaults", RAM)


def test_a_disk_that_became_read_only(tmp_path: Path) -> None:
    said = on_disk(tmp_path / "disk", "tmpfs", "size=1m", READ_ONLY)
    assert "Read-only file system; mend that or choose another" in said
