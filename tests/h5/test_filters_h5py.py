"""Every filter against files that h5py and hdf5plugin write: the bits are those that libhdf5 reads."""

from __future__ import annotations

import io
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

from hpctrain.h5.filters import FLETCHER32, SHUFFLE, FilterPipeline, why_not
from tests.h5.filter_files import bits, chunks_of, filters_of, noise, one_chunk, smooth, stored_chunks
from tests.support import ROOT

REAL_FILES = ROOT.parent / "shared" / "data" / "hdf5-files"
# The file that crashes libhdf5, and the one of 2 GiB in one chunk.
NOT_READ_HERE = ("cve-2024-32609", "over_maxint")

OPTIONS: dict[str, dict[str, Any]] = {
    "gzip": {"compression": "gzip"},
    "gzip 0": {"compression": "gzip", "compression_opts": 0},
    "shuffle": {"shuffle": True},
    "shuffle, gzip": {"shuffle": True, "compression": "gzip", "compression_opts": 9},
    "fletcher32": {"fletcher32": True},
    "shuffle, gzip, fletcher32": {"shuffle": True, "compression": "gzip", "fletcher32": True},
    "lzf": {"compression": "lzf"},
    "shuffle, lzf, fletcher32": {"shuffle": True, "compression": "lzf", "fletcher32": True},
    "shuffle, blosc": {"shuffle": True, **hdf5plugin.Blosc()},
    **{
        f"blosc {codec} {shuffle}": dict(hdf5plugin.Blosc(cname=codec, shuffle=shuffle))
        for codec, shuffle in (("blosclz", 1), ("lz4", 0), ("lz4", 2), ("lz4hc", 1), ("zlib", 2), ("zstd", 1))
    },
    **{
        f"blosc2 {codec} {filters}": dict(hdf5plugin.Blosc2(cname=codec, filters=filters))
        for codec, filters in (("blosclz", 0), ("lz4", 1), ("lz4hc", 2), ("zlib", 1), ("zstd", 3))
    },
    "lz4": dict(hdf5plugin.LZ4()),
    "lz4, blocks": dict(hdf5plugin.LZ4(nbytes=256)),
    "zstd": dict(hdf5plugin.Zstd()),
    "shuffle, zstd": {"shuffle": True, **hdf5plugin.Zstd()},
    "bitshuffle none": dict(hdf5plugin.Bitshuffle(cname="none")),
    "bitshuffle lz4": dict(hdf5plugin.Bitshuffle(cname="lz4")),
    "bitshuffle lz4, blocks": dict(hdf5plugin.Bitshuffle(cname="lz4", nelems=64)),
    "bitshuffle zstd": dict(hdf5plugin.Bitshuffle(cname="zstd", nelems=128)),
    "bitshuffle zstd, fletcher32": {"fletcher32": True, **hdf5plugin.Bitshuffle(cname="zstd")},
}
RECORD = np.dtype([("a", "<f4"), ("b", "u1"), ("c", ">i4"), ("d", "<f8")])
SHAPES = (((1,), (1,)), ((1000,), (300,)), ((20, 33), (7, 10)), ((3, 5, 7, 9), (2, 5, 4, 9)))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["u1", ">f4", "<f8", "S10"])
def test_chunks_decode_to_what_libhdf5_reads(name: str, dtype: str) -> None:
    for shape, chunks in SHAPES:
        values = smooth("<i4", shape).astype(dtype)
        stored = chunks_of(values, chunks, **OPTIONS[name])
        assert len(stored) == np.prod(
            [-(-extent // step) for extent, step in zip(shape, chunks, strict=True)]
        )
        for chunk in stored:
            assert bits(chunk.decode()) == bits(chunk.values), (shape, chunks, chunk.filters)


@pytest.mark.parametrize("name", OPTIONS)
def test_other_types(name: str) -> None:
    """Compound, boolean, complex and array types: item sizes of 17, 1, 16 and 12."""
    numbers = np.arange(500)
    record = np.zeros(500, RECORD)
    for field in RECORD.names or ():
        record[field] = numbers % 100
    for values in (record, numbers % 3 == 0, numbers * 1j):
        for chunk in chunks_of(values, (120,), **OPTIONS[name]):
            assert bits(chunk.decode()) == bits(chunk.values), values.dtype


@pytest.mark.parametrize("name", OPTIONS)
def test_chunks_that_do_not_compress(name: str) -> None:
    """LZF and Blosc leave themselves out and set their bit of the mask; the others grow."""
    for values in (noise(4096), noise(5000).view("<f4")):
        chunk = one_chunk(values, **OPTIONS[name])
        assert bits(chunk.decode()) == bits(chunk.values)
        assert (chunk.mask != 0) <= ("lzf" in name or "blosc" in name)


@pytest.mark.parametrize("fill", [0, 7])
@pytest.mark.parametrize("name", OPTIONS)
def test_constant_chunks(name: str, fill: int) -> None:
    """Zeros are special in Blosc2: nothing of them is stored."""
    for shape in ((3000,), (50, 60)):
        chunk = one_chunk(np.full(shape, fill, "<i4"), **OPTIONS[name])
        assert bits(chunk.decode()) == bits(chunk.values)


def test_lzf_and_blosc_are_left_out_where_they_do_not_gain() -> None:
    for options in ({"compression": "lzf"}, hdf5plugin.Blosc(), {"shuffle": True, "compression": "lzf"}):
        assert one_chunk(noise(4096).view("<f4"), **options).mask != 0


@pytest.mark.parametrize("mask", range(8))
def test_any_filter_may_be_left_out(mask: int) -> None:
    """shuffle, deflate and fletcher32 with each mask, written as such and read by libhdf5 too."""
    values, buffer = smooth("<f4", (500,)), io.BytesIO()
    with h5py.File(buffer, "w") as file:
        options = OPTIONS["shuffle, gzip, fletcher32"]
        dataset = file.create_dataset("x", (500,), "<f4", chunks=(500,), **options)
        used = tuple(item for i, item in enumerate(filters_of(dataset)) if not mask >> i & 1)
        dataset.id.write_direct_chunk((0,), FilterPipeline(used).encode(values), mask)
    with h5py.File(buffer, "r") as file:  # before it is closed, the file says another mask
        (chunk,) = stored_chunks(file["x"])
    assert chunk.mask == mask
    assert bits(chunk.values) == bits(values)
    assert bits(chunk.decode()) == bits(values)


def test_the_sum_may_come_first() -> None:
    """fletcher32, shuffle, deflate: what is inflated and shuffled has four bytes more than the chunk."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((250,))
    plist.set_fletcher32()
    plist.set_shuffle()
    plist.set_deflate(4)
    values = smooth("<f8", (1000,))
    with h5py.File.in_memory() as file:
        space = h5py.h5s.create_simple((1000,))
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F64LE, space, plist)
        file["x"][...] = values
        chunks = stored_chunks(file["x"])
    assert [item.id for item in chunks[0].filters][:2] == [FLETCHER32, SHUFFLE]
    for chunk in chunks:
        assert bits(chunk.decode()) == bits(chunk.values)


@pytest.mark.skipif(not REAL_FILES.is_dir(), reason="the real files are not beside this checkout")
def test_real_files() -> None:
    """Every chunk of every dataset that can be listed and whose filters are decoded here."""
    seen: dict[tuple[int, ...], int] = {}
    for path in sorted(REAL_FILES.glob("*.h5")):
        if any(name in path.name for name in NOT_READ_HERE):
            continue
        for dataset in readable(path):
            for chunk in stored_chunks(dataset):
                names = chunk.values.dtype.names
                for part in names or (...,):  # libhdf5 clears the padding of compounds
                    assert bits(chunk.decode()[part]) == bits(chunk.values[part]), (path.name, dataset.name)
                key = tuple(item.id for item in chunk.filters)
                seen[key] = seen.get(key, 0) + 1
    for filters in (
        (1,),
        (2, 1),
        (1, 3),
        (3, 2, 1),
        (4,),
        (32000,),
        (32001,),
        (2, 32001),
        (32004,),
        (32008,),
        (32015,),
    ):
        assert seen[filters] > 0


def readable(path: Any) -> list[h5py.Dataset]:
    """Chunked datasets with filters that are decoded here, and a type of the same size in NumPy."""
    try:
        file = h5py.File(path, "r")
        found: list[h5py.Dataset] = []
        file.visititems(lambda _, item: found.append(item) if isinstance(item, h5py.Dataset) else None)
    except (OSError, RuntimeError, KeyError):  # the file, or an object in it, is damaged
        return []
    return [dataset for dataset in found if is_decodable(dataset)]


def is_decodable(dataset: h5py.Dataset) -> bool:
    try:
        dtype = dataset.dtype
    except TypeError:
        return False
    same_size = dataset.id.get_type().get_size() == dtype.itemsize
    return (
        dataset.chunks is not None and same_size and not dtype.hasobject and not why_not(filters_of(dataset))
    )
