"""Sets of files as their owners wrote them: what is in them, and what cannot be trained on."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.chunks import FileSource
from hpctrain.h5.library import SHARED
from hpctrain.h5.packed import PackedSet
from hpctrain.h5.reader import read_sample_chunk
from hpctrain.h5.userset import open_files
from tests.h5.user_files import write

FIELDS = {"image": "train/images", "label": "train/labels", "extra": "extra"}


def arrays(first: int, count: int) -> dict[str, np.ndarray]:
    """Samples numbered from `first` on, whose values tell their number."""
    numbers = np.arange(first, first + count)
    image = np.repeat(numbers % 250, 12).astype(">f4").reshape(count, 4, 3)
    return {"image": image, "label": numbers.astype("<i8"), "extra": numbers % 3 == 0}


def make(folder: Path, counts: list[int], chunks: Any = (5, 2, 3), **options: Any) -> list[Path]:
    """Files of `counts` samples each."""
    paths, first = [], 0
    for number, count in enumerate(counts):
        paths.append(folder / f"{number}.h5")
        values = arrays(first, count)
        with h5py.File(paths[-1], "w") as file:
            file.create_dataset(
                "train/images", data=values["image"], chunks=chunks, maxshape=(None, 4, 3), **options
            )
            file["train/labels"] = values["label"]
            file.create_dataset("extra", data=values["extra"], chunks=(3,), maxshape=(None,))
        first += count
    return paths


def read_all(packed: PackedSet) -> dict[str, np.ndarray]:
    with FileSource() as source:
        parts = [read_sample_chunk(packed, source, chunk) for chunk in range(len(packed.chunk_sizes))]
    return {name: np.concatenate([part[name] for part in parts]) for name in packed.fields}


@given(
    counts=st.lists(st.integers(1, 23), min_size=1, max_size=4),
    rows=st.integers(1, 9),
    columns=st.integers(1, 4),
    options=st.sampled_from([{}, {"compression": "gzip", "shuffle": True}, dict(hdf5plugin.BZip2())]),
)
@settings(max_examples=40, deadline=None)
def test_the_samples_of_several_files(
    tmp_path_factory: pytest.TempPathFactory,
    counts: list[int],
    rows: int,
    columns: int,
    options: dict[str, Any],
) -> None:
    paths = make(tmp_path_factory.mktemp("set"), counts, (rows, columns, 2), **options)
    packed = pickle.loads(pickle.dumps(open_files(paths, FIELDS)))
    by_library = "compression_opts" in options
    assert packed.num_samples == sum(counts) == packed.chunk_sizes.sum()
    assert by_library or packed.chunk_samples == rows
    assert [list(shard.library) for shard in packed.shards] == [["image"] if by_library else []] * len(counts)
    found, wanted = read_all(packed), arrays(0, sum(counts))
    assert {name: values.dtype.str for name, values in found.items()} == {
        "image": "<f4",
        "label": "<i8",
        "extra": "|u1",
    }
    for name, values in wanted.items():
        assert found[name].tolist() == values.astype(found[name].dtype).tolist()


def test_what_the_fields_are(tmp_path: Path) -> None:
    packed = open_files(make(tmp_path, [23, 7]), FIELDS)
    assert packed.root == tmp_path
    assert packed.chunk_sizes.tolist() == [5, 5, 5, 5, 3, 5, 2]
    assert {name: (field.dtype.str, field.sample_shape) for name, field in packed.fields.items()} == {
        "image": (">f4", (4, 3)),
        "label": ("<i8", ()),
        "extra": ("|u1", ()),
    }
    dense = packed.shards[0].dense
    assert [dense[name].chunk_shape[0] for name in FIELDS] == [
        5,
        5,
        3,
    ]  # the label, contiguous, in the set's chunks
    assert all(index.digests is None and index.file_key is not None for index in dense.values())


def test_complex_numbers_become_pairs(tmp_path: Path) -> None:
    values = (np.arange(12) + 1j * np.arange(12, 24)).astype(">c8").reshape(6, 2)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=values)
        node = file.create_dataset("y", (6, 2), ">c8", chunks=(2, 2), fillvalue=3 + 4j)
        node[:2] = values[:2]
    found = read_all(open_files([tmp_path / "x.h5"], {"x": "x", "y": "y"}))
    assert found["x"].tolist() == np.stack([values.real, values.imag], -1).tolist()
    assert found["y"].shape == (6, 2, 2)
    assert found["y"][2:].tolist() == np.full((4, 2, 2), [3, 4]).tolist()


class TestIdentity:
    """What makes two sets the same to a run that starts again."""

    def identity(self, paths: list[Path], **options: Any) -> str:
        return open_files(paths, FIELDS, **options).identity

    @pytest.mark.parametrize("options", [{"compression": "gzip"}, dict(hdf5plugin.BZip2())])
    def test_a_copy_elsewhere_is_the_same(self, tmp_path: Path, options: dict[str, Any]) -> None:
        paths = make(tmp_path, [23, 7], **options)
        (tmp_path / "copy").mkdir()
        copies = [Path(shutil.copyfile(path, tmp_path / "copy" / path.name)) for path in paths]
        wanted = self.identity(paths)
        assert self.identity(copies) == wanted
        assert self.identity(copies, cache_dir=tmp_path / "cache") == wanted
        assert self.identity(copies, cache_dir=tmp_path / "cache", verify_chunks=0) == wanted
        assert self.identity(paths[::-1]) != wanted
        assert self.identity(paths[:1]) != wanted

    @pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, dict(hdf5plugin.BZip2())])
    @pytest.mark.parametrize("name", ["train/images", "train/labels"])
    def test_a_value_changed_in_place(self, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
        """Even when the file's times and size do not tell: the samples of so small a set are all looked at."""
        (path,) = make(tmp_path, [23], **options)
        before, times = self.identity([path]), path.stat()
        SHARED.close()  # h5py lets nobody write what is open for reading in the same process
        with h5py.File(path, "a") as file:
            file[name][11] = file[name][11] + 1
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert self.identity([path]) != before

    def test_another_view_of_the_same_bytes(self, tmp_path: Path) -> None:
        values = np.arange(8, dtype="i4")
        for name, data in {"a": values, "b": values.view("f4"), "c": values.reshape(4, 2)}.items():
            write(tmp_path / f"{name}.h5", x=data)
        assert len({open_files([tmp_path / f"{name}.h5"], {"x": "x"}).identity for name in "abc"}) == 3


