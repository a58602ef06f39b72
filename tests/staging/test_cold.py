"""Moves between tiers: the set is whole in one place at least, the same when it is back, and what is damaged stays."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.h5.codecs import CODECS
from hpctrain.h5.manifest import manifest_digest, read_manifest
from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.h5.packed import open_packed
from hpctrain.h5.packed_source import PackedSource
from hpctrain.h5.ragged import Ragged
from hpctrain.resilience import faults
from hpctrain.staging.cold.archived import SIDECAR, read_sidecar
from hpctrain.staging.cold.content import ContentSource
from hpctrain.staging.cold.tier import archive_set, moving, recall_set
from hpctrain.staging.verify.verification import verify_set
from tests.staging.backup.sets import was_killed
from tests.staging.one_child import one_child
from tests.support import small_arrays, small_set

NUM_SAMPLES = 420  # two shards


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with one_child():
        yield


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_set(tmp_path_factory.mktemp("original") / "set", NUM_SAMPLES, 16).root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    (tmp_path / "cold").mkdir()
    return Path(shutil.copytree(original, tmp_path / "shared" / "set"))


@pytest.fixture
def cold(root: Path) -> Path:
    return root.parents[1] / "cold"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != SIDECAR}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def inject(monkeypatch: pytest.MonkeyPatch, rules: str) -> None:
    monkeypatch.setenv(faults.VARIABLE, rules)
    faults.configure(0, 0)
    monkeypatch.delenv(faults.VARIABLE)


@pytest.fixture(autouse=True)
def _no_faults() -> Any:
    yield
    faults.configure(0, 0)


def test_there_and_back_byte_for_byte(root: Path, cold: Path) -> None:
    (root / "README").write_text("mine")
    before = files(root)
    told: list[tuple[str, int, int]] = []
    moved = archive_set(root, cold, show=lambda *args: told.append(args))
    assert (moved.target, moved.removed, moved.went_on) == (cold / "set", True, False)
    assert files(cold / "set") == before
    assert names(root.parent) == []
    assert {what for what, _, _ in told} == {"copy", "check"}
    assert max(done for what, done, _ in told if what == "copy") == sum(map(len, before.values()))
    back = recall_set(cold / "set", root)
    assert files(root) == before
    assert names(root) == sorted(before)  # no sidecar
    assert (names(cold), back.warnings) == ([], ())


def test_recompressed_it_comes_back_as_it_was(root: Path, cold: Path) -> None:
    (root / "README").write_text("mine")
    before, identity = files(root), open_packed(root).identity
    moved = archive_set(root, cold, "blosc-zstd")
    archived = open_packed(cold / "set")
    assert {field.codec for field in archived.fields.values()} == {"blosc-zstd"}
    assert moved.identity == archived.identity != identity
    assert [shard.num_samples for shard in archived.shards] == [336, 84]
    sidecar = read_sidecar(cold / "set")
    assert sidecar is not None
    assert sidecar.manifest["identity"] == identity
    assert sidecar.versions["h5py"]
    assert recall_set(cold / "set", root).identity == identity
    assert files(root) == before


@given(
    codec=st.sampled_from(CODECS),
    there=st.sampled_from(CODECS),
    num_samples=st.integers(1, 24),
    chunk_samples=st.integers(1, 12),
    shard_mib=st.sampled_from([0.0002, 0.001, 1.0]),
)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_layout_and_codec_comes_back_as_it_was(
    tmp_path: Path, codec: str, there: str, num_samples: int, chunk_samples: int, shard_mib: float
) -> None:
    root, cold = tmp_path / "set", tmp_path / "cold"
    for folder in (root, cold):
        shutil.rmtree(folder, ignore_errors=True)
    cold.mkdir()
    arrays = {**small_arrays(num_samples), "wave": np.linspace(0, 1, num_samples, dtype=np.float32)}
    pack_arrays(arrays, root, PackOptions(codec, chunk_samples, shard_mib, keep_bits=9), ("a", "b", "c"))
    before = files(root)
    archive_set(root, cold, there)
    assert recall_set(cold / "set", root).warnings == ()
    assert files(root) == before


def test_recalled_with_another_codec(root: Path, cold: Path) -> None:
    content = moving.content_digest(root, 16)
    archive_set(root, cold, keep=True)
    assert root.is_dir()
    moved = recall_set(cold / "set", root.with_name("other"), codec="gzip", keep=True)
    assert (moved.codec, moved.removed) == ("gzip", False)
    assert moving.content_digest(root.with_name("other"), 16) == content
    assert files(cold / "set") == files(root)


def test_the_content_digest_is_of_the_values_alone(root: Path, tmp_path: Path) -> None:
    wanted = moving.content_digest(root, 64)
    other = small_set(tmp_path / "other", NUM_SAMPLES, 7, codec="gzip", shard_mib=1.0).root
    assert moving.content_digest(other, 64) == wanted
    changed = small_arrays(NUM_SAMPLES)
    changed["number"][333] += 1
    pack_arrays(changed, tmp_path / "changed", PackOptions(chunk_samples=16))
    assert moving.content_digest(tmp_path / "changed", 64) != wanted
    source = ContentSource(PackedSource(root), 64)
    source.read(0, 64)
    source.read(3, 70)  # no block
    assert source.digest() == wanted


def as_if_packed_by_others(archived: Path) -> str:
    """As if the set had had another identity before it was recompressed: no version here makes other bytes."""
    sidecar = read_sidecar(archived)
    assert sidecar is not None
    manifest = sidecar.manifest | {"identity": "0" * 32}
    manifest["manifest_digest"] = manifest_digest(manifest)
    versions = {"numcodecs": "0.1"}
    changed = dataclasses.replace(sidecar, manifest=manifest, versions=versions)
    (archived / SIDECAR).write_bytes(changed.to_bytes())
    return "0" * 32


def test_what_cannot_be_packed_as_it_was_is_said_and_stays(root: Path, cold: Path) -> None:
    identity, content = open_packed(root).identity, moving.content_digest(root, 16)
    archive_set(root, cold, "zstd")
    old = as_if_packed_by_others(cold / "set")
    moved = recall_set(cold / "set", root)
    (warning,) = moved.warnings
    assert f"is {identity} now and was {old}" in warning
    assert "numcodecs 0.1" in warning
    assert not moved.removed
    assert moving.content_digest(root, 16) == content
    open_packed(cold / "set")


def test_another_set_in_the_archive_is_refused(root: Path, cold: Path, tmp_path: Path) -> None:
    archive_set(root, cold, "zstd")
    sidecar = (cold / "set" / SIDECAR).read_bytes()
    shutil.rmtree(cold / "set")
    small_set(cold / "set", NUM_SAMPLES, 16, seed=1, codec="zstd")
    (cold / "set" / SIDECAR).write_bytes(sidecar)
    with pytest.raises(DataError, match=r"but was [0-9a-f]{32} when it was archived"):
        recall_set(cold / "set", root)
    assert (names(root.parent), names(cold)) == ([], ["set"])


def test_a_damaged_sidecar(root: Path, cold: Path) -> None:
    archived = archive_set(root, cold, keep=True).target
    good = (archived / SIDECAR).read_bytes()
    for content, message in (
        (b"{", "damaged"),
        (b'{"format": 1}', "damaged"),
        (good.replace(b'"codec": null', b'"codec": "gzip"'), "its digest does not match"),
        (b'{"format": "hpctrain-archived", "version": 2, "digest": ""}', "not of version 1"),
    ):
        (archived / SIDECAR).write_bytes(content)
        with pytest.raises(DataError, match=message):
            recall_set(archived, root.with_name("back"))
    assert names(root.parent) == ["set"]
    (finding,) = verify_set(archived).findings
    assert (finding.path.name, finding.kind) == (SIDECAR, "structure")


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_damaged_set_is_named_and_stays(root: Path, cold: Path, codec: str | None) -> None:
    index = open_packed(root).shards[1].dense["image"]
    for chunk in (1, 3):
        flip(index.path, int(index.offsets[chunk]))
    before = files(root)
    with pytest.raises(
        DataError, match=r"(?s)'image', chunk 1 .*samples 352 to 367.*chunk 3 .*is damaged and stays"
    ):
        archive_set(root, cold, codec)
    assert files(root) == before
    assert (names(cold), names(root.parent)) == ([], ["set"])


def test_a_copy_that_comes_out_damaged(root: Path, cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage on the way to the disk: what makes the copy be read back is where it can be done."""
    place = int(open_packed(root).shards[0].dense["image"].offsets[2])
    real = moving.forget_cached

    def forget(folder: Path) -> None:
        flip(folder / "shard-00000.h5", place)
        real(folder)

    monkeypatch.setattr(moving, "forget_cached", forget)
    before = files(root)
    with pytest.raises(StorageError, match=r"(?s)'image', chunk 2.*is damaged, but .* is not"):
        archive_set(root, cold)
    with pytest.raises(
        StorageError, match=r"(?s)'image', chunk .*the copy in .* is damaged; check that disk"
    ):
        archive_set(root, cold, "none")
    assert files(root) == before
    assert (names(cold), names(root.parent)) == ([], ["set"])


