"""The chunk table: right for every chunk index of libhdf5, whatever it reports; small and quick."""

from __future__ import annotations

import itertools
import pickle
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError
from hpctrain.h5 import chunk_table
from hpctrain.h5.chunk_table import Reports, probe, read_chunk_table
from hpctrain.h5.dataset import open_dataset
from hpctrain.h5.filters import FilterPipeline
from hpctrain.h5.index import ChunkIndex, read_index


@given(
    grid=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    chunk=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    unlimited=st.sets(st.integers(0, 3)),
    more=st.integers(0, 4),
    libver=st.sampled_from(["earliest", "latest"]),
    filtered=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(max_examples=200, deadline=None)
def test_every_chunk_is_found_where_it_lies(
    grid: list[int], chunk: list[int], unlimited: set[int], more: int, libver: str, filtered: bool, seed: int
) -> None:
    """Every kind of chunk index: the oldest B-tree, and of the newer ones single, implicit, fixed, extensible, B-tree.

    With the extensible array libhdf5 2.0.0 reports wrong places, unless the first axis is the unlimited one.
    """
    shape = tuple(count * step for count, step in zip(grid, chunk, strict=False))
    chunks = tuple(chunk[: len(shape)])
    limits = tuple(None if axis in unlimited else extent + more for axis, extent in enumerate(shape))
    rng = np.random.default_rng(seed)
    options = {"compression": "gzip"} if filtered else {}
    with h5py.File("x", "w", driver="core", backing_store=False, libver=libver, userblock_size=512) as file:
        node = file.create_dataset("x", shape, "u1", chunks=chunks, maxshape=limits, **options)
        wanted: dict[int, bytes] = {}
        for number, place in enumerate(itertools.product(*map(range, grid))):
            if rng.random() < 0.7:
                stored = bytes([number % 256]) * (int(np.prod(chunks)) + number % 3 * filtered)
                node.id.write_direct_chunk(tuple(np.multiply(place, chunks)), stored, number % 2 * filtered)
                wanted[number] = stored
        offsets, sizes, masks = read_chunk_table(node, tuple(grid))
        file.flush()
        image = file.id.get_file_image()
    assert np.flatnonzero(offsets >= 0).tolist() == list(wanted)
    base = image.find(b"\x89HDF") - 512  # the image may begin behind the user block
    for number, stored in wanted.items():
        start = int(offsets[number]) + base
        assert image[start : start + int(sizes[number])] == stored
        assert masks[number] == number % 2 * filtered


def info(offset: tuple[int, ...], address: int = 0) -> SimpleNamespace:
    return SimpleNamespace(chunk_offset=offset, byte_offset=address)


class TestProbe:
    """What other versions of libhdf5 do: they cannot be loaded here, so what they would report is made up."""

    def test_the_one_that_is_loaded(self) -> None:
        assert not probe().counts_chunks
        assert probe() is probe()  # once per process

    @pytest.mark.parametrize(
        ("plain", "array", "expected"),
        [
            (info((2,), 4000), info((1, 0)), Reports()),
            (info((2,), 3488), info((1, 0)), Reports(without_user_block=True)),
            (info((1,), 4000), info((0, 1)), Reports(counts_chunks=True, rotated=True)),
        ],
    )
    def test_ways_that_are_known(self, plain: Any, array: Any, expected: Reports) -> None:
        assert chunk_table._judge(plain, 4000, array) == expected

    @pytest.mark.parametrize(
        ("plain", "array"),
        [
            (info((2,), 4001), info((1, 0))),
            (info((3,), 4000), info((1, 0))),
            (info((2,), 4000), info((1, 1))),
        ],
    )
    def test_ways_that_are_not(self, plain: Any, array: Any) -> None:
        with pytest.raises(DataError, match="use another version of h5py"):
            chunk_table._judge(plain, 4000, array)

    def test_old_ways_are_corrected(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with h5py.File(tmp_path / "x.h5", "w", userblock_size=512) as file:
            file.create_dataset("x", data=np.arange(6, dtype="i4"), chunks=(2,))
            right = read_chunk_table(file["x"], (3,))
            found: list[Any] = []
            file["x"].id.chunk_iter(found.append)
            old = [
                item._replace(chunk_offset=(item.chunk_offset[0] // 2,), byte_offset=item.byte_offset - 512)
                for item in found
            ]
            node = SimpleNamespace(
                chunks=(2,),
                shape=(6,),
                maxshape=(6,),
                file=file,
                id=SimpleNamespace(chunk_iter=lambda take: [take(item) for item in old]),
            )
            monkeypatch.setattr(chunk_table, "probe", lambda: Reports(True, True))
            for one, two in zip(right, read_chunk_table(node, (3,)), strict=True):
                assert one.tolist() == two.tolist()

    def test_an_axis_without_end_where_libhdf5_cannot_be_asked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with h5py.File(tmp_path / "x.h5", "w", libver="latest") as file:
            file.create_dataset("x", data=np.arange(6).reshape(2, 3), chunks=(1, 1), maxshape=(2, None))
        monkeypatch.setattr(chunk_table, "_libhdf5", lambda name: None)
        monkeypatch.setattr(chunk_table, "probe", lambda: Reports(rotated=True))
        with pytest.raises(
            DataError, match="'/x' is unlimited along axis 1, and this libhdf5 cannot be asked"
        ):
            open_dataset(tmp_path / "x.h5", "x")


def test_chunks_outside_the_shape(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        node = file.create_dataset("x", data=np.arange(6), chunks=(2,))
        with pytest.raises(DataError, match=r"has chunks outside its shape \(6,\)"):
            read_chunk_table(node, (2,))


def test_a_hundred_thousand_chunks_take_less_than_two_seconds(tmp_path: Path) -> None:
    """The bar of this project; measured here: 0.3 s."""
    count = 100_000
    with h5py.File(tmp_path / "x.h5", "w") as file:
        write = file.create_dataset("x", (count, 2), "u1", chunks=(1, 2)).id.write_direct_chunk
        for row in range(count):
            write((row, 0), b"ab")
        file.create_dataset("_digests/x", data=np.zeros(count, np.uint64))
    for read in (lambda path: read_index(path, "x"), lambda path: open_dataset(path, "x").index):
        begun_s = time.perf_counter()
        index = read(tmp_path / "x.h5")
        assert time.perf_counter() - begun_s < 2
        assert index is not None
        assert (np.diff(index.offsets) == 2).mean() > 0.9
        assert len(pickle.dumps(index)) < 30 * count  # it is broadcast


class TestDecoding:
    """From stored bytes to values."""

    def index(self, **changes: Any) -> ChunkIndex:
        given: dict[str, Any] = {
            "path": Path("/x.h5"),
            "dataset": "x",
            "shape": (5, 2),
            "dtype": np.dtype(">i2"),
            "chunk_shape": (3, 2),
            "pipeline": FilterPipeline(),
            "offsets": np.array([100, -1]),
            "sizes": np.array([12, 0]),
            "masks": np.zeros(2, np.uint32),
        }
        return ChunkIndex(**{**given, **changes})

    def test_byte_order(self) -> None:
        index, values = self.index(), np.arange(6, dtype=">i2").reshape(3, 2)
        decoded = index.decode(0, values.tobytes())
        assert (decoded.dtype, decoded.tolist()) == (np.dtype("=i2"), values.tolist())
        out = np.empty((3, 2), ">i2")
        index.decode_into(0, values.tobytes(), out)
        assert out.tobytes() == values.tobytes()

    def test_a_chunk_that_was_never_written(self) -> None:
        index = self.index(fill=np.array(-7, ">i2").tobytes())
        assert index.decode(1, b"").tolist() == [[-7, -7]] * 3
        pairs = self.index(fill=np.array([1, 2], ">i2").tobytes())  # of an array type (2,)
        assert pairs.decode(1, b"").tolist() == [[1, 2]] * 3

    def test_the_grid_and_what_a_chunk_holds(self) -> None:
        index = self.index()
        assert index.grid == (2, 1)
        assert index.region(1) == (slice(3, 5), slice(0, 2))

    def test_a_short_piece_of_a_contiguous_dataset(self) -> None:
        index = self.index(contiguous=True, offsets=np.array([100, 112]), sizes=np.array([12, 8]))
        values = np.arange(4, dtype=">i2").reshape(2, 2)
        assert index.decode(1, values.tobytes()).tolist() == [[0, 1], [2, 3], [0, 0]]
        with pytest.raises(DataError, match=r"chunk 1 of 2 \(byte 112, 8 bytes stored\): 7 bytes were read"):
            index.decode(1, bytes(7))

    @pytest.mark.parametrize(
        ("digests", "mend"),
        [(None, "copy the file anew from a good copy$"), (np.zeros(2, np.uint64), "or pack the source")],
    )
    def test_the_mend_is_that_of_the_kind_of_file(self, digests: Any, mend: str) -> None:
        with pytest.raises(DataError, match=mend):
            self.index(digests=digests).decode(0, bytes(3))
