"""Mirrors in several processes: one owner, readers that are not evicted under, and kills at any write."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import ConfigError, StorageError
from hpctrain.resilience import faults
from hpctrain.staging.mirror import Mirror, mirrors_under, remove_mirror
from hpctrain.staging.mirror import files as mirror_files
from hpctrain.staging.mirror.byte_locks import try_lock
from hpctrain.staging.private import private_path
from tests.staging.mirrors_support import chunk_of, made_up_set, owned, python, write

DEADLINE_S = 30.0
SIZES = [5000, 70_000, 0, 4096, 300]

CHILD = f"""
import sys
from pathlib import Path
from tests.staging.mirrors_support import *
import numpy as np
sizes, directory = {SIZES}, Path(sys.argv[1])
stored = made_up_set(sizes, has_digests=False)
"""
HOLD = """
mirror = Mirror(directory, stored)
def hold(num_bytes):
    print("held", flush=True)
    sys.stdin.readline()
    return np.empty(num_bytes, np.uint8)
print(bytes(mirror.read(1, hold)) == chunk_of(1, sizes[1]), flush=True)
sys.stdin.readline()
mirror.read(1, hold)
"""
OWN = """
mirror = Mirror(directory, stored)
print(mirror.take(), flush=True)
sys.stdin.readline()
"""
READ = """
mirror, reads = Mirror(directory, stored), 0
import time
while reads < 200:
    slot = reads % len(sizes)
    found = mirror.read(slot)
    if found is not None:
        assert bytes(found) == chunk_of(slot, sizes[slot]), slot
        reads += 1
    else:
        time.sleep(0.0005)
"""
KILL_AT_EACH_WRITE = """
import itertools, os
from hpctrain.resilience import faults
from hpctrain.staging.mirror import remove_mirror
for nth in itertools.count(1):
    if os.fork() == 0:  # a whole life of a mirror, killed at its nth write
        os.environ[faults.VARIABLE] = f"kill@staging.write:nth={nth}"
        faults.configure(0, 0)
        mirror = owned(directory / str(nth), stored)
        for slot in range(len(sizes)):
            write(mirror, stored, slot)
        mirror.evict(0)
        mirror.forget(1)
        write(mirror, stored, 0)
        mirror.close()
        remove_mirror(mirror.path)
        os._exit(0)
    status = os.wait()[1]
    if os.WIFEXITED(status):
        print(os.WEXITSTATUS(status), nth)
        break