def test_a_set_replaced_meanwhile_is_not_removed(root: Path, cold: Path, tmp_path: Path) -> None:
    other = small_set(tmp_path / "other", 50, 16).root

    def replace_it(what: str, done: int, total: int) -> None:
        if what == "check" and other.exists():
            root.rename(tmp_path / "old")
            other.rename(root)

    with pytest.raises(StorageError, match="became another set or was changed while it was copied"):
        archive_set(root, cold, show=replace_it)
    assert open_packed(root).num_samples == 50
    assert open_packed(cold / "set").num_samples == NUM_SAMPLES


@pytest.mark.parametrize("name", ["notes", "folder"])
def test_what_was_added_meanwhile_is_not_removed(root: Path, cold: Path, name: str) -> None:
    def write(what: str, done: int, total: int) -> None:
        if what == "check" and name == "folder":
            (root / name).mkdir(exist_ok=True)
        elif what == "check":
            (root / name).write_text("more of mine")

    with pytest.raises(StorageError, match="or was changed while it was copied; it stays"):
        archive_set(root, cold, show=write)
    assert open_packed(root).num_samples == NUM_SAMPLES
    assert names(root.parent) == ["set"]
    if name == "folder":
        return
    assert (root / name).read_text() == "more of mine"
    with pytest.raises(
        StorageError, match=rf"{cold}/set/{name} is not a copy of it; remove {cold}/set, and run"
    ):
        archive_set(root, cold)
    shutil.rmtree(cold / "set")
    archive_set(root, cold)
    assert (cold / "set" / name).read_text() == "more of mine"


