"""The promise to other programs: h5py with hdf5plugin reads what we write, and we read what they write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

from hpctrain.h5.codecs import CODECS
from hpctrain.h5.index import ChunkIndex, digest_of, read_index
from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.h5.ragged import Ragged

# Knows nothing of hpctrain: only h5py, hdf5plugin and NumPy, and the values to compare with.
PLAIN_READER = """
import glob, sys, h5py, hdf5plugin, numpy as np
wanted = np.load(sys.argv[1])
for folder in sys.argv[2:]:
    shards = sorted(glob.glob(folder + "/shard-*.h5"))
    for name in wanted.files:
        parts, base = [], 0
        for shard in shards:
            with h5py.File(shard, "r") as file:
                part = file[name][...]
                if name.endswith("_offsets"):
                    part = part[(1 if parts else 0):] + base
                    base = part[-1]
                parts.append(part)
        found = np.concatenate(parts)
        assert found.dtype == wanted[name].dtype, (name, found.dtype, wanted[name].dtype)
        assert found.shape == wanted[name].shape, (name, found.shape, wanted[name].shape)
        assert found.tobytes() == wanted[name].tobytes(), name
    with h5py.File(shards[0], "r") as file:
        plists = [file[name].id.get_create_plist() for name in wanted.files]
    ids = {plist.get_filter(i)[0] for plist in plists for i in range(plist.get_nfilters())}
    assert ids <= {1, 2, 32001, 32004, 32015}, ids
    print(len(shards))