class TestRefusals:
    """What cannot be trained on, with what to do."""

    def refused(self, words: str, paths: list[Path], fields: dict[str, str]) -> None:
        with pytest.raises(DataError, match=words):
            open_files(paths, fields)

    def test_types(self, tmp_path: Path) -> None:
        path = tmp_path / "x.h5"
        with h5py.File(path, "w") as file:
            file["text"] = ["a", "b"]
            file["fixed"] = np.array([b"a", b"b"])
            file.create_dataset("ragged", (2,), h5py.vlen_dtype("u1"))[0] = [1, 2]
            file["compound"] = np.zeros(2, [("a", "i4"), ("b", "f4")])
            file["scalar"] = 1.0
            file["null"] = h5py.Empty("f4")
            file["wide"] = np.zeros(2, np.longdouble)
            file["none"] = np.zeros((0, 3))
        for name, words in {
            "text": "no numbers of fixed size .*field 'x'.*hpctrain pack",
            "fixed": r"the type \|S1, .*convert it",
            "ragged": "no numbers of fixed size .*pack it",
            "compound": "write the member you need as a dataset of its own",
            "scalar": "has no rows, so it cannot be the field 'x'",
            "null": "has no rows; leave the file out",
            "wide": "convert it to integers or floats",
            "none": "has no rows; leave the file out",
        }.items():
            self.refused(f"x\\.h5: dataset '/{name}'.*{words}", [path], {"x": name})

    def test_lengths_that_differ_within_a_file(self, tmp_path: Path) -> None:
        path = write(tmp_path / "x.h5", image=np.zeros((10, 3)), label=np.zeros(8, "i4"))
        self.refused(
            "'/label' has 8 rows for the field 'y', but '/image' has 10 for 'x'",
            [path],
            {"x": "image", "y": "label"},
        )

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            (np.zeros((5, 3), "f8"), "the type of the field 'x' is <f8, but <f4 in .*a.h5"),
            (np.zeros((5, 3), ">f4"), "the type of the field 'x' is >f4, but <f4 in .*a.h5"),
            (np.zeros((5, 2), "f4"), r"the shape of a sample of the field 'x' is \(2,\), but \(3,\) in"),
        ],
    )
    def test_files_that_are_not_alike(self, tmp_path: Path, values: np.ndarray, words: str) -> None:
        paths = [write(tmp_path / "a.h5", x=np.zeros((5, 3), "f4")), write(tmp_path / "b.h5", x=values)]
        self.refused(words, paths, {"x": "x"})

    def test_nothing_to_open(self, tmp_path: Path) -> None:
        for paths, fields in (([], FIELDS), ([tmp_path / "x.h5"], {})):
            with pytest.raises(UsageError, match="at least one HDF5 file and one field"):
                open_files(paths, fields)

    def test_bounds(self, tmp_path: Path) -> None:
        path = write(tmp_path / "x.h5", x=np.zeros((10, 3)))
        with pytest.raises(DataError, match="are 240, but max_bytes = 100"):
            open_files([path], {"x": "x"}, max_bytes=100)