class TestBadPlaces:
    """Refused before anything is written."""

    @pytest.fixture(autouse=True)
    def _unchanged(self, root: Path, cold: Path) -> Any:
        before = files(root)
        yield
        assert files(root) == before
        assert not [name for folder in (cold, root.parent) for name in names(folder) if name.startswith(".")]

    def test_no_such_folder(self, root: Path, cold: Path) -> None:
        with pytest.raises(UsageError, match=r"nowhere: there is no such folder; make it, or mount"):
            archive_set(root, cold / "nowhere")
        with pytest.raises(UsageError, match=r"none: there is no such folder; name a packed set"):
            archive_set(root.with_name("none"), cold)
        with pytest.raises(UsageError, match="there is no such archived set"):
            recall_set(cold / "none", root.with_name("back"))
        with pytest.raises(DataError, match="is not a packed set"):
            archive_set(root.parent, cold)

    def test_it_cannot_be_written(self, root: Path) -> None:
        with pytest.raises(StorageError, match="cannot be written to"):
            archive_set(root, Path("/proc"))

    def test_places_that_are_taken_or_within_each_other(self, root: Path, cold: Path) -> None:
        (cold / "set").mkdir()
        (cold / "set" / "x").write_text("mine")
        with pytest.raises(UsageError, match=r"exists and holds no dataset.json"):
            archive_set(root, cold)
        shutil.rmtree(cold / "set")
        small_set(cold / "set", 20, 4)
        with pytest.raises(UsageError, match="exists already, as another set; remove it"):
            archive_set(root, cold)
        with pytest.raises(UsageError, match="exists already"):
            recall_set(cold / "set", root)
        with pytest.raises(UsageError, match="within each other"):
            archive_set(root, root.parent)
        with pytest.raises(UsageError, match="within each other"):
            recall_set(cold / "set", cold / "set" / "back")

    def test_what_is_no_plain_file(self, root: Path, cold: Path) -> None:
        (root.parent / "link").symlink_to(root)
        with pytest.raises(UsageError, match="is a link; name the folder it leads to"):
            archive_set(root.parent / "link", cold)
        other = small_set(root.parent / "other", 20, 4).root
        (other / "more").mkdir()
        with pytest.raises(UsageError, match="only those are moved"):
            archive_set(other, cold)

    def test_a_set_of_another_version_and_one_from_an_archive(self, root: Path, cold: Path) -> None:
        other = small_set(root.parent / "other", 20, 4).root
        manifest = read_manifest(other) | {"version": 2}
        (other / "dataset.json").write_text(
            json.dumps(manifest | {"manifest_digest": manifest_digest(manifest)})
        )
        with pytest.raises(DataError, match="version 2 of the format is unknown"):
            archive_set(other, cold)
        archived = archive_set(root, cold, keep=True).target
        (cold / "more").mkdir()
        with pytest.raises(UsageError, match="lies in an archive already"):
            archive_set(archived, cold / "more")

    def test_an_unknown_codec(self, root: Path, cold: Path) -> None:
        with pytest.raises(UsageError, match="codec 'rar' is unknown"):
            archive_set(root, cold, "rar")
        assert names(cold) == []

    def test_no_room(self, root: Path, cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the filesystem says is replaced: a small one can only be mounted by root."""
        real = os.statvfs(cold)
        few = os.statvfs_result((real.f_bsize, 4096, *real[2:4], 2, *real[5:]))
        monkeypatch.setattr(os, "statvfs", lambda path: few)
        for codec in (None, "blosc-zstd"):
            with pytest.raises(StorageError, match=r"bytes are needed, 8192 are free; nothing was written"):
                archive_set(root, cold, codec)
        assert names(cold) == []


@pytest.mark.parametrize("codec", ["none", "blosc-zstd"])
def test_the_size_of_a_recompressed_set_is_foreseen(tmp_path: Path, codec: str) -> None:
    wave = np.random.default_rng(0).integers(0, 9, (500, 256)).astype(np.float32)
    text = Ragged.from_text("some words " * (i % 90) for i in range(500))
    pack_arrays({"wave": wave, "text": text}, tmp_path / "set", PackOptions(chunk_samples=16, shard_mib=0.1))
    estimate = moving.estimated_bytes(tmp_path / "set", read_manifest(tmp_path / "set"), codec)
    (tmp_path / "cold").mkdir()
    archive_set(tmp_path / "set", tmp_path / "cold", codec)
    stored = read_manifest(tmp_path / "cold" / "set")["stored_bytes"]
    assert 0.8 * stored < estimate < 1.1 * stored


@pytest.mark.parametrize(("codec", "nth"), [(None, 1), (None, 4), (None, 6), ("zstd", 2), ("zstd", 3)])
def test_a_full_disk_leaves_nothing(
    root: Path, cold: Path, monkeypatch: pytest.MonkeyPatch, codec: str | None, nth: int
) -> None:
    before = files(root)
    inject(monkeypatch, f"enospc@archive.write:nth={nth}")
    with pytest.raises(StorageError, match="No space left"):
        archive_set(root, cold, codec)
    assert files(root) == before
    assert (names(cold), names(root.parent)) == ([], ["set"])


@pytest.mark.parametrize("verb", ["archive", "recall"])
def test_a_removal_is_not_ended_where_the_copy_is_gone(root: Path, cold: Path, verb: str) -> None:
    """Killed after the rename; then somebody takes what lies in the other place for a half copy, and removes it."""
    before, identity = files(root), archive_set(root, cold, keep=True).identity
    source, copy = (root, cold / "set") if verb == "archive" else (cold / "set", root)
    shutil.rmtree(copy)
    source.rename(source.with_name(f".set.removed-{identity}"))
    moved = archive_set(root, cold) if verb == "archive" else recall_set(cold / "set", root)
    assert (moved.went_on, files(copy)) == (False, before)
    assert names(source.parent) == []


def test_killed_anywhere_and_run_again(tmp_path: Path) -> None:
    """The whole harness kills at every write; here is a sample of it."""
    root = small_set(tmp_path / "set", 60, 16).root
    content = moving.content_digest(root, 16)
    kills = [(verb, nth) for verb, nths in (("archive", (2, 5, 8)), ("recall", (3, 6, 9))) for nth in nths]
    for kill in kills:
        move = Move(root, tmp_path / f"{kill[0]}-{kill[1]}", kill[0])
        assert was_killed(move.run, f"kill@archive.write:nth={kill[1]}"), kill
        there = [place for place in (move.source, move.target) if place.exists()]
        assert there, kill
        for place in there:
            assert moving.content_digest(place, 16) == content, kill
        move.run()
        assert moving.content_digest(move.target, 16) == content, kill
        assert [path for folder in (move.cold, move.shared) for path in folder.iterdir()] == [move.target], (
            kill
        )


class Move:
    """One of a set of its own, below `folder`."""

    def __init__(self, root: Path, folder: Path, verb: str) -> None:
        self.cold, self.shared, self.verb = folder / "cold", folder / "shared", verb
        self.cold.mkdir(parents=True)
        self.source, self.target = self.shared / "set", self.cold / "set"
        shutil.copytree(root, self.source)
        if verb == "recall":
            archive_set(self.source, self.cold, "none")
            self.source, self.target = self.target, self.source

    def run(self) -> None:
        if self.verb == "recall":
            recall_set(self.source, self.target)
        else:
            archive_set(self.source, self.cold, "none")
