"""Any dataset: both roads give what h5py gives; what is damaged, absent or too large is named."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError, StorageError
from hpctrain.h5 import chunk_table
from hpctrain.h5.compare import sampled_chunks
from hpctrain.h5.dataset import Dataset, open_dataset
from hpctrain.h5.filters import DEFLATE, Filter, FilterPipeline
from hpctrain.h5.index import ChunkIndex, filters_of
from hpctrain.h5.library import SHARED
from tests.h5.user_files import bits, create, random_values, write
from tests.support import ROOT

NESTED = np.dtype(
    [("a", ">i2"), ("b", "<f8", (2, 3)), ("c", [("x", "S3"), ("y", "<c8"), ("z", "?")]), ("d", "u1")],
    align=True,
)
DTYPES = [
    *("u1", "i1", "<i2", ">i4", "<u8", "<f2", ">f4", "<f8", "?", "<c8", ">c16", "S5", "V3"),
    NESTED,
    np.dtype((">f4", (2, 3))),
    np.dtype(("<i2", (3,))),
]
FILTERS: list[dict[str, Any]] = [
    {},
    {"compression": "gzip"},
    {"compression": "gzip", "shuffle": True},
    {"compression": "gzip", "shuffle": True, "fletcher32": True},
    {"fletcher32": True},
    {"compression": "lzf", "shuffle": True},
    dict(hdf5plugin.Blosc(cname="lz4", shuffle=1)),
    dict(hdf5plugin.Zstd()),
    dict(hdf5plugin.LZ4()),
    dict(hdf5plugin.Bitshuffle(cname="lz4")),
    dict(hdf5plugin.Blosc2(cname="zstd")),
    dict(hdf5plugin.BZip2()),  # by libhdf5
]


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Shape, chunks and whatever else makes a dataset."""
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(0 if axis else 1, 9)) for axis in range(rank))
    chunks = tuple(draw(st.integers(1, 6)) for _ in range(rank))
    every = tuple(range(rank))
    unlimited = draw(st.sampled_from([(), (0,), (rank - 1,), every])) if all(shape) else every
    more = draw(st.sampled_from([0, 5]))
    chunked = draw(st.booleans())
    fitting = tuple(min(step, max(extent, 1)) for step, extent in zip(chunks, shape, strict=True))
    return {
        "shape": shape,
        "chunks": (chunks if len(unlimited) == rank else fitting) if chunked else None,
        "maxshape": tuple(None if axis in unlimited else shape[axis] + more for axis in every)
        if chunked
        else None,
        "filters": draw(st.sampled_from(FILTERS)) if chunked else {},
        "raw_edges": chunked and draw(st.booleans()),
        "written": draw(st.sampled_from(["all", "some", "none"])),
        "masked": chunked and draw(st.booleans()),
        "libver": draw(st.sampled_from(["earliest", "latest"])),
        "userblock_size": draw(st.sampled_from([0, 512, 2048])),
    }


def write_layout(path: Path, dtype: np.dtype[Any], layout: dict[str, Any], seed: int) -> None:
    options = {**layout["filters"], "chunks": layout["chunks"], "maxshape": layout["maxshape"]}
    if dtype.subdtype is None and dtype.kind not in "V":
        options["fillvalue"] = random_values(dtype, (1,), seed + 1)[0]
    shape = layout["shape"]
    values = random_values(dtype, shape, seed)
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w", libver=layout["libver"], userblock_size=layout["userblock_size"]) as file:
        node = create(file, "x", dtype, shape, layout["raw_edges"], **options)
        if layout["written"] == "none" or not values.size:
            return
        if layout["written"] == "all" or layout["chunks"] is None:
            node[...] = values
        else:
            starts = [range(0, extent, step) for extent, step in zip(shape, node.chunks, strict=True)]
            corners = np.stack(np.meshgrid(*starts, indexing="ij"), -1).reshape(-1, len(shape))
            for corner in corners[rng.random(len(corners)) < 0.5]:
                part = tuple(slice(at, at + step) for at, step in zip(corner, node.chunks, strict=True))
                node[part] = values[part]
        if layout["masked"] and all(extent >= step for extent, step in zip(shape, node.chunks, strict=True)):
            # one whole chunk as it is: every filter is skipped
            count = len(layout["filters"]) and node.id.get_create_plist().get_nfilters()
            chunk = random_values(dtype, node.chunks, seed + 2)
            node.id.write_direct_chunk((0,) * len(shape), chunk.tobytes(), (1 << count) - 1)


