"""A mirror by itself: what is written is read, what is not right is found, and the books balance."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import DataError, StorageError
from hpctrain.staging.mirror import DamagedChunkError, Mirror
from hpctrain.staging.mirror import record as mirror_record
from tests.staging.mirrors_support import chunk_of, made_up_set, owned, write

SIZES = [5000, 1, 0, 70_000, -1, 4096, 300]


@pytest.fixture(params=[True, False], ids=["digests", "no digests"])
def stored(request: pytest.FixtureRequest):
    return made_up_set(SIZES, num_files=2, has_digests=request.param)


@pytest.fixture
def mirror(tmp_path: Path, stored) -> Iterator[Mirror]:
    made = owned(tmp_path, stored)
    yield made
    made.close()


def data_file(mirror: Mirror, slot: int) -> Path:
    return mirror.path / f"{slot % 2}.data"


def allocated_bytes(mirror: Mirror) -> int:
    return sum(path.stat().st_blocks * 512 for path in mirror.path.glob("*.data"))


def test_what_is_written_is_read(mirror, stored) -> None:
    for slot, size in enumerate(SIZES):
        assert mirror.has(slot) == (size <= 0)
        if size > 0:
            assert mirror.read(slot) is None
        write(mirror, stored, slot)
        assert mirror.has(slot)
        assert bytes(mirror.read(slot)) == chunk_of(slot, max(size, 0))
    assert mirror.present().all()
    assert mirror.present_bytes == stored.num_bytes


def test_bytes_lie_where_they_lie_in_the_shared_file(mirror, stored) -> None:
    write(mirror, stored, 3)
    content = data_file(mirror, 3).read_bytes()
    assert len(content) == stored.file_sizes[1]
    assert content[stored.offsets[3] :][:70_000] == chunk_of(3, 70_000)


def test_reads_into_the_buffer_given(mirror, stored) -> None:
    write(mirror, stored, 0)
    buffer = np.zeros(5000, np.uint8)
    mirror.read(0, lambda num_bytes: buffer[:num_bytes])
    assert buffer.tobytes() == chunk_of(0, 5000)


def test_the_mirror_is_there_for_the_next_attempt(tmp_path: Path, mirror, stored) -> None:
    write(mirror, stored, 0)
    mirror.close()
    later = Mirror(tmp_path, stored)
    assert later.has(0)
    assert later.present_bytes == 5000
    assert later.take()
    assert later.adopt("stop") is None
    assert later.present_bytes == 5000
    assert bytes(later.read(0)) == chunk_of(0, 5000)
    later.close()


def test_chunks_of_no_bytes_are_always_there(mirror, stored) -> None:
    for slot in (2, 4):
        mirror.forget(slot)
        assert not mirror.evict(slot)
        assert mirror.has(slot)
        assert mirror.read(slot) == b""
    assert mirror.present().nonzero()[0].tolist() == [2, 4]
    assert mirror.present_bytes == 0


def test_only_the_owner_writes(tmp_path: Path, mirror, stored) -> None:
    other = Mirror(tmp_path, stored)
    with pytest.raises(ValueError, match="only the owner"):
        write(other, stored, 0)
    for change in (other.forget, other.evict):
        with pytest.raises(ValueError, match="only the owner"):
            change(0)
    with pytest.raises(ValueError, match="only the owner"):
        other.adopt("stop")
    other.close()


def test_bytes_of_another_length_are_refused(mirror) -> None:
    with pytest.raises(ValueError, match=r"3 bytes are not those of .*part-0.h5"):
        mirror.write(0, b"abc", 1)
    assert not mirror.has(0)


def test_damaged_bytes_are_found_and_replaced(mirror, stored) -> None:
    write(mirror, stored, 3)
    with data_file(mirror, 3).open("r+b") as file:
        file.seek(stored.offsets[3] + 100)
        file.write(b"rot")
    with pytest.raises(DamagedChunkError, match=r"feed: damaged bytes for .*part-1.h5"):
        mirror.read(3)
    mirror.forget(3)
    assert mirror.read(3) is None
    assert mirror.present_bytes == 0
    write(mirror, stored, 3)
    assert bytes(mirror.read(3)) == chunk_of(3, 70_000)


def test_a_map_that_outran_its_data_is_found(mirror, stored) -> None:
    os.pwrite(mirror._files.map, b"\1", 3)  # a power cut kept the map and lost the rest
    with pytest.raises(DamagedChunkError):
        mirror.read(3)


def test_a_data_file_that_was_cut_is_found(mirror, stored) -> None:
    write(mirror, stored, 3)
    os.truncate(data_file(mirror, 3), int(stored.offsets[3]) + 10)
    with pytest.raises(DamagedChunkError):
        mirror.read(3)


@pytest.mark.parametrize("entry", [bytes(8), b"\1" * 8, b""], ids=["none", "torn", "cut"])
def test_a_digest_that_a_power_cut_spoilt_is_found(tmp_path: Path, entry: bytes) -> None:
    stored = made_up_set(SIZES, has_digests=False)
    mirror = owned(tmp_path, stored)
    write(mirror, stored, 5)
    if entry:
        os.pwrite(mirror._files.digests, entry, 8 * 5)
    else:
        os.truncate(mirror.path / "digests.u64", 8 * 5 + 3)
    with pytest.raises(DamagedChunkError):
        mirror.read(5)
    mirror.forget(5)
    write(mirror, stored, 5)
    assert bytes(mirror.read(5)) == chunk_of(5, 4096)
    mirror.close()


@pytest.mark.parametrize("name", ["present.map", "digests.u64", "0.data", "1.data"])
@pytest.mark.parametrize("length", [None, 0, 1000], ids=["gone", "cut", "longer"])
def test_a_file_of_the_wrong_size_is_made_anew(tmp_path: Path, mirror, stored, name: str, length) -> None:
    for slot in range(len(SIZES)):
        write(mirror, stored, slot)
    mirror.close()
    if length is None:
        (mirror.path / name).unlink()
    else:
        os.truncate(mirror.path / name, length)
    later = owned(tmp_path, stored)
    for slot, size in enumerate(SIZES):
        try:
            found = later.read(slot)
        except DamagedChunkError:
            later.forget(slot)
            continue
        assert found is None or bytes(found) == chunk_of(slot, max(size, 0))
    for slot, size in enumerate(SIZES):
        write(later, stored, slot)
        assert bytes(later.read(slot)) == chunk_of(slot, max(size, 0))
    assert later.present_bytes == stored.num_bytes
    later.close()


def test_without_its_map_the_data_take_no_space(tmp_path: Path, mirror, stored) -> None:
    for slot in range(len(SIZES)):
        write(mirror, stored, slot)
    mirror.close()
    (mirror.path / "present.map").unlink()
    later = Mirror(tmp_path, stored)
    assert allocated_bytes(later) == 0
    assert later.present_bytes == 0
    later.close()


def test_evicted_chunks_give_their_space_back(mirror, stored) -> None:
    for slot in range(len(SIZES)):
        write(mirror, stored, slot)
    assert allocated_bytes(mirror) >= stored.num_bytes
    for slot, size in enumerate(SIZES):
        assert mirror.evict(slot) == (size > 0)
        assert not mirror.evict(slot), "it is not there any more"
        assert mirror.read(slot) == (b"" if size <= 0 else None)
    assert mirror.present_bytes == 0
    assert allocated_bytes(mirror) == 0


def test_eviction_spares_the_neighbours(tmp_path: Path) -> None:
    stored = made_up_set([1000] * 50)
    mirror = owned(tmp_path, stored)
    for slot in range(50):
        write(mirror, stored, slot)
    for slot in range(0, 50, 3):
        assert mirror.evict(slot)
    for slot in range(50):
        found = mirror.read(slot)
        assert found is None if slot % 3 == 0 else bytes(found) == chunk_of(slot, 1000)
    mirror.close()


def test_where_no_holes_can_be_made_nothing_is_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # test_mirror_disks.py does it on a real ramfs, where root may mount one
    monkeypatch.setattr("hpctrain.staging.disk.can_punch_holes", lambda descriptor: False)
    stored = made_up_set(SIZES)
    mirror = owned(tmp_path, stored)
    write(mirror, stored, 0)
    assert not mirror.evict(0)
    assert mirror.has(0)
    mirror.forget(0)
    write(mirror, stored, 0)
    assert bytes(mirror.read(0)) == chunk_of(0, 5000)
    mirror.close()


def test_the_quota_is_never_exceeded(tmp_path: Path) -> None:
    stored = made_up_set([1000] * 5)
    mirror = owned(tmp_path, stored, quota_bytes=3500)
    assert mirror.room_bytes() == 3500
    for slot in range(3):
        write(mirror, stored, slot)
    assert mirror.room_bytes() == 500
    with pytest.raises(OSError, match=r"4000 bytes in all, and the quota is 3500") as caught:
        write(mirror, stored, 3)
    assert caught.value.errno == errno.EDQUOT
    assert not mirror.has(3)
    write(mirror, stored, 2)  # there already
    assert mirror.evict(0)
    write(mirror, stored, 3)
    assert mirror.present_bytes == 3000
    mirror.close()


def test_a_full_disk_takes_no_more_than_it_has(mirror, stored) -> None:
    write(mirror, stored, 0)
    mirror.shrink()
    assert mirror.quota_bytes == 5000
    assert mirror.room_bytes() == 0
    mirror.forget(0)
    mirror.shrink()
    assert mirror.quota_bytes == 0


# ---- what an earlier owner left


def record_of(mirror: Mirror) -> dict:
    return json.loads((mirror.path / "mirror.json").read_text())


def test_a_new_mirror_has_nothing_to_say(tmp_path: Path, stored) -> None:
    mirror = Mirror(tmp_path, stored, quota_bytes=10**6)
    assert mirror.take()
    assert mirror.adopt("stop") is None
    assert record_of(mirror) == {
        "version": 1,
        "identity": "feed",
        "boot_id": mirror_record.boot_id(),
        "file_keys": stored.file_keys.tolist(),
        "quota_bytes": 10**6,
    }
    mirror.close()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "damaged"),
        (b"{", "damaged"),
        (b"[]", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b'{"version": 1}', "damaged"),
        (b"\xff\xfe", "damaged"),
        (2, "version 2, not 1"),
        ("other", "that of another set"),
        (None, "has gone"),
    ],
    ids=["empty", "cut", "list", "deep", "lacking", "no text", "version", "identity", "gone"],
)
def test_a_mirror_whose_record_cannot_be_trusted_is_emptied(tmp_path, mirror, stored, content, words) -> None:
    write(mirror, stored, 0)
    mirror.close()
    path = mirror.path / "mirror.json"
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        key = "version" if isinstance(content, int) else "identity"
        path.write_text(json.dumps({**record_of(mirror), key: content}))
    later = Mirror(tmp_path, stored)
    assert later.take()
    assert words in later.adopt("stop")
    assert later.read(0) is None
    assert later.present_bytes == 0
    assert allocated_bytes(later) == 0
    assert later.adopt("stop") is None, "the record is right again"
    later.close()


def test_after_a_restart_of_the_node_all_is_kept_and_said(tmp_path, mirror, stored) -> None:
    write(mirror, stored, 0)
    write(mirror, stored, 3)
    mirror.close()
    (mirror.path / "mirror.json").write_text(json.dumps({**record_of(mirror), "boot_id": "another"}))
    with data_file(mirror, 3).open("r+b") as file:
        file.truncate(0)  # what the power cut lost
        file.truncate(int(stored.file_sizes[1]))
    later = Mirror(tmp_path, stored)
    assert later.take()
    assert "before the node was restarted" in later.adopt("stop")
    assert bytes(later.read(0)) == chunk_of(0, 5000)
    with pytest.raises(DamagedChunkError):
        later.read(3)
    assert later.adopt("stop") is None
    later.close()


def test_changed_files_without_digests_stop_the_run_or_are_staged_again(tmp_path: Path) -> None:
    before, after = (made_up_set(SIZES, has_digests=False, mtime_ns=time) for time in (1, 2))
    mirror = owned(tmp_path, before)
    write(mirror, before, 0)
    mirror.close()
    later = Mirror(tmp_path, after)
    with pytest.raises(DamagedChunkError):
        later.read(0)  # nobody takes bytes of the old file for those of the new one, adopted or not
    assert later.take()
    with pytest.raises(StorageError, match=r"changed since .*on_changed"):
        later.adopt("stop")
    assert "changed since it was filled: emptied" in later.adopt("restage")
    assert later.read(0) is None
    write(later, after, 0)
    assert bytes(later.read(0)) == chunk_of(0, 5000)
    reader = Mirror(tmp_path, before)  # of another job, which opened the old files
    with pytest.raises(DamagedChunkError):
        reader.read(0)
    reader.close()
    later.close()


def test_packed_files_may_be_copied_because_their_digests_tell(tmp_path: Path) -> None:
    mirror = owned(tmp_path, made_up_set(SIZES, mtime_ns=1))
    write(mirror, made_up_set(SIZES), 0)
    mirror.close()
    later = Mirror(tmp_path, made_up_set(SIZES, mtime_ns=2))
    assert later.take()
    assert later.adopt("stop") is None
    assert bytes(later.read(0)) == chunk_of(0, 5000)
    later.close()


def test_left_overs_of_a_killed_owner_are_swept(mirror, stored, tmp_path) -> None:
    left = mirror.path / ".mirror.json.tmp-1-abcd"
    left.write_text("{")
    mirror.close()
    later = owned(tmp_path, stored, quota_bytes=5)
    assert not left.exists()
    later.close()


def test_a_set_of_no_chunks(tmp_path: Path) -> None:
    mirror = owned(tmp_path, made_up_set([]))
    assert mirror.present().shape == (0,)
    assert mirror.present_bytes == 0
    mirror.sync()
    mirror.close()


def test_a_damaged_chunk_is_bad_data() -> None:
    assert issubclass(DamagedChunkError, DataError)
