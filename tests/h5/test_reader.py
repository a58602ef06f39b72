"""Reading: verified bytes from the shards, decoded sample chunks."""

from __future__ import annotations

import errno
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError, StorageError
from hpctrain.h5 import chunks
from hpctrain.h5.chunks import PageCache
from hpctrain.h5.codecs import CODECS
from hpctrain.h5.filters import FilterPipeline
from hpctrain.h5.index import ChunkIndex
from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.h5.packed import PackedSet, open_packed
from hpctrain.h5.reader import FileSource, Ragged, read_sample_chunk


def arrays(num_samples: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (num_samples, 3, 5), dtype=np.uint8),
        "value": rng.normal(size=num_samples).astype(">f8"),
        "text": Ragged.from_text(
            "ä" * int(n) for n in rng.integers(0, 2000, num_samples) * rng.integers(0, 2)
        ),
        "tokens": Ragged.from_rows((np.arange(n) for n in rng.integers(0, 5000, num_samples)), np.int32),
    }


def flip(path: Path, position: int, bit: int = 0x10) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= bit
    path.write_bytes(raw)


@pytest.fixture
def packed(tmp_path: Path) -> PackedSet:
    pack_arrays(arrays(50), tmp_path / "set", PackOptions(codec="gzip", chunk_samples=8, shard_mib=0.1))
    return open_packed(tmp_path / "set")


@given(
    num_samples=st.integers(1, 40),
    chunk_samples=st.integers(1, 45),
    shard_kib=st.integers(1, 200),
    codec=st.sampled_from(CODECS),
    seed=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_sample_chunks_give_back_the_samples(
    tmp_path_factory: pytest.TempPathFactory,
    num_samples: int,
    chunk_samples: int,
    shard_kib: int,
    codec: str,
    seed: int,
) -> None:
    data = arrays(num_samples, seed)
    root = tmp_path_factory.mktemp("packed") / "set"
    pack_arrays(data, root, PackOptions(codec=codec, chunk_samples=chunk_samples, shard_mib=shard_kib / 1024))
    packed = pickle.loads(pickle.dumps(open_packed(root)))
    start = 0
    with FileSource() as source:
        for chunk, rows in enumerate(packed.chunk_sizes):
            fields = read_sample_chunk(packed, source, chunk)
            assert list(fields) == list(data)
            for name, wanted in data.items():
                found = fields[name]
                if isinstance(found, Ragged):
                    part = wanted.take(slice(start, start + rows))
                    assert np.array_equal(found.offsets, part.offsets)
                    assert np.array_equal(found.values, part.values)
                    assert found.values.dtype == part.values.dtype
                else:
                    assert found.dtype.isnative
                    assert np.array_equal(found, wanted[start : start + rows])
            start += int(rows)
    assert start == num_samples


def test_chunks_are_numbered_over_the_shards(packed: PackedSet) -> None:
    assert len(packed.shards) > 1
    located = [packed.locate(chunk) for chunk in range(len(packed.chunk_sizes))]
    rows = [-(-shard.num_samples // packed.chunk_samples) for shard in packed.shards]
    assert located == [(shard, row) for shard, count in enumerate(rows) for row in range(count)]
    for chunk in (-1, len(packed.chunk_sizes)):
        with pytest.raises(IndexError, match="sample chunk"):
            packed.locate(chunk)


@pytest.mark.parametrize("name", ["image", "text"])
@pytest.mark.parametrize("where", ["first byte", "last byte"])
def test_one_flipped_byte_is_found_and_placed(packed: PackedSet, name: str, where: str) -> None:
    shard = packed.shards[0]
    index = {**shard.dense, **shard.flat}[name]
    offset, size = int(index.offsets[0]), int(index.sizes[0])
    flip(index.path, offset + (0 if where == "first byte" else size - 1))
    with FileSource() as source, pytest.raises(DataError) as caught:
        read_sample_chunk(packed, source, 0)
    message = str(caught.value)
    for part in (str(index.path), repr(name), "chunk 0 of", f"byte {offset}", "digest", "copy the file anew"):
        assert part in message


def test_a_file_cut_or_gone_after_opening_is_a_data_error(packed: PackedSet) -> None:
    path = packed.shards[-1].path
    chunk = len(packed.chunk_sizes) - 1
    os.truncate(path, 100)
    with FileSource() as source, pytest.raises(DataError, match=r"the file ends after 0 of these bytes"):
        read_sample_chunk(packed, source, chunk)
    path.unlink()
    with FileSource() as source, pytest.raises(DataError, match="there is no such file any more"):
        read_sample_chunk(packed, source, chunk)


def test_an_io_error_is_a_storage_error(packed: PackedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    # No disk here fails on demand, so preadv is replaced.
    def fail(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(chunks.os, "preadv", fail)
    with FileSource() as source, pytest.raises(StorageError, match=r"errno 5.*check the filesystem"):
        read_sample_chunk(packed, source, 0)


def test_short_reads_are_continued(packed: PackedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    # Local files are read in one go; network filesystems, and reads cut by signals, are not.
    whole = os.preadv
    monkeypatch.setattr(chunks.os, "preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:7]], offset))
    with FileSource() as source:
        fields = read_sample_chunk(packed, source, 0)
    assert np.array_equal(fields["image"], arrays(50)["image"][:8])


@pytest.mark.parametrize("page_cache", ["keep", "drop", "bypass"])
def test_the_last_bytes_of_a_file(
    tmp_path: Path, page_cache: PageCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O_DIRECT takes whole blocks only: some filesystems refuse to be asked for the rest behind the end of the file."""
    whole, asked = os.preadv, []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        asked.extend((offset, len(buffers[0])))
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(chunks.os, "preadv", preadv)
    path = tmp_path / "file"
    path.write_bytes(bytes(range(250)) * 40)
    place, size, mask = np.array([9_990]), np.array([10]), np.zeros(1, np.uint32)
    index = ChunkIndex(path, "x", (10,), np.dtype("u1"), (10,), FilterPipeline(), place, size, mask)
    with FileSource(page_cache) as source:
        assert bytes(source.read(index, 0)) == bytes(range(240, 250))
        os.truncate(path, 9_995)
        with pytest.raises(DataError, match=r"the file ends after 5 of these bytes"):
            source.read(index, 0)
    if page_cache == "bypass":
        assert not [number for number in asked if number % 4096]


def test_files_are_opened_once_and_closed(packed: PackedSet) -> None:
    def open_shards() -> int:
        names = [os.readlink(f"/proc/self/fd/{item}") for item in os.listdir("/proc/self/fd") if item.isdigit()
                 and os.path.lexists(f"/proc/self/fd/{item}")]  # fmt: skip
        return sum(name.startswith(str(packed.root)) for name in names)

    source = FileSource()
    assert open_shards() == 0
    with ThreadPoolExecutor(8) as pool:
        everything = range(len(packed.chunk_sizes))
        list(pool.map(lambda chunk: read_sample_chunk(packed, source, chunk), [*everything] * 4))
    assert open_shards() == len(packed.shards)
    source.close()
    assert open_shards() == 0
    read_sample_chunk(packed, source, 0)
    source.close()