def read_both(path: Path, dataset: Dataset, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows as hpctrain and as h5py read them."""
    with h5py.File(path, locking=False) as file:
        theirs = file[dataset.name][start:stop]
    return dataset.read_rows(start, stop), theirs


@given(dtype=st.sampled_from(DTYPES), layout=layouts(), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_layout_reads_as_h5py_reads_it(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: Any,
    layout: dict[str, Any],
    seed: int,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("any") / "x.h5"
    write_layout(path, np.dtype(dtype), layout, seed)
    dataset = open_dataset(path, "x", rows_per_chunk=data.draw(st.sampled_from([None, 1, 2, 5])))
    start = data.draw(st.integers(0, dataset.num_rows))
    stop = data.draw(st.integers(start, dataset.num_rows))
    ours, theirs = read_both(path, dataset, start, stop)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype.newbyteorder("="))
    assert bits(ours) == bits(theirs)
    expected = "libhdf5" if layout["filters"] == FILTERS[-1] else "parallel"
    assert dataset.road == expected, dataset.reason
    assert bits(pickle.loads(pickle.dumps(dataset)).read_rows(start, stop)) == bits(theirs)


def test_the_comparison_takes_the_same_spread_of_chunks_every_time() -> None:
    index = open_index(np.array([8 * i for i in range(20)]))
    assert sampled_chunks(index, 4) == [0, 6, 13, 19]
    assert sampled_chunks(index, 100) == list(range(20))
    assert sampled_chunks(index, 0) == []
    holes = open_index(np.array([-1, -1, 8, -1, 9, 10]))
    assert sampled_chunks(holes, 2) == [0, 2, 5]


def open_index(offsets: np.ndarray) -> ChunkIndex:
    """An index without a file."""
    zeros = np.zeros(len(offsets), np.int64)
    shape = (len(offsets),)
    pipeline = FilterPipeline()
    return ChunkIndex(
        Path("/x"), "x", shape, np.dtype("u1"), (1,), pipeline, offsets, zeros, zeros.astype(np.uint32)
    )


class TestRoads:
    """Which road is taken, and why not the other."""

    def road(self, path: Path, name: str = "x") -> tuple[str, str]:
        dataset = open_dataset(path, name)
        ours, theirs = (
            read_both(path, dataset, 0, dataset.num_rows)
            if dataset.shape
            else (dataset.read_rows(0, 1), None)
        )
        assert theirs is None or repr(ours.tolist()) == repr(theirs.tolist())
        return dataset.road, dataset.reason

    def test_what_goes_by_libhdf5(self, tmp_path: Path) -> None:
        compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        compact.set_layout(h5py.h5d.COMPACT)
        narrow = h5py.h5t.STD_I32LE.copy()
        narrow.set_precision(16)
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file["scalar"] = 3.0
            file["text"] = ["a", "b"]
            file["reference"] = np.array([file["scalar"].ref], h5py.ref_dtype)
            file.create_dataset("rows", (2,), h5py.vlen_dtype("i4"))[0] = [1, 2]
            space = h5py.h5s.create_simple((4,))
            h5py.h5d.create(file.id, b"compact", h5py.h5t.STD_I32LE, space, compact)
            h5py.h5d.create(file.id, b"narrow", narrow, space)
            file.create_dataset("bzip2", data=np.arange(9), **hdf5plugin.BZip2())
            file.create_dataset("wide", data=np.zeros(3, np.longdouble))
        expected = {
            "scalar": "a single value",
            "text": "variable-length",
            "rows": "variable-length",
            "compact": "compact",
            "narrow": "16 of 32 bits",
            "bzip2": "filter 307",
            "wide": "IEEE 754",
        }
        for name, words in expected.items():
            road, reason = self.road(tmp_path / "x.h5", name)
            assert (road, words in reason) == ("libhdf5", True), (name, reason)
        assert open_dataset(tmp_path / "x.h5", "reference").road == "libhdf5"

    def test_a_dataset_without_values(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file["x"] = h5py.Empty("f4")
        dataset = open_dataset(tmp_path / "x.h5", "x")
        assert (dataset.road, dataset.shape, dataset.read_rows(0, 0).shape) == ("libhdf5", (0,), (0,))

    @pytest.mark.parametrize("padding", [h5py.h5t.STR_NULLTERM, h5py.h5t.STR_SPACEPAD])
    def test_strings_end_as_the_file_says(self, tmp_path: Path, padding: int) -> None:
        """NumPy pads with NUL; Fortran with spaces, and C leaves anything behind the first NUL."""
        kind = h5py.h5t.C_S1.copy()
        kind.set_size(6)
        kind.set_strpad(padding)
        both = h5py.h5t.create(h5py.h5t.COMPOUND, 14)
        both.insert(b"a", 1, kind)
        both.insert(b"b", 8, kind)
        space = h5py.h5s.create_simple((3,))
        stored = [b"ab    ", b"ab\0cd ", b"      "]
        with h5py.File(tmp_path / "x.h5", "w") as file:
            for name, item, raw in (
                ("x", kind, b"".join(stored)),
                ("y", both, b"".join(b"?" + text + b"!" + text for text in stored)),
            ):
                made = h5py.h5d.create(file.id, name.encode(), item, space)
                made.write(space, space, np.frombuffer(raw, (np.void, item.get_size())), item)
        assert self.road(tmp_path / "x.h5", "x") == ("parallel", "")
        assert self.road(tmp_path / "x.h5", "y") == ("parallel", "")

    def test_partial_edges_where_libhdf5_cannot_be_asked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A mock: no libhdf5 without the function can be loaded here.
        monkeypatch.setattr(chunk_table, "_libhdf5", lambda name: None)
        path = write(tmp_path / "x.h5", x=(np.arange(10), {"chunks": (4,), "compression": "gzip"}))
        road, reason = self.road(path)
        assert road == "libhdf5"
        assert "edges" in reason

    def test_an_external_link_leads_to_its_file(self, tmp_path: Path) -> None:
        (tmp_path / "deep").mkdir()
        other = write(tmp_path / "deep" / "other.h5", y=np.arange(5))
        path = tmp_path / "x.h5"
        with h5py.File(path, "w") as file:
            file["x"] = h5py.ExternalLink("deep/other.h5", "/y")
            file["z"] = h5py.ExternalLink("gone.h5", "/y")
        dataset = open_dataset(path, "x")
        assert (dataset.path, dataset.name, dataset.index and dataset.index.path) == (other, "/y", other)
        assert dataset.read_rows(1, 3).tolist() == [1, 2]
        with pytest.raises(DataError, match=r"link to '/y' in 'gone\.h5', which is not there"):
            open_dataset(path, "z")


class TestElsewhere:
    """Data in other files: what is not there is an error, never zeros."""

    def virtual(self, path: Path, sources: dict[str, str]) -> Path:
        layout = h5py.VirtualLayout((len(sources), 4), "i4")
        for row, (file, name) in enumerate(sources.items()):
            layout[row] = h5py.VirtualSource(file, name, (4,))
        with h5py.File(path, "w") as file:
            file.create_virtual_dataset("x", layout, fillvalue=0)
        return path

    def test_a_virtual_dataset(self, tmp_path: Path) -> None:
        write(tmp_path / "a.h5", data=np.arange(4, dtype="i4"))
        path = self.virtual(tmp_path / "x.h5", {"a.h5": "data", "/moved/b.h5": "data"})
        with pytest.raises(DataError, match=r"its source file '/moved/b\.h5' is not there"):
            open_dataset(path, "x")
        write(tmp_path / "b.h5", data=np.arange(4, 8, dtype="i4"))
        dataset = open_dataset(path, "x")
        assert (dataset.road, "virtual" in dataset.reason) == ("libhdf5", True)
        assert dataset.read_rows(0, 2).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_a_source_beside_the_file_that_a_symbolic_link_leads_to(self, tmp_path: Path) -> None:
        (tmp_path / "store").mkdir()
        write(tmp_path / "store" / "a.h5", data=np.arange(4, dtype="i4"))
        path = self.virtual(tmp_path / "store" / "x.h5", {"a.h5": "data"})
        (tmp_path / "link.h5").symlink_to(path)
        assert open_dataset(tmp_path / "link.h5", "x").read_rows(0, 1).tolist() == [[0, 1, 2, 3]]

    @pytest.mark.parametrize("change", ["gone", "other"])
    def test_a_source_that_goes_or_changes_after_it_was_opened(self, tmp_path: Path, change: str) -> None:
        source = write(tmp_path / "a.h5", data=np.arange(4, dtype="i4"))
        self.virtual(tmp_path / "x.h5", {"a.h5": "data"})
        path = self.virtual(tmp_path / "y.h5", {"x.h5": "x"})
        with h5py.File(path, "a") as file:
            file.create_dataset("raw", (3,), "<i4", external=[(str(tmp_path / "raw"), 0, 12)])
        (tmp_path / "raw").write_bytes(bytes(range(12)))
        datasets = [open_dataset(path, "x"), open_dataset(path, "raw")]
        for item in (source, tmp_path / "raw"):
            if change == "gone":
                item.unlink()
            else:
                item.write_bytes(item.read_bytes() + b"more")
        for dataset, name in zip(datasets, (r"a\.h5", "raw"), strict=True):
            with pytest.raises(DataError, match=rf"{name}: (there is no such file any more|changed since)"):
                dataset.read_rows(0, 1)
        SHARED.close()

    def test_folders_named_by_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """libhdf5 reads it at its start only: what is set later must not make us believe in files it will not find."""
        folder = tmp_path / "sources"
        folder.mkdir()
        write(folder / "a.h5", data=np.arange(4, dtype="i4"))
        (folder / "raw").write_bytes(np.arange(3, dtype="<i4").tobytes())
        path = self.virtual(tmp_path / "x.h5", {"a.h5": "data"})
        with h5py.File(path, "a") as file:
            file.create_dataset("y", (3,), "<i4", external=[("raw", 0, 12)])
        monkeypatch.setenv("HDF5_VDS_PREFIX", "${ORIGIN}/sources")
        monkeypatch.setenv("HDF5_EXTFILE_PREFIX", str(folder))
        for name in "xy":
            with pytest.raises(DataError, match=r"is not there.*start .*with HDF5_[A-Z]+_PREFIX"):
                open_dataset(path, name)
        program = (
            "import sys; from pathlib import Path; from hpctrain.h5.dataset import open_dataset\n"
            "for name in 'xy': print(open_dataset(Path(sys.argv[1]), name).read_rows(0, 1).tolist())"
        )
        command = [sys.executable, "-c", program, str(path)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        found = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=True)
        assert found.stdout.splitlines() == ["[[0, 1, 2, 3]]", "[0]"]

    def test_a_source_dataset_that_is_not_there_or_not_whole(self, tmp_path: Path) -> None:
        write(tmp_path / "a.h5", other=np.arange(4))
        with pytest.raises(DataError, match=r"source 'data' in .*a\.h5 is not there"):
            open_dataset(self.virtual(tmp_path / "x.h5", {"a.h5": "data"}), "x")
        self.virtual(tmp_path / "y.h5", {"gone.h5": "data"})
        with pytest.raises(DataError, match=r"y\.h5: virtual dataset '/x': its source file 'gone\.h5'"):
            open_dataset(self.virtual(tmp_path / "z.h5", {"y.h5": "x"}), "x")

    def test_a_virtual_dataset_of_its_own_file_and_one_without_end(self, tmp_path: Path) -> None:
        path = self.virtual(tmp_path / "x.h5", {".": "data"})
        with h5py.File(path, "a") as file:
            file["data"] = np.arange(4, dtype="i4")
        assert open_dataset(path, "x").read_rows(0, 1).tolist() == [[0, 1, 2, 3]]
        self.virtual(tmp_path / "p.h5", {"q.h5": "x"})
        with pytest.raises(DataError, match="more than 16 deep"):
            open_dataset(self.virtual(tmp_path / "q.h5", {"p.h5": "x"}), "x")

    def test_names_of_sources_cannot_command_a_terminal(self, tmp_path: Path) -> None:
        path = self.virtual(tmp_path / "x.h5", {"a\x1b[2J.h5": "data"})
        with h5py.File(path, "a") as file:
            file.create_dataset("y", (3,), "<i4", external=[("a\x1b[2J", 0, 12)])
        for name in "xy":
            with pytest.raises(DataError, match=r"a\\x1b\[2J") as caught:
                open_dataset(path, name)
            assert "\x1b" not in str(caught.value)

    def test_external_storage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "x.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("x", (6,), "<i4", external=[("one", 0, 8), ("two", 4, 100)])
        monkeypatch.chdir(tmp_path)
        (tmp_path / "one").write_bytes(np.array([1, 2], "<i4").tobytes())
        with pytest.raises(DataError, match=r"keeps its data in 'two', and '.*two' is not there"):
            open_dataset(path, "x")
        (tmp_path / "two").write_bytes(np.array([0, 3, 4, 5], "<i4").tobytes())
        with pytest.raises(DataError, match="two' has 16 bytes, 20 are needed"):
            open_dataset(path, "x")
        (tmp_path / "two").write_bytes(np.array([0, 3, 4, 5, 6], "<i4").tobytes())
        assert open_dataset(path, "x").read_rows(0, 6).tolist() == [1, 2, 3, 4, 5, 6]


class TestBounds:
    """Nothing is allocated for what a file merely claims."""

    @pytest.mark.parametrize("chunks", [None, (1 << 20,)])
    def test_values_that_were_never_written(self, tmp_path: Path, chunks: tuple[int, ...] | None) -> None:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file.create_dataset("x", (5 << 30,), ">f4", chunks=chunks, fillvalue=7)
        dataset = open_dataset(tmp_path / "x.h5", "x")
        assert dataset.read_rows(4 << 30, (4 << 30) + 3).tolist() == [7, 7, 7]
        with pytest.raises(DataError, match="are 21474836480, but max_read_bytes = 8589934592; raise it"):
            dataset.read_rows(0, dataset.num_rows)
        with pytest.raises(DataError, match="are 21474836480, but max_bytes = 1000"):
            open_dataset(tmp_path / "x.h5", "x", max_bytes=1000)

    def test_chunks_too_large_and_too_many(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file.create_dataset("x", (2**40,), "u1", chunks=(2**31,))
            file.create_dataset("y", (2**40,), "u1", chunks=(1,))
            file.create_dataset("z", (2, 2**31), "u1")
            file.create_dataset("bzip2", (2**40,), "u1", chunks=(2**31,), **hdf5plugin.BZip2())
        for name, words in {
            "x": "max_chunk_bytes",
            "y": "max_chunks",
            "z": "max_chunk_bytes",
            "bzip2": "max_chunk",
        }.items():
            with pytest.raises(
                DataError, match=rf"{words}.* = [0-9]+( \(data\..* in a run description\))?; raise it"
            ):
                open_dataset(tmp_path / "x.h5", name)
        assert open_dataset(tmp_path / "x.h5", "z", max_chunk_bytes=2**32).index is not None

    def test_a_chunk_stored_in_more_bytes_than_a_chunk_may_have(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            dataset = file.create_dataset("x", (4,), "u1", chunks=(4,), compression="gzip")
            dataset.id.write_direct_chunk((0,), bytes(5000))
        with pytest.raises(
            DataError, match=r"stored bytes of one chunk are 5000, but max_chunk_bytes = 4096"
        ):
            open_dataset(tmp_path / "x.h5", "x", verify_chunks=0, max_chunk_bytes=4096)

    def test_a_file_replaced_while_it_is_opened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write(tmp_path / "x.h5", x=(np.arange(4), {"chunks": (4,)}))
        write(tmp_path / "y.h5", x=(np.arange(4) + 1, {"chunks": (4,)}))

        def replaced(node: h5py.Dataset) -> Any:
            (tmp_path / "y.h5").rename(path)
            return filters_of(node)

        # A mock: the moment between opening and indexing cannot be met otherwise.
        monkeypatch.setattr("hpctrain.h5.dataset.filters_of", replaced)
        dataset = open_dataset(path, "x", verify_chunks=0)
        with pytest.raises(DataError, match="changed since this run looked at it"):
            dataset.read_rows(0, 4)

    def test_a_chunk_that_unpacks_to_more_than_its_size(self, tmp_path: Path) -> None:
        path = write(tmp_path / "x.h5", x=(np.zeros(1000, "u1"), {"chunks": (1000,), "compression": "gzip"}))
        with h5py.File(path, "a") as file:
            file["x"].id.write_direct_chunk((0,), zlib.compress(bytes(10**7)))
        with pytest.raises(
            DataError, match=r"x\.h5: dataset '/x', chunk 0 of 1 .*do not decode to 1000 bytes"
        ):
            open_dataset(path, "x")

    def test_values_that_the_file_does_not_define(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file.create_dataset("x", (10,), "i4", chunks=(5,), fill_time="never")[:5] = 1
        with pytest.raises(DataError, match="never written, and the file does not say what they are"):
            open_dataset(tmp_path / "x.h5", "x")


class TestBesideH5py:
    """The same file, open in the same process by h5py."""

    @pytest.mark.parametrize("locking", [None, True, False, "best-effort"])
    def test_a_file_that_is_open_already(self, tmp_path: Path, locking: Any) -> None:
        path = write(tmp_path / "x.h5", x=np.arange(3))
        with h5py.File(path, locking=locking):
            assert open_dataset(path, "x").read_rows(0, 3).tolist() == [0, 1, 2]


class TestDamage:
    """Every kind of bad file, with its own words and mend."""

    def test_names_that_lead_nowhere(self, tmp_path: Path) -> None:
        path = write(tmp_path / "x.h5", x=np.arange(3))
        with h5py.File(path, "a") as file:
            file.create_group("group")
        with pytest.raises(DataError, match="'nothing' cannot be opened"):
            open_dataset(path, "nothing")
        with pytest.raises(DataError, match="'group' is not a dataset; `hpctrain inspect"):
            open_dataset(path, "group")

    def test_files_that_cannot_be_opened(self, tmp_path: Path) -> None:
        path = write(tmp_path / "x.h5", x=np.arange(1000))
        (tmp_path / "cut.h5").write_bytes(path.read_bytes()[:4000])
        (tmp_path / "text.h5").write_text("no HDF5 " * 100)
        os.mkfifo(tmp_path / "pipe.h5")
        with h5py.File(tmp_path / "open.h5", "w", libver="latest") as file:
            file.flush()
            (tmp_path / "marked.h5").write_bytes(
                (tmp_path / "open.h5").read_bytes()
            )  # as a killed writer leaves it
        for name, words in {
            "gone": "there is no such file; copy",
            "cut": "it is truncated .*copy the file anew",
            "text": "it has no HDF5 signature",
            "pipe": "not a regular file",
            "marked": "marked as open for writing.*h5clear -s",
        }.items():
            with pytest.raises(DataError, match=words):
                open_dataset(tmp_path / f"{name}.h5", "x")
        (tmp_path / "loop.h5").symlink_to("loop.h5")
        with pytest.raises(StorageError, match="symbolic links"):
            open_dataset(tmp_path / "loop.h5", "x")

    def test_a_type_that_numpy_lacks(self, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            h5py.h5d.create(file.id, b"x", h5py.h5t.UNIX_D32LE, h5py.h5s.create_simple((3,)))
        with pytest.raises(
            DataError, match=r"x\.h5: dataset '/x': its HDF5 type cannot be read: .*TypeTimeID"
        ):
            open_dataset(tmp_path / "x.h5", "x")

    def test_a_filter_that_nobody_has(self, tmp_path: Path) -> None:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((3,))
        plist.set_filter(305, h5py.h5z.FLAG_OPTIONAL, (1,))
        with h5py.File(tmp_path / "x.h5", "w") as file:
            h5py.h5d.create(file.id, b"x", h5py.h5t.STD_I32LE, h5py.h5s.create_simple((3,)), plist)
        with pytest.raises(
            DataError, match=r"dataset '/x': filter 305 \(LZO\) .*PyTables.*libhdf5 does not have it here"
        ):
            open_dataset(tmp_path / "x.h5", "x")

    def test_a_chunk_that_claims_more_than_the_file(self, tmp_path: Path) -> None:
        """The stored size is a u32 before the mask in the B-tree of the oldest format."""
        path = write(tmp_path / "x.h5", x=(np.zeros(1000, "u1"), {"chunks": (1000,), "compression": "gzip"}))
        dataset = open_dataset(path, "x")
        assert dataset.index is not None
        key = struct.pack("<II", int(dataset.index.sizes[0]), 0) + bytes(16)
        content = path.read_bytes()
        assert content.count(key) == 1
        path.write_bytes(content.replace(key, struct.pack("<II", 10**6, 0) + bytes(16)))
        with pytest.raises(
            DataError, match=r"chunk 0 of 1 .*1000000 bytes stored\) reaches past the end of the file"
        ):
            open_dataset(path, "x")

    def test_a_flipped_byte_under_a_checksum(self, tmp_path: Path) -> None:
        path = write(tmp_path / "x.h5", x=(np.arange(1000), {"chunks": (1000,), "fletcher32": True}))
        dataset = open_dataset(path, "x")
        assert dataset.index is not None
        content = bytearray(path.read_bytes())
        content[int(dataset.index.offsets[0]) + 100] ^= 1
        path.write_bytes(content)
        with pytest.raises(DataError, match="changed since"):
            dataset.read_rows(0, 1)
        with pytest.raises(DataError, match=r"chunk 0 of 1 .*Fletcher32"):
            open_dataset(path, "x")

    def test_a_difference_between_the_roads_is_found(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A mock: no difference is known, or it would be mended.
        values = np.arange(1000, dtype="<i4")
        path = write(
            tmp_path / "x.h5", x=(values, {"chunks": (100,), "compression": "gzip", "shuffle": True})
        )
        monkeypatch.setattr("hpctrain.h5.dataset.filters_of", lambda node: (Filter(DEFLATE, (4,)),))
        with pytest.raises(DataError, match=r"element \(0,\) .*\[1\].* as libhdf5 .* report"):
            open_dataset(path, "x")
        assert open_dataset(path, "x", verify_chunks=0).compared == 0

    def test_rows_that_are_not_there(self, tmp_path: Path) -> None:
        dataset = open_dataset(write(tmp_path / "x.h5", x=np.arange(3)), "x")
        for start, stop in ((0, 4), (-1, 2), (2, 1)):
            with pytest.raises(IndexError, match="of 3"):
                dataset.read_rows(start, stop)