"""


@pytest.fixture
def stored():
    return made_up_set(SIZES, has_digests=False)


@pytest.fixture
def mirror(tmp_path: Path, stored) -> Iterator[Mirror]:
    made = owned(tmp_path, stored)
    yield made
    made.close()


def line_of(process: subprocess.Popen[str]) -> str:
    """What it prints next; a process that hangs is ended after a while."""
    timer = threading.Timer(DEADLINE_S, process.kill)
    timer.start()
    try:
        return process.stdout.readline().strip()
    finally:
        timer.cancel()


def go_on(process: subprocess.Popen[str]) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def test_what_a_reader_holds_is_not_evicted(tmp_path: Path, mirror, stored) -> None:
    for slot in range(len(SIZES)):
        write(mirror, stored, slot)
    with python(CHILD + HOLD, tmp_path) as reader:
        assert line_of(reader) == "held"
        assert not mirror.evict(1)
        assert mirror.present_bytes == stored.num_bytes
        assert mirror.evict(0), "others can be"
        assert bytes(mirror.read(1)) == chunk_of(1, 70_000), "readers do not exclude each other"
        go_on(reader)
        assert line_of(reader) == "True"
        assert mirror.evict(1)
        write(mirror, stored, 1)
        go_on(reader)
        assert line_of(reader) == "held"
        assert not mirror.evict(1)
        reader.kill()
        reader.wait(DEADLINE_S)
        assert mirror.evict(1), "a lock ends with its holder"


def test_what_a_thread_holds_is_not_evicted(mirror, stored) -> None:
    write(mirror, stored, 1)
    answers: list[bool] = []

    def allocate(num_bytes: int):
        answers.append(mirror.evict(1))
        assert bytes(mirror.read(1)) == chunk_of(1, 70_000)
        answers.append(mirror.evict(1))  # the other reader of this process is done, this one is not
        return np.empty(num_bytes, np.uint8)

    assert bytes(mirror.read(1, allocate)) == chunk_of(1, 70_000)
    assert answers == [False, False]
    assert mirror.evict(1)


def test_there_are_never_two_owners(tmp_path: Path, stored) -> None:
    with python(CHILD + OWN, tmp_path) as other:
        assert line_of(other) == "True"
        mirror = Mirror(tmp_path, stored)
        assert not mirror.take()
        assert not mirror.is_owner
        assert mirrors_under(tmp_path)[0].is_owned
        assert not remove_mirror(mirror.path)
    assert not mirrors_under(tmp_path)[0].is_owned, "it ended with its process"
    assert mirror.take()
    assert mirror.take(), "again is no harm"
    second = Mirror(tmp_path, stored)
    assert not second.take(), "nor within a process"
    mirror.close()
    assert second.take()
    second.close()


def test_readers_never_see_anything_wrong_while_chunks_come_and_go(tmp_path: Path, mirror, stored) -> None:
    with python(CHILD + READ, tmp_path) as one, python(CHILD + READ, tmp_path) as two:
        pick, deadline_s = random.Random(2), time.monotonic() + DEADLINE_S
        while (one.poll() is None or two.poll() is None) and time.monotonic() < deadline_s:
            slot = pick.randrange(len(SIZES))
            if not mirror.evict(slot):
                write(mirror, stored, slot)
        assert (one.poll(), two.poll()) == (0, 0)
    there = [size for slot, size in enumerate(SIZES) if mirror.has(slot)]
    assert mirror.present_bytes == sum(there), "the books balance"


def test_threads_of_the_owner_write_side_by_side(tmp_path: Path) -> None:
    stored = made_up_set([3000] * 200, num_files=3)
    mirror = owned(tmp_path, stored, quota_bytes=3000 * 150)
    refused, wrong = [], []

    def work(seed: int) -> None:
        for slot in random.Random(seed).sample(range(200), 200):
            try:
                write(mirror, stored, slot)
            except OSError:
                refused.append(slot)
                mirror.evict(seed)
            found = mirror.read(slot)
            if found is not None and bytes(found) != chunk_of(slot, 3000):
                wrong.append(slot)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not wrong
    assert refused
    assert mirror.present_bytes <= mirror.quota_bytes
    assert mirror.present_bytes == 3000 * int(mirror.present().sum())
    mirror.close()


def test_writes_under_way_count_and_are_not_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = made_up_set([3000] * 2)
    mirror = owned(tmp_path, stored, quota_bytes=5000)
    begun, go_on = threading.Event(), threading.Event()

    def write_all(*arguments) -> None:  # stands for a slow disk
        if threading.current_thread() is slow and not begun.is_set():
            begun.set()
            assert go_on.wait(DEADLINE_S)
        mirror_files.write_all(*arguments)

    monkeypatch.setattr("hpctrain.staging.mirror.mirror.write_all", write_all)
    slow = threading.Thread(target=write, args=(mirror, stored, 0))
    slow.start()
    assert begun.wait(DEADLINE_S)
    with pytest.raises(OSError, match="6000 bytes in all, and the quota is 5000"):
        write(mirror, stored, 1)
    write(mirror, stored, 0)  # the same one again
    assert not mirror.evict(0)
    go_on.set()
    slow.join(DEADLINE_S)
    assert mirror.present_bytes == 3000
    assert bytes(mirror.read(0)) == chunk_of(0, 3000)
    assert mirror.evict(0)
    mirror.close()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder where fsync costs nothing: a kill loses no page, wherever the file is."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else tmp_path) as folder:
        yield Path(folder)


def test_killed_at_any_write_nothing_wrong_is_left(memory: Path, stored) -> None:
    with python(CHILD + KILL_AT_EACH_WRITE, memory) as killed:
        output, _ = killed.communicate(timeout=DEADLINE_S)
    code, lives = map(int, output.split())
    assert code == 0
    assert lives > 25
    for nth in range(1, lives):
        mirror = owned(memory / str(nth), stored)
        for slot, size in enumerate(SIZES):
            found = mirror.read(slot)  # within one boot not even a damaged one
            assert found is None or bytes(found) == chunk_of(slot, size)
            write(mirror, stored, slot)
            assert bytes(mirror.read(slot)) == chunk_of(slot, size)
        assert mirror.present_bytes == stored.num_bytes
        mirror.close()
        assert remove_mirror(mirror.path)
        assert not mirror.path.exists()


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("action", ["eio", "enospc", "raise"])
def test_a_write_that_fails_leaves_nothing(
    mirror, stored, monkeypatch: pytest.MonkeyPatch, action: str, nth: int
) -> None:
    monkeypatch.setenv(faults.VARIABLE, f"{action}@staging.write:nth={nth}")
    faults.configure(0, 0)
    try:
        with pytest.raises((OSError, faults.InjectedFaultError)):
            write(mirror, stored, 1)
    finally:
        monkeypatch.delenv(faults.VARIABLE)
        faults.configure(0, 0)
    assert mirror.read(1) is None
    assert mirror.present_bytes == 0
    assert (mirror.path / "0.data").stat().st_blocks == 0
    write(mirror, stored, 1)
    assert bytes(mirror.read(1)) == chunk_of(1, 70_000)


def test_a_mirror_deleted_under_its_owner_goes_on(tmp_path: Path, mirror, stored) -> None:
    write(mirror, stored, 0)
    assert not mirror.is_deleted()
    for path in mirror.path.iterdir():
        path.unlink()
        assert mirror.is_deleted()
    mirror.path.rmdir()
    assert mirror.is_deleted()
    assert bytes(mirror.read(0)) == chunk_of(0, 5000)
    write(mirror, stored, 1)
    assert bytes(mirror.read(1)) == chunk_of(1, 70_000)
    assert mirror.evict(0)
    mirror.sync()
    again = owned(tmp_path, stored)  # another one, of nothing
    assert mirror.is_deleted(), "what has its name now is another one"
    assert not again.has(1)
    again.close()


def test_a_mirror_removed_while_it_was_opened_has_no_owner(tmp_path: Path, stored) -> None:
    mirror = Mirror(tmp_path, stored)
    assert remove_mirror(mirror.path)
    assert not mirror.take()
    mirror.close()


def test_a_damaged_chunk_can_be_forgotten_while_it_is_read(tmp_path: Path, mirror, stored) -> None:
    write(mirror, stored, 1)
    with python(CHILD + HOLD, tmp_path) as reader:
        assert line_of(reader) == "held"
        mirror.forget(1)
        assert mirror.read(1) is None
        write(mirror, stored, 1)
        go_on(reader)
        assert line_of(reader) == "True"


def test_nobody_waits_for_ever_for_a_stopped_process(tmp_path: Path, stored, monkeypatch) -> None:
    Mirror(tmp_path, stored).close()
    monkeypatch.setattr("hpctrain.staging.mirror.files._GUARD_TIMEOUT_S", 0.05)  # else a minute
    with (private_path(tmp_path) / "mirrors.lock").open("r+b") as other:
        assert try_lock(other.fileno(), 0, exclusive=True)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(
            StorageError, match=r"making or removing mirrors for 0.05 s; find it with `fuser .*lock`"
        ):
            Mirror(tmp_path, stored)
        with pytest.raises(StorageError, match="making or removing mirrors"):
            remove_mirror(private_path(tmp_path, "feed"))
        assert len(os.listdir("/proc/self/fd")) == before
    Mirror(tmp_path, stored).close()


def test_no_descriptor_is_left_open(tmp_path: Path, stored) -> None:
    before = len(os.listdir("/proc/self/fd"))
    mirror = owned(tmp_path, stored)
    write(mirror, stored, 0)
    mirror.read(0)
    mirrors_under(tmp_path)
    mirror.close()
    mirror.close()
    remove_mirror(mirror.path)
    private_path(tmp_path, "feed").write_text("")
    with pytest.raises(ConfigError):
        Mirror(tmp_path, stored)
    assert len(os.listdir("/proc/self/fd")) == before
