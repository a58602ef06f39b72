"""Verification: exactly what is bad is named, and one bad thing does not hide another."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ConfigError, DataError, UsageError
from hpctrain.h5.index import ChunkIndex
from hpctrain.h5.manifest import manifest_digest, read_manifest
from hpctrain.h5.packed import PackedSet, open_packed
from hpctrain.resilience.faults import parse_rules
from hpctrain.staging.verify import check
from hpctrain.staging.verify.check import Checker, FileWork
from hpctrain.staging.verify.child import Child
from hpctrain.staging.verify.findings import Finding, Part, VerifyReport
from hpctrain.staging.verify.look import look_at_shard
from hpctrain.staging.verify.verification import verify_set
from tests.staging.one_child import one_child
from tests.support import small_set

NUM_SAMPLES, CHUNK_SAMPLES = 600, 16


def flip(path: Path, offset: int) -> None:
    """Change one bit; again: change it back."""
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def damage(index: ChunkIndex, chunk: int, at: int = 0) -> tuple[str, str, int]:
    """Flip a bit of a chunk; gives what `places` should then have."""
    flip(index.path, int(index.offsets[chunk]) + at)
    return index.path.name, index.dataset, chunk


def places(findings: Sequence[Finding]) -> set[tuple[str, str, int | None]]:
    return {(item.path.name, item.dataset, item.chunk) for item in findings}


def indexes(packed: PackedSet) -> list[ChunkIndex]:
    return [
        index
        for shard in packed.shards
        for index in (*shard.dense.values(), *shard.flat.values(), *shard.tables.values())
    ]


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with one_child():
        yield


@pytest.fixture
def packed(shared: tuple[PackedSet, list[FileWork]], tmp_path: Path) -> PackedSet:
    return open_packed(Path(shutil.copytree(shared[0].root, tmp_path / "set")))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackedSet, list[FileWork]]:
    packed = small_set(tmp_path_factory.mktemp("verify") / "set", NUM_SAMPLES, CHUNK_SAMPLES)
    works, first = [], 0
    for entry in read_manifest(packed.root)["shards"]:
        works.append(look_at_shard(packed.root, entry, packed.fields, packed.chunk_samples, first))
        first += int(entry["num_samples"])
    return packed, works


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_exactly_the_damaged_chunks_are_named(
    shared: tuple[PackedSet, list[FileWork]], data: st.DataObject
) -> None:
    packed, works = shared
    chunks = [(index, chunk) for index in indexes(packed) for chunk in range(index.num_chunks)]
    hit = data.draw(st.lists(st.sampled_from(range(len(chunks))), unique=True, max_size=8))
    ats = [data.draw(st.integers(0, int(chunks[i][0].sizes[chunks[i][1]]) - 1)) for i in hit]
    old = check._RUN_BYTES
    check._RUN_BYTES = data.draw(st.sampled_from([1, 700, 4096, old]))
    report = VerifyReport(packed.root, decoded=False)
    try:
        wanted = {damage(*chunks[i], at) for i, at in zip(hit, ats, strict=True)}
        Checker(decode=data.draw(st.booleans()), threads=3).run(
            works, 1 << 20, report, lambda done, total: None
        )
    finally:
        check._RUN_BYTES = old
        for i, at in zip(hit, ats, strict=True):
            damage(*chunks[i], at)
    assert places(report.findings) == wanted
    assert len(report.findings) == len(wanted)
    assert report.num_chunks == len(chunks)
    assert report.num_bytes == sum(int(index.sizes.sum()) for index in indexes(packed))
    for item in report.findings:
        assert item.kind == "damaged"
        assert item.samples == samples_of(packed, item)


def samples_of(packed: PackedSet, item: Finding) -> tuple[int, int] | None:
    """By asking each sample whether a part of it lies in the chunk."""
    first, found = 0, []
    for shard in packed.shards:
        if shard.path == item.path:
            named = {index.dataset: index for index in indexes(packed) if index.path == item.path}
            rows = named[item.dataset].region(item.chunk or 0)[0]
            name = item.dataset.removesuffix("_offsets")
            for sample in range(shard.num_samples):
                needs = range(sample, sample + 1)
                if item.dataset.endswith("_offsets"):
                    needs = range(sample, sample + 2)
                elif name in shard.offsets:
                    needs = range(*shard.offsets[name][sample : sample + 2])
                if max(needs.start, rows.start) < min(needs.stop, rows.stop):
                    found.append(first + sample)
        first += shard.num_samples
    return (found[0], found[-1] + 1) if found else None


def test_all_that_is_bad_is_named(tmp_path: Path) -> None:
    packed = small_set(tmp_path / "set", 2400, CHUNK_SAMPLES)
    shards = packed.shards
    assert len(shards) >= 7
    wanted = {
        damage(shards[0].dense["image"], 3),
        damage(shards[0].tables["text"], 0),
        damage(shards[5].flat["text"], 0),
    }
    os.truncate(shards[1].path, 1000)
    shards[2].path.unlink()
    with open(shards[3].path, "ab") as file:
        file.write(b"more")
    shards[4].path.unlink()
    shards[4].path.symlink_to(shards[4].path)  # a link to itself: cannot be opened
    with h5py.File(shards[6].path, "r+") as file:
        del file["number"]
    report = verify_set(packed.root)
    by_file = {item.path.name: item for item in report.findings}
    assert wanted < places(report.findings)
    assert len(report.findings) == len(wanted) + 5
    kinds = [(by_file[shards[i].path.name].kind) for i in (1, 2, 3, 4, 6)]
    assert kinds == ["structure", "missing", "structure", "unreadable", "structure"]
    assert "truncated" in by_file[shards[1].path.name].cause
    assert "bytes, but the manifest says" in by_file[shards[3].path.name].cause
    assert "number" in str(by_file[shards[6].path.name])
    assert not any("repack" in item.cause or "copy the file anew" in item.cause for item in report.findings)
    # The values of shard 0 cannot be told apart without their offsets; what is whole in shards 3 and 6 was checked.
    assert report.num_files == len(shards)


def rewrite(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((root / "dataset.json").read_text())
    change(manifest)
    manifest["manifest_digest"] = manifest_digest(manifest)
    (root / "dataset.json").write_text(json.dumps(manifest))


def test_a_set_that_is_not_the_manifests(packed: PackedSet) -> None:
    rewrite(packed.root, lambda manifest: manifest.update(identity="0" * 32, num_samples=601))
    told: list[tuple[int, int]] = []
    report = verify_set(packed.root, decode=True, progress=lambda done, total: told.append((done, total)))
    first, second = report.findings
    assert "600 samples in 2 shards, but it says 601" in first.cause
    assert f"the digests beside the chunks is {packed.identity}" in second.cause
    assert (report.num_files, report.num_chunks) == (2, sum(index.num_chunks for index in indexes(packed)))
    assert told == sorted(told)
    assert told[-1][0] <= told[-1][1] == sum(shard.path.stat().st_size for shard in packed.shards)


def test_without_its_manifest_a_set_is_checked_all_the_same(tmp_path: Path) -> None:
    packed = small_set(tmp_path / "set", 60, CHUNK_SAMPLES)
    wanted = damage(packed.shards[0].dense["image"], 2)
    manifest = packed.root / "dataset.json"
    manifest.write_text(manifest.read_text().replace('"a"', '"b"'))
    edited = verify_set(packed.root)
    assert [item.path.name for item in edited.findings] == ["dataset.json", wanted[0]]
    assert "changed since it was packed" in edited.findings[0].cause
    manifest.unlink()
    missing = verify_set(packed.root)
    assert [(item.path.name, item.kind) for item in missing.findings] == [
        (wanted[0], "damaged"),
        ("dataset.json", "missing"),
    ]
    assert missing.num_chunks == edited.num_chunks == sum(index.num_chunks for index in indexes(packed))


def test_a_manifest_of_wrong_types(packed: PackedSet) -> None:
    for shard in packed.shards:
        shard.path.unlink()
    rewrite(packed.root, lambda manifest: manifest.update(shards=[3]))
    (finding,) = verify_set(packed.root).findings
    assert (finding.path.name, finding.kind) == ("dataset.json", "structure")


def test_a_sector_that_cannot_be_read(
    shared: tuple[PackedSet, list[FileWork]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system call is replaced: a disk with a bad sector is not to be had."""
    packed, works = shared
    index = packed.shards[0].dense["image"]
    bad = int(index.offsets[4]) + 3
    real = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        is_there = Path(os.readlink(f"/proc/self/fd/{descriptor}")) == index.path
        if is_there and offset <= bad < offset + sum(len(buffer) for buffer in buffers):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    report = VerifyReport(packed.root, decoded=False)
    begun_s = time.monotonic()
    Checker().run(works, 1, report, lambda done, total: None)
    (finding,) = report.findings
    assert (finding.kind, finding.dataset, finding.chunk) == ("unreadable", "image", 4)
    assert finding.samples == (64, 80)
    assert "errno 5" in finding.cause
    assert report.only_unreadable
    assert time.monotonic() - begun_s < 5  # no patience: there may be thousands of such sectors


