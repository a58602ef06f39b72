"""Staging: what is read, what is kept, and what happens when the node's disk is bad."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data.plan import Plan
from hpctrain.errors import ConfigError, DataError, StorageError
from hpctrain.h5.chunks import Allocate, fresh
from hpctrain.h5.index import ChunkIndex
from hpctrain.h5.packed import PackedSet
from hpctrain.h5.reader import FileSource, read_sample_chunk
from hpctrain.resilience import faults
from hpctrain.staging.mirror import Mirror
from hpctrain.staging.source import StagedSource
from hpctrain.staging.stager import Stager, stored_chunks
from tests.support import ROOT, small_set


@pytest.fixture
def packed(tmp_path: Path) -> PackedSet:
    return small_set(tmp_path / "shared" / "set", 503, 12)


@pytest.fixture
def source() -> Iterator[FileSource]:
    with FileSource() as files:
        yield files


class Staging:
    """A mirror with its source, its stager and the warnings."""

    def __init__(self, folder: Path, packed: PackedSet, source: FileSource) -> None:
        self.packed, self.warnings = packed, []
        self.mirror = Mirror(folder, packed)
        self.source = StagedSource(source, self.mirror, self.warnings.append)
        self.done = 0

    def stage_all(self, chunks: Iterator[int] | None = None) -> None:
        order = iter(range(len(self.packed.chunk_sizes))) if chunks is None else chunks
        stager = Stager(self.packed, self.source, order, self._count)
        assert stager.join(30), "the stager hangs"
        stager.close()

    def _count(self) -> None:
        self.done += 1

    def everything(self) -> list[dict]:
        return [
            read_sample_chunk(self.packed, self.source, chunk)
            for chunk in range(len(self.packed.chunk_sizes))
        ]


@pytest.fixture
def staging(tmp_path: Path, packed: PackedSet, source: FileSource) -> Iterator[Staging]:
    made = Staging(tmp_path / "ssd", packed, source)
    yield made
    made.mirror.close()


def same(a: list[dict], b: list[dict]) -> bool:
    return all(
        np.array_equal(x["image"], y["image"]) and np.array_equal(x["text"].values, y["text"].values)
        for x, y in zip(a, b, strict=True)
    )


def stored_bytes(packed: PackedSet) -> int:
    return sum(
        int(index.sizes.sum())
        for shard in packed.shards
        for index in [*shard.dense.values(), *shard.flat.values()]
    )


def test_once_staged_nothing_is_read_from_the_shared_file(staging: Staging, source: FileSource) -> None:
    expected = [
        read_sample_chunk(staging.packed, source, chunk) for chunk in range(len(staging.packed.chunk_sizes))
    ]
    staging.stage_all()
    assert staging.done == 1
    assert staging.source.counters.shared_bytes == stored_bytes(staging.packed)
    for shard in staging.packed.shards:
        shard.path.unlink()  # the shared file system is gone
    assert same(staging.everything(), expected)
    assert staging.source.counters.shared_bytes == stored_bytes(staging.packed)
    assert not staging.warnings


def test_before_staging_chunks_come_from_the_shared_file_and_stay(staging: Staging) -> None:
    first = staging.everything()
    again = staging.everything()
    assert same(first, again)
    assert staging.source.counters.shared_bytes == stored_bytes(staging.packed), "each chunk was read once"
    assert staging.mirror.present_chunks() == staging.mirror.num_chunks


def test_the_mirror_serves_the_next_attempt(tmp_path: Path, staging: Staging, source: FileSource) -> None:
    staging.stage_all()
    staging.mirror.close()
    later = Staging(tmp_path / "ssd", staging.packed, source)
    later.everything()
    assert later.source.counters.shared_bytes == 0
    later.mirror.close()


def test_chunks_are_staged_in_first_use_order(staging: Staging) -> None:
    plan = Plan(staging.packed.chunk_sizes, 3, 10, 4, 5)
    order = list(plan.staging_order(range(3), range(1, 3)))
    assert order[: len(plan.first_use(0, range(1, 3)))] == plan.first_use(0, range(1, 3)).tolist()
    assert len(set(order)) == len(order)
    staging.stage_all(iter(order[:4]))
    present = [
        chunk
        for chunk in range(len(staging.packed.chunk_sizes))
        if all(
            staging.mirror.has(index, stored)
            for index, stored in stored_chunks(staging.packed, chunk)
            if index.dataset == "image"
        )
    ]
    assert sorted(present) == sorted(order[:4])


def test_a_damaged_mirror_chunk_is_replaced(staging: Staging, source: FileSource) -> None:
    staging.stage_all()
    shard = staging.packed.shards[0]
    index = shard.dense["image"]
    with open(staging.mirror.path / shard.path.name, "r+b") as file:
        file.seek(int(index.offsets[2]) + 3)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))
    before = staging.source.counters.shared_bytes
    assert bytes(staging.source.read(index, 2)) == bytes(source.read(index, 2))
    assert staging.source.counters.shared_bytes - before == int(index.sizes[2])
    assert len(staging.warnings) == 1
    assert "chunk 2" in staging.warnings[0]
    staging.source.read(index, 2)
    assert staging.source.counters.shared_bytes - before == int(index.sizes[2]), "the mirror was mended"


def test_a_mirror_file_cut_short_is_read_around(staging: Staging) -> None:
    staging.stage_all()
    expected = staging.everything()
    for shard in staging.packed.shards:
        os.truncate(staging.mirror.path / shard.path.name, 100)
    assert same(staging.everything(), expected)


def test_a_map_that_outran_its_data_is_found_out(
    tmp_path: Path, packed: PackedSet, source: FileSource
) -> None:
    """After a power cut the map may say present where the data never reached the disk."""
    staging = Staging(tmp_path / "ssd", packed, source)
    (staging.mirror.path / "present.map").write_bytes(b"\1" * staging.mirror.num_chunks)
    with FileSource() as other:
        expected = [read_sample_chunk(packed, other, chunk) for chunk in range(len(packed.chunk_sizes))]
    assert same(staging.everything(), expected)
    assert staging.source.counters.damaged_chunks == staging.mirror.num_chunks
    assert len(staging.warnings) == 1
    staging.mirror.close()


def test_a_bad_shared_chunk_is_bad_source_data(staging: Staging) -> None:
    shard = staging.packed.shards[0]
    with open(shard.path, "r+b") as file:
        file.seek(int(shard.dense["image"].offsets[1]))
        file.write(b"\xff\xff\xff")
    with pytest.raises(DataError, match=shard.path.name):
        read_sample_chunk(staging.packed, staging.source, 1)


@pytest.mark.parametrize("fault", ["enospc", "eio"])
def test_a_disk_that_takes_no_more_costs_one_warning(
    fault: str, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTRAIN_FAULTS", f"{fault}@staging.write:nth=6")
    faults.configure(0, 1)
    try:
        staging.stage_all()
        staging.everything()
    finally:
        monkeypatch.delenv("HPCTRAIN_FAULTS")
        faults.configure(0, 1)
    assert len(staging.warnings) == 1
    assert "reading on from the shared file" in staging.warnings[0]
    assert staging.mirror.present_chunks() == 5
    assert staging.done == 0, "it does not say that everything is staged"


def test_a_really_full_disk(tmp_path: Path, packed: PackedSet, source: FileSource) -> None:
    """A file-size limit of the process stands in for a full disk: the kernel refuses the write (EFBIG)."""
    script = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from hpctrain.h5.packed import open_packed\n"
        "from hpctrain.h5.reader import FileSource, read_sample_chunk\n"
        "from hpctrain.staging.mirror import Mirror\n"
        "from hpctrain.staging.source import StagedSource\n"
        "packed = open_packed(Path(sys.argv[1]))\n"
        "mirror = Mirror(Path(sys.argv[2]), packed)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        "source = StagedSource(FileSource(), mirror, lambda text: print('WARNING', text))\n"
        "total = sum(len(read_sample_chunk(packed, source, c)['number']) for c in range(len(packed.chunk_sizes)))\n"
        "print('read', total)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(packed.root), str(tmp_path / "ssd")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WARNING") == 1
    assert "read 503" in done.stdout


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path, packed: PackedSet, mode: int) -> None:
    private = tmp_path / "ssd" / f"hpctrain-{os.getuid()}"
    private.mkdir(parents=True)
    private.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}"):
        Mirror(tmp_path / "ssd", packed)


def test_a_planted_link_is_refused(tmp_path: Path, packed: PackedSet) -> None:
    (tmp_path / "ssd").mkdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "ssd" / f"hpctrain-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="link"):
        Mirror(tmp_path / "ssd", packed)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a directory to somebody else")
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, packed: PackedSet) -> None:
    private = tmp_path / "ssd" / f"hpctrain-{os.getuid()}"
    private.mkdir(parents=True, mode=0o700)
    os.chown(private, 12345, 12345)
    with pytest.raises(ConfigError, match="uid 12345"):
        Mirror(tmp_path / "ssd", packed)


def test_a_staging_dir_that_cannot_be_made_names_itself(tmp_path: Path, packed: PackedSet) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"staging\.dir = .*file"):
        Mirror(tmp_path / "file" / "ssd", packed)


def test_stored_chunks_cover_ragged_rows(packed: PackedSet) -> None:
    """Each sample chunk names every flat chunk that its rows need, and no others."""
    for chunk in range(len(packed.chunk_sizes)):
        shard_number, row = packed.locate(chunk)
        shard = packed.shards[shard_number]
        index: ChunkIndex = shard.flat["text"]
        first = row * packed.chunk_samples
        begin, end = (
            shard.offsets["text"][first],
            shard.offsets["text"][first + int(packed.chunk_sizes[chunk])],
        )
        flat = [stored for found, stored in stored_chunks(packed, chunk) if found.dataset == index.dataset]
        assert flat == list(range(begin // index.chunk_shape[0], -(-end // index.chunk_shape[0])))


class UnreadableSource:
    """A shared filesystem that fails now: the error cannot be had from a healthy disk."""

    def read(self, index: ChunkIndex, chunk: int, allocate: Allocate = fresh) -> bytes:
        raise StorageError("shard-00000.h5: Input/output error")


def test_a_stager_that_fails_says_so_once(tmp_path: Path, packed: PackedSet) -> None:
    staging = Staging(tmp_path / "ssd", packed, UnreadableSource())  # type: ignore[arg-type]
    staging.stage_all()
    assert len(staging.warnings) == 1
    assert "Input/output error" in staging.warnings[0]
    assert staging.done == 0
    staging.mirror.close()
