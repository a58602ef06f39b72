"""Indexes kept beside the run: the same as anew, and anew whenever the file, the question or the cache changed."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError
from hpctrain.h5 import index_cache
from hpctrain.h5.dataset import Dataset, open_dataset
from hpctrain.h5.index_cache import cached_dataset
from tests.h5.user_files import random_values, write

TYPES = [
    ">f4",
    "S5",
    "?",
    "<c8",
    "V3",
    np.dtype([("a", ">i2"), ("b", [("c", "<f8", (2, 3)), ("d", "S2")])], align=True),
]


class Openings:
    """Counts how often a dataset is really opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(index_cache, "open_dataset", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Dataset:
        self.count += 1
        return open_dataset(*args, **kwargs)


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> Openings:
    return Openings(monkeypatch)


def plain(dataset: Dataset) -> dict[str, Any]:
    """A dataset as values that can be compared."""
    values = dataclasses.asdict(dataset)
    for name in ("offsets", "sizes", "masks"):
        values["index"][name] = values["index"][name].tolist()
    return values


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(
        tmp_path / "x.h5", x=(np.arange(1000), {"chunks": (7,), "compression": "gzip", "shuffle": True})
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("chunks", [None, (3, 2)])
def test_what_is_kept_is_what_was_made(
    tmp_path: Path, openings: Openings, dtype: Any, chunks: tuple[int, ...] | None
) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        node = file.create_dataset("x", (10, 5), dtype, chunks=chunks, shuffle=chunks is not None)
        node[:4] = random_values(np.dtype(dtype), (4, 5), 0)
    first = cached_dataset(tmp_path / "made" / "cache", path, "x")
    again = cached_dataset(tmp_path / "made" / "cache", path, "x")
    assert openings.count == 1
    assert plain(first) == plain(again)
    assert first.read_rows(2, 6).tobytes() == again.read_rows(2, 6).tobytes() or first.dtype.names


def test_another_file_or_question_is_opened_anew(tmp_path: Path, path: Path, openings: Openings) -> None:
    cached_dataset(tmp_path / "cache", path, "x")
    assert cached_dataset(tmp_path / "cache", path, "x", verify_chunks=9).compared == 9
    assert openings.count == 2
    write(path, x=(np.arange(500), {"chunks": (7,)}))
    assert cached_dataset(tmp_path / "cache", path, "x", verify_chunks=9).num_rows == 500
    assert openings.count == 3
    os.utime(path, ns=(1, 1))
    cached_dataset(tmp_path / "cache", path, "x", verify_chunks=9)
    assert openings.count == 4
    assert len(list((tmp_path / "cache").iterdir())) == 1  # what is stale was replaced


def test_a_link_to_another_file_is_followed(tmp_path: Path, path: Path, openings: Openings) -> None:
    with h5py.File(tmp_path / "link.h5", "w") as file:
        file["y"] = h5py.ExternalLink("x.h5", "/x")
    for _ in range(2):
        assert cached_dataset(tmp_path / "cache", tmp_path / "link.h5", "y").path == path
    assert openings.count == 1
    os.utime(path, ns=(1, 1))  # the file that the link leads to
    cached_dataset(tmp_path / "cache", tmp_path / "link.h5", "y")
    assert openings.count == 2


def test_errors_and_the_libhdf5_road_are_not_kept(tmp_path: Path, path: Path, openings: Openings) -> None:
    for _ in range(2):
        with pytest.raises(DataError):
            cached_dataset(tmp_path / "cache", path, "nothing")
    write(path, x=(np.arange(9), dict(hdf5plugin.BZip2())))
    for _ in range(2):
        assert cached_dataset(tmp_path / "cache", path, "x").road == "libhdf5"
    assert openings.count == 4
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, path: Path, openings: Openings
) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "cache", None):
        assert cached_dataset(place, path, "x").num_rows == 1000
    assert openings.count == 2


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_cache_is_made_anew(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Damage anywhere, or another file's content with a digest that is right."""
    folder = tmp_path_factory.mktemp("damage")
    path = write(folder / "x.h5", x=(np.arange(100), {"chunks": (9,), "compression": "gzip"}))
    right = plain(cached_dataset(folder / "cache", path, "x"))
    (place,) = (folder / "cache").iterdir()
    content = bytearray(place.read_bytes())
    places = st.integers(0, 10**6)  # the length differs from run to run
    kind = data.draw(st.sampled_from(["flip", "cut", "text", "header"]))
    if kind == "flip":
        content[data.draw(places) % len(content)] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del content[data.draw(places) % len(content) :]
    elif kind == "text":
        content = bytearray(data.draw(st.binary(max_size=100)))
    else:
        content = bytearray(forged(bytes(content), data))
    place.write_bytes(content)
    assert plain(cached_dataset(folder / "cache", path, "x")) == right
    assert plain(cached_dataset(folder / "cache", path, "x")) == right


def forged(content: bytes, data: st.DataObject) -> bytes:
    """The same with another entry in the header and a digest that is right."""
    length = int.from_bytes(content[16:20], "little")
    header = json.loads(content[20 : 20 + length])
    keys = ["num_chunks", "filters", "dtype", "home_key", "wanted", "shape", "chunk_shape", "fill"]
    wrong = [None, -1, 10**9, [[305, []]], ["O"], "O", [0], "00"]
    header[data.draw(st.sampled_from(keys))] = data.draw(st.sampled_from(wrong))
    text = json.dumps(header).encode()
    body = len(text).to_bytes(4, "little") + text + content[20 + length :]
    return index_cache.xxhash.xxh3_128_digest(body) + body
