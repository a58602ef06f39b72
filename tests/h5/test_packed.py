"""Opening a packed set: what is damaged, missing or foreign is named, with the mend."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.fields import Field
from hpctrain.h5.index import read_index
from hpctrain.h5.manifest import manifest_digest
from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.h5.packed import open_packed
from hpctrain.h5.reader import FileSource, Ragged, read_sample_chunk

NUM_SAMPLES = 30


def make(root: Path, codec: str = "gzip") -> Path:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "image": rng.integers(0, 256, (NUM_SAMPLES, 4, 4, 3), dtype=np.uint8),
        "label": rng.integers(0, 2, NUM_SAMPLES),
        "text": Ragged.from_text("word " * int(n) for n in rng.integers(0, 9, NUM_SAMPLES)),
    }
    pack_arrays(
        arrays, root, PackOptions(codec=codec, chunk_samples=8, shard_mib=0.0008), classes=("cat", "dog")
    )
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make(tmp_path / "set")


def rewrite(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest as a program would that also keeps its digest right."""
    path = root / "dataset.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    manifest["manifest_digest"] = manifest_digest(manifest)
    path.write_text(json.dumps(manifest))


def test_the_set_is_what_was_packed(root: Path) -> None:
    packed = open_packed(root)
    assert (packed.num_samples, packed.chunk_samples, packed.classes) == (NUM_SAMPLES, 8, ("cat", "dog"))
    assert [shard.num_samples for shard in packed.shards] == [8, 8, 8, 6]
    assert packed.chunk_sizes.tolist() == [8, 8, 8, 6]
    assert all(shard.path.is_absolute() for shard in packed.shards)
    image, label, text = packed.fields.values()
    assert (image.name, image.kind, image.dtype, image.sample_shape) == (
        "image",
        "dense",
        np.uint8,
        (4, 4, 3),
    )
    assert isinstance(image.mean, tuple)
    assert len(image.mean) == 3
    assert (label.sample_shape, label.dtype) == ((), np.int64)
    assert text == Field("text", "ragged", np.dtype(np.uint8), (), "gzip", None, None)
    manifest = json.loads((root / "dataset.json").read_text())
    assert manifest["stored_bytes"] > 0
    assert [entry["bytes"] for entry in manifest["shards"]] == [s.path.stat().st_size for s in packed.shards]