assert not any(module.startswith("hpctrain") for module in sys.modules)
"""
NUM_SAMPLES = 101
CHUNKS = (1, 7, 64, 101)


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    dense = {
        dtype.strip("<>") + "_" * dtype.startswith(">"): (rng.normal(size=(NUM_SAMPLES, 5)) * 9).astype(dtype)
        for dtype in ("<i4", "<f2", "<f4", "<f8", ">f4", "<i8")
    }
    return {
        **dense,
        "u1": rng.integers(0, 256, (NUM_SAMPLES, 6, 4, 3), dtype=np.uint8),
        "flag": rng.integers(0, 2, NUM_SAMPLES).astype(bool),
        "text": Ragged.from_text("déjà vu " * int(k) for k in rng.integers(0, 300, NUM_SAMPLES)),
        "tokens": Ragged.from_rows((np.arange(k) for k in rng.integers(0, 9, NUM_SAMPLES)), np.int32),
    }


@pytest.mark.parametrize("codec", CODECS)
def test_a_plain_script_reads_every_value(tmp_path: Path, codec: str) -> None:
    data = arrays()
    sets = [tmp_path / f"set-{chunk_samples}" for chunk_samples in CHUNKS]
    for folder, chunk_samples in zip(sets, CHUNKS, strict=True):
        pack_arrays(data, folder, PackOptions(codec=codec, chunk_samples=chunk_samples, shard_mib=0.01))
    wanted: dict[str, np.ndarray] = {}
    for name, value in data.items():
        if isinstance(value, Ragged):
            wanted |= {name: value.values, f"{name}_offsets": value.offsets}
        else:
            wanted[name] = value.astype(np.uint8 if value.dtype == bool else value.dtype.newbyteorder("<"))
    np.savez(tmp_path / "wanted.npz", **wanted)
    command = [sys.executable, "-c", PLAIN_READER, str(tmp_path / "wanted.npz"), *map(str, sets)]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, timeout=60, capture_output=True, text=True, env=env, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    num_shards = [int(line) for line in done.stdout.split()]
    assert num_shards[0] > 1
    assert num_shards[-1] == 1


def index_of(path: Path, name: str = "x") -> ChunkIndex:
    """The index of a file that has no digests of ours: they are made from its chunks."""
    with h5py.File(path, "r") as file:
        dataset = file[name]
        grid = np.ndindex(*(-(-n // c) for n, c in zip(dataset.shape, dataset.chunks, strict=True)))
        starts = [tuple(i * c for i, c in zip(at, dataset.chunks, strict=True)) for at in grid]
        digests = [digest_of(dataset.id.read_direct_chunk(start)[1]) for start in starts]
    return read_index(path, name, np.array(digests, np.uint64))


def assemble(index: ChunkIndex) -> np.ndarray:
    """The whole dataset from its chunks, read by offset and size and decoded here."""
    out = np.empty(index.shape, index.dtype.newbyteorder("="))
    grid = list(np.ndindex(*(-(-n // c) for n, c in zip(index.shape, index.chunk_shape, strict=True))))
    raw = index.path.read_bytes()
    for chunk, at in enumerate(grid):
        stored = raw[index.offsets[chunk] : index.offsets[chunk] + index.sizes[chunk]]
        assert digest_of(stored) == index.digests[chunk]
        where = tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, index.chunk_shape, strict=True))
        part = out[where]
        part[...] = index.decode(chunk, stored)[tuple(slice(0, extent) for extent in part.shape)]
    return out


WRITERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gzip": {"compression": "gzip", "compression_opts": 6},
    "gzip+shuffle": {"compression": "gzip", "shuffle": True},
    "blosc-lz4": {"compression": hdf5plugin.Blosc(cname="lz4", shuffle=hdf5plugin.Blosc.SHUFFLE)},
    "blosc-zstd-bit": {"compression": hdf5plugin.Blosc(cname="zstd", shuffle=hdf5plugin.Blosc.BITSHUFFLE)},
    "blosc-blosclz": {"compression": hdf5plugin.Blosc(cname="blosclz")},
    "blosc-zlib": {"compression": hdf5plugin.Blosc(cname="zlib")},
    "lz4": {"compression": hdf5plugin.LZ4()},
    "lz4-blocks": {"compression": hdf5plugin.LZ4(nbytes=256)},
    "zstd": {"compression": hdf5plugin.Zstd(clevel=5)},
    "shuffle+zstd": {"compression": hdf5plugin.Zstd(), "shuffle": True},
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("dtype", ["u1", "<i4", "<f4", ">f4", "<f8"])
@pytest.mark.parametrize("kind", ["smooth", "noise"])
def test_files_of_other_writers_decode(tmp_path: Path, writer: str, dtype: str, kind: str) -> None:
    """2-D chunk grids with partial edges; noise makes some filters skip chunks (their mask bit is set)."""
    rng = np.random.default_rng(0)
    values = np.arange(53 * 29) // 5 % 100 if kind == "smooth" else rng.integers(0, 2**31, 53 * 29)
    data = values.astype(dtype).reshape(53, 29)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=data, chunks=(10, 8), **WRITERS[writer])
    index = index_of(tmp_path / "x.h5")
    assert index.num_chunks == 6 * 4
    assert np.array_equal(assemble(index), data)


def test_a_skipped_filter_is_seen_in_the_mask(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, (4, 1000), dtype=np.uint8)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=data, chunks=(1, 1000), compression=hdf5plugin.Blosc(cname="lz4"))
        file["x"].id.write_direct_chunk((2, 0), data[2].tobytes(), 1)
    index = index_of(tmp_path / "x.h5")
    assert index.masks[2] == 1
    assert np.array_equal(assemble(index), data)


def test_chunk_addresses_include_the_user_block(tmp_path: Path) -> None:
    data = np.arange(1000, dtype="<i4").reshape(100, 10)
    with h5py.File(tmp_path / "x.h5", "w", userblock_size=1024) as file:
        file.create_dataset("x", data=data, chunks=(7, 10), compression="gzip", shuffle=True)
    index = index_of(tmp_path / "x.h5")
    assert index.offsets.min() >= 1024
    assert np.array_equal(assemble(index), data)


@pytest.mark.parametrize("libver", ["earliest", "v108", "v110", "latest"])
def test_every_kind_of_chunk_table(tmp_path: Path, libver: str) -> None:
    """B-tree 1, fixed array, extensible array, B-tree 2 and single chunk, by format version and maximum shape."""
    data = np.arange(600, dtype="<f4").reshape(60, 10)
    shapes = {"fixed": (60, 10), "one": (None, 10), "two": (None, None)}
    with h5py.File(tmp_path / "x.h5", "w", libver=libver) as file:
        for name, maxshape in shapes.items():
            file.create_dataset(name, data=data, chunks=(7, 4), maxshape=maxshape, compression="gzip")
        file.create_dataset("single", data=data, chunks=(60, 10), compression="gzip")
    for name in (*shapes, "single"):
        assert np.array_equal(assemble(index_of(tmp_path / "x.h5", name)), data), name
