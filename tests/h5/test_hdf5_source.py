"""HDF5 files as a source: which datasets are taken, and what comes of them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError, UsageError
from hpctrain.h5 import hdf5_fields
from hpctrain.h5 import hdf5_source as module
from hpctrain.h5.blocks import BlockCache, cut, joined
from hpctrain.h5.dataset import Dataset
from hpctrain.h5.hdf5_fields import Wanted
from hpctrain.h5.hdf5_source import Hdf5Source
from hpctrain.h5.opening import open_source
from hpctrain.h5.pack import PackOptions, SourceOptions, pack_arrays, pack_path
from hpctrain.h5.packed import open_packed
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.reader import FileSource, read_sample_chunk

_survey = functools.cache(hdf5_fields.survey)


@pytest.fixture(autouse=True)
def _listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing takes a process of its own; no file here changes after its first."""
    monkeypatch.setattr(hdf5_fields, "survey", _survey)


@pytest.fixture(scope="module")
def mixed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("mixed") / "x.h5", mixed)


def write(path: Path, fill: Callable[[h5py.File], None]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        fill(file)
    return path


def all_rows(root: Path) -> dict[str, list[Any]]:
    """Every sample of a packed set, field by field."""
    packed = open_packed(root)
    rows: dict[str, list[Any]] = {name: [] for name in packed.fields}
    with FileSource() as source:
        for chunk in range(len(packed.chunk_sizes)):
            for name, values in read_sample_chunk(packed, source, chunk).items():
                rows[name] += [
                    (values.row(i) if isinstance(values, Ragged) else values[i]).tolist()
                    for i in range(len(values))
                ]
    return rows


WAVE = np.arange(50 * 6 * 4, dtype=">f4").reshape(50, 6, 4)


def mixed(file: h5py.File) -> None:
    file.create_dataset("run/wave", data=WAVE, chunks=(17, 4, 3), compression="gzip", shuffle=True)
    file["run/label"] = np.arange(50) % 3
    file["run/good"] = np.arange(50) > 20
    file["lat"] = np.arange(6.0)
    file["title"] = "a scalar"
    text = file.create_dataset("run/text", (50,), h5py.string_dtype())
    text[:] = [f"number {i}" + "ü" * (i % 3) for i in range(50)]
    file["run/fixed"] = np.array([b"ab", b"abc"] * 25)
    tokens = file.create_dataset("run/tokens", (50,), h5py.vlen_dtype(np.uint32))
    jpeg = file.create_dataset("run/jpeg", (50,), h5py.vlen_dtype(np.uint8))
    for i in range(50):
        tokens[i] = np.arange(i % 5) + 2**32 - 9
        jpeg[i] = np.arange(i % 7)
    file["run/flat"] = np.arange(100, dtype="u2")
    file["run/flat_offsets"] = np.arange(51) * 2


def expected(i: int) -> dict[str, Any]:
    return {
        "fixed": list([b"ab", b"abc"][i % 2]),
        "flat": [2 * i, 2 * i + 1],
        "good": int(i > 20),
        "jpeg": list(range(i % 7)),
        "label": i % 3,
        "text": list((f"number {i}" + "ü" * (i % 3)).encode()),
        "tokens": [2**32 - 9 + k for k in range(i % 5)],
        "wave": WAVE[i].tolist(),
    }


def test_all_datasets_that_fit_together_are_fields(mixed_file: Path, tmp_path: Path) -> None:
    report = pack_path(mixed_file, tmp_path / "set", PackOptions(chunk_samples=7))
    rows = all_rows(tmp_path / "set")
    assert list(rows) == sorted(expected(0))
    for i in range(50):
        assert {name: values[i] for name, values in rows.items()} == expected(i)
    (warning,) = report.warnings
    assert "2 datasets do not have 50 rows as the others and are left out (/lat (6,), /title ())" in warning


def test_several_files_become_shards(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        write(tmp_path / "raw" / f"{number}.h5", mixed)
    (tmp_path / "raw" / "notes.txt").write_text("x")
    report = pack_path(tmp_path / "raw", tmp_path / "set", PackOptions(chunk_samples=20, shard_mib=0.005))
    assert (report.num_samples, report.num_shards) == (150, 8)
    assert report.warnings[0] == "1 other files are left out (first: notes.txt)"
    rows = all_rows(tmp_path / "set")
    for i in (0, 49, 50, 99, 100, 149):
        assert {name: values[i] for name, values in rows.items()} == expected(i % 50)


@given(chunk=st.integers(1, 50), files=st.integers(1, 3), data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_rows_of_any_chunks(
    tmp_path_factory: pytest.TempPathFactory, chunk: int, files: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("rechunk") / "x.h5"
    write(path, lambda file: file.create_dataset("wave", data=WAVE, chunks=(chunk, 3, 4), compression="gzip"))
    source = Hdf5Source([path] * files, {"wave": Wanted("wave")})
    start = data.draw(st.integers(0, 50 * files - 1))
    stop = data.draw(st.integers(start + 1, 50 * files))
    assert np.array_equal(source.read(start, stop)["wave"], np.concatenate([WAVE] * files)[start:stop])


def test_each_chunk_of_the_source_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(file: h5py.File) -> None:
        file.create_dataset("wave", data=np.zeros((40, 30_000)), chunks=(10, 30_000), compression="gzip")

    read: list[int] = []
    real = FileSource.read

    def counting(self: FileSource, index: Any, chunk: int, *rest: Any) -> Any:
        read.append(chunk)
        return real(self, index, chunk, *rest)

    source = Hdf5Source([write(tmp_path / "x.h5", fill)], {"wave": Wanted("wave")})
    monkeypatch.setattr(FileSource, "read", counting)
    threads = [threading.Thread(target=source.read, args=(i, i + 2)) for i in range(0, 40, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(read) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["dense", "bytes", "integers"])
def test_what_is_kept_is_bounded_over_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def fill(file: h5py.File) -> None:
        if kind == "dense":
            file.create_dataset("x", data=rng.integers(0, 256, (64, 100_000), np.uint8), chunks=(8, 100_000))
            return
        element = np.dtype("i4") if kind == "integers" else np.dtype("u1")
        data = file.create_dataset("x", (64,), h5py.vlen_dtype(element))
        for i in range(64):
            data[i] = np.full(100_000 // element.itemsize, i, element)

    rng = np.random.default_rng(0)
    monkeypatch.setattr(module, "_KEPT_BYTES", 8 << 20)
    paths = [write(tmp_path / f"{number}.h5", fill) for number in range(4)]
    source = Hdf5Source(paths, {"x": Wanted("x")})
    read: list[str] = []
    real = Dataset.read_rows

    def counting(self: Dataset, *rest: Any) -> Any:
        read.append(self.path.name)
        return real(self, *rest)

    monkeypatch.setattr(Dataset, "read_rows", counting)
    for start in [*range(0, 256, 8), 248, 0]:
        source.read(start, start + 8)
    assert read.count("3.h5") == (8 if kind == "dense" else 1)
    assert read[-1] == "0.h5"  # it had to make room: all files hold 25 MiB


def test_named_fields(mixed_file: Path) -> None:
    source = open_source(mixed_file, SourceOptions(fields=("u=/run/wave", "run/label", "words=/run/flat")))
    assert {name: field.kind for name, field in source.fields.items()} == {
        "u": "dense",
        "label": "dense",
        "words": "ragged",
    }
    assert source.warnings == ()


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (("u=/run/nothing",), DataError, r"x.h5: 'run/nothing' cannot be opened"),
        (("u=/run",), DataError, r"'run' is not a dataset"),
        (("run/wave", "lat"), DataError, r"x.h5: run/wave' has 50 samples but '.*x.h5: lat' has 6"),
        (("1=/run/wave",), UsageError, "'1' cannot name a field"),
        (("run/wave", "wave=lat"), UsageError, "--field names 'wave' twice"),
        (("t=/title",), DataError, "dataset '/title'"),
    ],
)
def test_names_that_do_not_work(
    mixed_file: Path, fields: tuple[str, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_source(mixed_file, SourceOptions(fields=fields))


def test_labels_that_some_samples_lack_are_refused_not_left_out(tmp_path: Path) -> None:
    def fill(file: h5py.File) -> None:
        file["images"] = np.zeros((50, 8), np.uint8)
        file["labels"] = np.zeros(48, np.int64)

    path = write(tmp_path / "x.h5", fill)
    with pytest.raises(
        DataError, match=r"/images has 50 samples but /labels has 48: labels are missing for some"
    ):
        open_source(path)
    assert open_source(path, SourceOptions(fields=("images",))).num_samples == 50


def test_datasets_of_one_name_are_told_apart_by_their_groups(tmp_path: Path) -> None:
    def fill(file: h5py.File) -> None:
        file["a/x"], file["b/x"], file["b/y"] = np.zeros(5), np.ones(5), np.ones(5)

    assert list(open_source(write(tmp_path / "x.h5", fill)).fields) == ["a.x", "b.x", "y"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros((5, 2), complex), "type complex128; only booleans, integers and floats"),
        (np.zeros((5, 0)), "needs a first dimension of samples, and none of 0"),
        (np.zeros(5, [("a", "i4")]), "only booleans"),
    ],
)
def test_types_that_cannot_be_packed(tmp_path: Path, data: Any, message: str) -> None:
    path = write(tmp_path / "x.h5", lambda file: file.create_dataset("x", data=data))
    with pytest.raises(DataError, match=message):
        Hdf5Source([path], {"x": Wanted("x")})


def test_what_cannot_be_packed_is_left_out_where_nothing_was_named(tmp_path: Path) -> None:
    def fill(file: h5py.File) -> None:
        file["x"], file["id"] = np.zeros((5, 3)), np.arange(5)
        file["compound"] = np.zeros(5, [("a", "i4")])

    source = open_source(write(tmp_path / "x.h5", fill))
    assert list(source.fields) == ["x"]
    names, types = source.warnings
    assert "1 datasets have names that fields cannot have and are left out (/id (5,))" in names
    assert "left out: " in types
    assert "dataset '/compound' has type" in types
    only = write(tmp_path / "y.h5", lambda file: file.create_dataset("id", data=np.arange(5)))
    with pytest.raises(UsageError, match="'id' cannot name a field"):
        open_source(only)


def test_vlen_floats_cannot_be_packed(tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", lambda file: file.create_dataset("x", (5,), h5py.vlen_dtype(np.float32)))
    with pytest.raises(DataError, match=r"dataset '/x' holds float32, which cannot be packed"):
        Hdf5Source([path], {"x": Wanted("x")})


def test_files_that_differ_name_both(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / name, lambda file, width=width: file.create_dataset("x", data=np.zeros((5, width))))
        for name, width in (("a.h5", 2), ("b.h5", 3))
    ]
    with pytest.raises(
        DataError, match=r"'x' is float64 of \(2,\) in .*a.h5, but float64 of \(3,\) in .*b.h5"
    ):
        Hdf5Source(paths, {"x": Wanted("x")})


def test_damaged_and_empty_files(tmp_path: Path) -> None:
    path = write(tmp_path / "x.h5", mixed)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=r"x.h5"):
        open_source(path)
    (tmp_path / "y.nc").write_bytes(b"CDF\x01 a netCDF of the old kind")
    with pytest.raises(DataError, match=r"y.nc"):
        open_source(tmp_path / "y.nc")
    empty = write(tmp_path / "z.h5", lambda file: file.create_group("a"))
    with pytest.raises(DataError, match=r"z.h5: no dataset has rows to pack; `hpctrain inspect"):
        open_source(empty)


class TestPackedSets:
    """A packed set is packed otherwise."""

    def test_every_field_survives(self, tmp_path: Path) -> None:
        arrays: dict[str, Any] = {
            "wave": WAVE,
            "text": Ragged.from_text("so " * (i % 9) for i in range(50)),
            "label": np.arange(50),
        }
        first = PackOptions("gzip", chunk_samples=8, shard_mib=0.005, keep_bits=9)
        pack_arrays(arrays, tmp_path / "a", first, ("x", "y"))
        pack_path(tmp_path / "a", tmp_path / "b", PackOptions("zstd", chunk_samples=11))
        before, after = open_packed(tmp_path / "a"), open_packed(tmp_path / "b")
        assert len(before.shards) > 1
        assert all_rows(tmp_path / "b") == all_rows(tmp_path / "a")
        assert after.classes == ("x", "y")
        assert after.fields["wave"].codec == "zstd"
        assert after.fields["wave"].keep_bits == 9
        assert after.fields["label"].mean == before.fields["label"].mean
        assert after.chunk_samples == 11

    def test_damage_is_found(self, tmp_path: Path) -> None:
        pack_arrays({"wave": WAVE}, tmp_path / "a", PackOptions("none", chunk_samples=8))
        index = open_packed(tmp_path / "a").shards[0].dense["wave"]
        with index.path.open("r+b") as file:
            file.seek(int(index.offsets[2]) + 5)
            file.write(b"?")
        with pytest.raises(DataError, match=r"shard-00000.h5: dataset 'wave', chunk 2 of 7 .*digest"):
            pack_path(tmp_path / "a", tmp_path / "b")
        assert not (tmp_path / "b").exists()


class TestBlocks:
    """Blocks that are loaded once."""

    def test_only_the_last_are_kept(self) -> None:
        loaded: list[int] = []
        cache = BlockCache(lambda number: loaded.append(number) or number, lambda _: 10, 20)
        assert [cache.get(number) for number in (0, 1, 0, 2, 0)] == [0, 1, 0, 2, 0]
        assert loaded == [0, 1, 2, 0]

    def test_two_are_kept_however_large(self) -> None:
        loaded: list[int] = []
        cache = BlockCache(lambda number: loaded.append(number) or number, lambda number: number, 3)
        assert [cache.get(number) for number in (1, 2, 1, 90, 2, 0, 90, 2)] == [1, 2, 1, 90, 2, 0, 90, 2]
        assert loaded == [1, 2, 90, 0, 2]

    def test_an_error_reaches_all_who_wait(self) -> None:
        started, may_fail = threading.Event(), threading.Event()

        def load(number: int) -> int:
            started.set()
            may_fail.wait(10)
            raise DataError("broken")

        cache, errors = BlockCache(load, lambda _: 1, 2), []

        def get() -> None:
            try:
                cache.get(0)
            except DataError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=get) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert started.wait(10)
        may_fail.set()
        for thread in threads:
            thread.join(10)
        assert errors == ["broken"] * 3

    @given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.data())
    @settings(deadline=None, max_examples=50)
    def test_cut_and_joined_are_inverse(self, lengths: list[int], data: st.DataObject) -> None:
        rows = Ragged.from_rows((np.arange(length) for length in lengths), np.int32)
        at = data.draw(st.integers(0, len(lengths)))
        both = joined([cut(rows, 0, at), cut(rows, at, len(lengths))])
        assert isinstance(both, Ragged)
        assert both.values.tolist() == rows.values.tolist()
        assert both.offsets.tolist() == rows.offsets.tolist()