def test_a_relative_path_opens(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    assert open_packed(Path("set")).root == root


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_a_truncated_shard(root: Path, cut: int) -> None:
    path = root / "shard-00001.h5"
    os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(
        DataError, match=r"shard-00001.h5.*(truncated|not a whole HDF5 file).*copy the file anew"
    ):
        open_packed(root)


def test_a_file_longer_than_it_should_be(root: Path) -> None:
    path = root / "shard-00001.h5"
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(DataError, match="bytes, but the manifest says"):
        open_packed(root)


@pytest.mark.parametrize("name", ["shard-00003.h5", "dataset.json"])
def test_a_missing_file(root: Path, name: str) -> None:
    (root / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: there is no such file"):
        open_packed(root)


def test_what_is_no_packed_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a packed set; make one with `hpctrain pack SRC"):
        open_packed(tmp_path)
    (tmp_path / "dataset.json").write_text('{"format": "other"}')
    with pytest.raises(DataError, match="not the manifest of a packed set"):
        open_packed(tmp_path)
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        open_packed(tmp_path)
    (tmp_path / "dataset.json").unlink()
    (tmp_path / "dataset.json").mkdir()
    with pytest.raises(StorageError, match="cannot be read"):
        open_packed(tmp_path)


def test_an_unknown_version(root: Path) -> None:
    rewrite(root, lambda manifest: manifest.update(version=2))
    with pytest.raises(
        DataError, match=r"version 2 of the format is unknown.*reads version 1; read it with a newer"
    ):
        open_packed(root)


def test_an_edited_manifest(root: Path) -> None:
    path = root / "dataset.json"
    path.write_text(path.read_text().replace('"cat"', '"cow"'))
    with pytest.raises(DataError, match="changed since it was packed"):
        open_packed(root)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "dtype": (lambda m: m["fields"]["image"].update(dtype="|i1"), "dtype uint8, but the manifest says int8"),
    "shape": (lambda m: m["fields"]["image"].update(shape=[4, 3, 4]), "shape .* but the manifest says"),
    "codec": (lambda m: m["fields"]["label"].update(codec="zstd"), "filters"),
    "chunk": (lambda m: m.update(chunk_samples=4), "chunk shape"),
    "kind": (lambda m: m["fields"]["label"].update(kind="ragged"), "label_offsets"),
    "no field": (lambda m: m["fields"].pop("label"), "identity"),
    "order": (lambda m: m["shards"].reverse(), "identity"),
    "samples": (lambda m: m.update(num_samples=31), "30 samples in 4 shards, but the manifest says 31"),
    "no shards": (lambda m: m.update(shards=[]), "0 samples in 0 shards"),
    "no entry": (lambda m: m.pop("identity"), "not a manifest of version 1"),
    "elsewhere": (lambda m: m["shards"][0].update(file="../set/x.h5"), r"set/x.h5: there is no such file"),
    "type": (lambda m: m.update(fields=[1]), "not a manifest of version 1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_does_not_fit_the_shards(root: Path, name: str) -> None:
    change, message = CHANGES[name]
    rewrite(root, change)
    with pytest.raises(DataError, match=message):
        open_packed(root)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("kind", [None, "sparse", []]),
        ("dtype", [None, 3, "<f4,,", "O"]),
        ("shape", [None, ["a"], [1.5e999], "ab"]),
        ("codec", [None, "brotli", {}]),
        ("mean", ["abc", {}, ["a"], float("nan"), [None]]),
        ("std", ["abc", {}, ["a"], float("inf"), [None]]),
        ("keep_bits", [0, -1, 1.5, 24, "9", []]),
        ("encoding", ["sound", 5, []]),
    ],
)
def test_a_field_of_wrong_types(tmp_path: Path, key: str, values: list[Any]) -> None:
    root = tmp_path / "set"
    pack_arrays({"wave": np.zeros((9, 2), np.float32)}, root)
    for value in values:
        rewrite(root, lambda manifest, value=value: manifest["fields"]["wave"].update({key: value}))
        with pytest.raises(
            DataError, match=r"dataset.json: not a manifest of version 1|but the manifest says"
        ):
            open_packed(root)


def test_a_set_packed_before_there_was_rounding(root: Path) -> None:
    for key in ("keep_bits", "encoding"):
        rewrite(root, lambda manifest, key=key: [field.pop(key) for field in manifest["fields"].values()])
    fields = open_packed(root).fields.values()
    assert {(field.keep_bits, field.encoding) for field in fields} == {(None, None)}


def test_kept_bits_are_for_floats(root: Path) -> None:
    rewrite(root, lambda manifest: manifest["fields"]["label"].update(keep_bits=3))
    with pytest.raises(DataError, match=r"not a manifest of version 1: .*keep_bits"):
        open_packed(root)


@pytest.mark.parametrize("key", ["chunk_samples", "num_samples", "shards", "classes", "identity"])
@pytest.mark.parametrize("value", ["many", 1e999, float("nan"), -1, {}, [[]], [3], "\0"])
def test_a_manifest_of_wrong_types(root: Path, key: str, value: Any) -> None:
    rewrite(root, lambda manifest: manifest.update({key: value}))
    with pytest.raises(DataError, match=r"dataset.json: |but the manifest says"):
        open_packed(root)


def test_a_manifest_nested_without_end(root: Path) -> None:
    (root / "dataset.json").write_text("[" * 200_000)
    with pytest.raises(DataError, match="not valid JSON"):
        open_packed(root)


def test_shards_of_another_set(root: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", "none")
    shutil.copy(other / "shard-00000.h5", root)
    with pytest.raises(DataError, match=r"shard-00000.h5"):
        open_packed(root)


def test_a_damaged_offsets_table_is_found_at_open(root: Path) -> None:
    index = open_packed(root).shards[0].tables["text"]
    raw = bytearray(index.path.read_bytes())
    raw[int(index.offsets[0])] ^= 1
    index.path.write_bytes(raw)
    with pytest.raises(DataError, match=r"'text_offsets', chunk 0 of 1 .*digest"):
        open_packed(root)


def contents(root: Path) -> list[Any]:
    packed = open_packed(root)
    with FileSource() as source:
        fields = [read_sample_chunk(packed, source, chunk) for chunk in range(len(packed.chunk_sizes))]
    values = [
        (name, value.values.tobytes(), value.offsets.tobytes())
        if isinstance(value, Ragged)
        else (name, value.dtype.str, value.shape, value.tobytes())
        for part in fields
        for name, value in part.items()
    ]
    return [values, packed.classes, repr(packed.fields)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    root = make(tmp_path_factory.mktemp("flip") / "set")
    return root, contents(root)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_one_flipped_byte_anywhere_is_found_or_harmless(
    shared: tuple[Path, list[Any]], data: st.DataObject
) -> None:
    """Harmless: unused bytes of HDF5's metadata, white space of the manifest."""
    root, good = shared
    path = root / data.draw(st.sampled_from(["dataset.json", "shard-00000.h5"]))
    whole = path.read_bytes()
    raw = bytearray(whole)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    message = ""
    try:
        found = contents(root)
    except DataError as error:
        message = str(error)
    finally:
        path.write_bytes(whole)
    assert (str(root) in message) if message else (found == good)


class TestIndex:
    """`read_index` on files of any origin."""

    def write(self, path: Path, **options: Any) -> Path:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.arange(100), **options)
            file.create_group("group")
        return path

    def test_digests_are_read_from_the_file(self, root: Path) -> None:
        path = root / "shard-00000.h5"
        index = read_index(path, "image")
        with h5py.File(path) as file:
            assert index.digests.tolist() == file["_digests/image"][...].tolist()
        assert index.shape == (8, 4, 4, 3)

    @pytest.mark.parametrize(
        ("dataset", "message"),
        [("x", "not a chunked dataset"), ("group", "not a chunked dataset"), ("y", "cannot be indexed.*'y'")],
    )
    def test_what_is_not_chunked(self, tmp_path: Path, dataset: str, message: str) -> None:
        with pytest.raises(DataError, match=message):
            read_index(self.write(tmp_path / "x.h5"), dataset)

    def test_a_filter_that_is_not_decoded_here(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "x.h5", chunks=(10,), **hdf5plugin.BZip2())
        with pytest.raises(DataError, match=r"filter 307 \(bzip2\) is not decoded here"):
            read_index(path, "x", np.zeros(10, np.uint64))

    def test_digests_that_do_not_fit(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "x.h5", chunks=(10,))
        with pytest.raises(DataError, match="has 10 chunks but 9 digests"):
            read_index(path, "x", np.zeros(9, np.uint64))

    def test_chunks_that_were_never_written(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file.create_dataset("x", shape=(30,), chunks=(10,), dtype="i4")[:10] = 1
        with pytest.raises(DataError, match="chunk 1 of 3 was never written"):
            read_index(tmp_path / "x.h5", "x", np.zeros(3, np.uint64))

    def test_an_absurd_shape_takes_no_memory(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file.create_dataset("x", shape=(2**60,), chunks=(10,), dtype="i4")
        with pytest.raises(DataError, match=r"chunks in [0-9]+ bytes"):
            read_index(tmp_path / "x.h5", "x", np.zeros(0, np.uint64))

    def test_what_is_no_hdf5_or_cannot_be_opened(self, tmp_path: Path) -> None:
        (tmp_path / "x.h5").write_bytes(b"not HDF5 at all" * 100)
        with pytest.raises(DataError, match="not a whole HDF5 file"):
            read_index(tmp_path / "x.h5", "x")
        with pytest.raises(DataError, match="there is no such file"):
            read_index(tmp_path / "y.h5", "x")
        (tmp_path / "loop").symlink_to("loop")
        with pytest.raises(StorageError, match="symbolic links"):
            read_index(tmp_path / "loop", "x")