def test_a_file_that_shrinks_meanwhile(packed: PackedSet) -> None:
    index = packed.shards[0].dense["number"]
    os.truncate(index.path, int(index.offsets[-1]) + 1)
    report = VerifyReport(packed.root, decoded=False)
    Checker().run([FileWork(index.path, [Part(index, "rows", 0, 600)])], 1, report, lambda done, total: None)
    assert report.findings[-1].cause == "the file ends after 1 of these bytes"
    gone = FileWork(packed.root / "gone.h5", [Part(index, "rows", 0, 600)])
    Checker().run([gone], 1, report, lambda done, total: None)
    assert report.findings[-1].cause == "cannot be opened: No such file or directory"


class TestUserFiles:
    """Without digests: what does not decode, and Fletcher32 sums."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "files"
        folder.mkdir()
        rng = np.random.default_rng(0)
        with h5py.File(folder / "b.h5", "w") as file:
            values = rng.integers(0, 9, (64, 8))
            file.create_dataset("run/gzip", data=values, chunks=(8, 8), compression="gzip")
            file.create_dataset("sums", data=values, chunks=(8, 4), fletcher32=True)
            file.create_dataset("plain", data=values)
            file.create_dataset("words", data=[b"x" * n for n in range(9)], dtype=h5py.string_dtype())
            file["scalar"] = 3
        (folder / "notes.txt").write_text("x")
        return folder

    def test_damage_is_found_where_something_notices_it(self, folder: Path) -> None:
        with h5py.File(folder / "b.h5") as file:
            spots = [
                file[name].id.get_chunk_info(number).byte_offset
                for name, number in (("run/gzip", 2), ("sums", 5))
            ]
        for spot in spots:
            flip(folder / "b.h5", spot + 9)
        report = verify_set(folder)
        assert {(item.dataset, item.chunk, item.samples) for item in report.findings} == {
            ("/run/gzip", 2, (16, 24)),
            ("/sums", 5, (16, 24)),
        }
        assert report.num_files == 1
        assert report.num_chunks == 8 + 16 + 1
        assert report.unvouched_chunks == 8 + 1
        assert "2 datasets were read by libhdf5 only" in report.notes[0]

    def test_a_file_that_is_none(self, folder: Path) -> None:
        (folder / "b.h5").write_bytes(b"nothing of the kind")
        (finding,) = verify_set(folder / "b.h5").findings
        assert (finding.kind, finding.samples) == ("structure", None)
        assert "no HDF5 signature" in finding.cause

    def test_nothing_to_verify(self, folder: Path) -> None:
        with pytest.raises(UsageError, match="there is no such file or folder"):
            verify_set(folder / "nowhere")
        (folder / "empty").mkdir()
        with pytest.raises(UsageError, match=r"holds neither dataset.json nor HDF5 files"):
            verify_set(folder / "empty")


class TestChild:
    """What a file may do to libhdf5 happens in a process of its own."""

    def test_it_may_crash_and_may_hang(self) -> None:
        with Child() as child:
            with pytest.raises(DataError, match=r"libhdf5 crashes on it \(SIGABRT\)"):
                child.call(os.abort)
            with pytest.raises(ConfigError, match="nonsense"):
                child.call(parse_rules, "nonsense")
        with Child(call_timeout_s=0.1) as child, pytest.raises(DataError, match=r"took longer than 0.1 s"):
            child.call(time.sleep, 60)


def test_a_shard_that_crashes_libhdf5_is_one_finding(
    packed: PackedSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child's call is replaced: no file is known that crashes this libhdf5 for sure."""
    real = Child.call

    def call(self: Child, function: Any, *arguments: Any) -> Any:
        if function is look_at_shard and arguments[1]["file"] == "shard-00000.h5":
            function, arguments = os.abort, ()
        return real(self, function, *arguments)

    monkeypatch.setattr(Child, "call", call)
    wanted = damage(packed.shards[1].dense["label"], 0)
    first, second = verify_set(packed.root).findings
    assert "SIGABRT" in first.cause
    assert places([second]) == {wanted}
