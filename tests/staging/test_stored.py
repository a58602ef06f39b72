"""The numbering of stored chunks, and which sample chunks need each."""

from __future__ import annotations

import itertools
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.h5.packed import PackedSet, open_packed
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.reader import FileSource, read_sample_chunk
from hpctrain.h5.userset import open_files
from hpctrain.staging.message import pack_message, receive_message, send_message, unpack_message
from hpctrain.staging.stored import Slots, StoredChunks, file_keys_of, stored_chunks
from tests.support import small_set


class Recording:
    """A source that notes which slots are read."""

    def __init__(self, files: FileSource, slots: Slots) -> None:
        self.files, self.slots, self.read_slots = files, slots, set()

    def read(self, index, chunk, *allocate):
        self.read_slots.add(self.slots.slot(index, chunk))
        return self.files.read(index, chunk, *allocate)


def slots_needed(packed: PackedSet, slots: Slots, chunk: int) -> set[int]:
    with FileSource() as files:
        source = Recording(files, slots)
        read_sample_chunk(packed, source, chunk)
        return source.read_slots


def check_needs(packed: PackedSet) -> None:
    """Every slot gets the least value of the sample chunks whose reading reads it."""
    slots = Slots(packed)
    num_chunks = len(packed.chunk_sizes)
    values = np.random.default_rng(num_chunks).permutation(num_chunks).astype(np.int64)
    expected = np.full(slots.num_slots, np.iinfo(np.int64).max)
    for chunk in range(num_chunks):
        for slot in slots_needed(packed, slots, chunk):
            expected[slot] = min(expected[slot], values[chunk])
    assert slots.least_of_sample_chunks(values).tolist() == expected.tolist()


def test_a_slot_is_needed_by_the_sample_chunks_that_read_it(tmp_path: Path) -> None:
    packed = small_set(tmp_path / "set", 503, 12)
    assert len(packed.shards) > 1
    check_needs(packed)


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 9000), min_size=1, max_size=30), chunk_samples=st.integers(1, 7))
def test_rows_of_any_length_are_found(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], chunk_samples: int
) -> None:
    rows = Ragged.from_rows([np.full(length, 7, np.int32) for length in lengths], np.int32)
    root = tmp_path_factory.mktemp("ragged") / "set"
    arrays = {"x": rows, "n": np.arange(len(lengths))}
    pack_arrays(
        arrays, root, PackOptions(codec="none", chunk_samples=chunk_samples, shard_mib=0.03, threads=1)
    )
    check_needs(open_packed(root))


def test_user_files_chunked_along_two_axes_and_not_at_all(tmp_path: Path) -> None:
    paths = []
    for name in "ab":
        paths.append(tmp_path / f"{name}.h5")
        with h5py.File(paths[-1], "w") as file:
            file.create_dataset("x", data=np.arange(60 * 9).reshape(60, 9), chunks=(7, 4))
            file.create_dataset("y", data=np.arange(60.0))
    packed = open_files(paths, {"x": "/x", "y": "/y"})
    check_needs(packed)
    stored = stored_chunks(packed, file_keys_of(packed))
    assert not stored.has_digests
    assert stored.paths == tuple(paths)


def test_the_table_has_the_places_of_all_chunks_and_passes_through_a_pipe(tmp_path: Path) -> None:
    packed = small_set(tmp_path / "set", 200, 9)
    stored, slots = stored_chunks(packed, file_keys_of(packed)), Slots(packed)
    for shard in packed.shards:
        for index in [*shard.dense.values(), *shard.flat.values()]:
            for chunk in range(index.num_chunks):
                slot = slots.slot(index, chunk)
                assert stored.paths[stored.files[slot]] == index.path
                assert (stored.offsets[slot], stored.sizes[slot]) == (
                    index.offsets[chunk],
                    index.sizes[chunk],
                )
                assert stored.digests[slot] == index.digests[chunk]
        assert all(slots.slot(table, 0) is None for table in shard.tables.values())
    head, arrays = unpack_message(pack_message(*stored.to_message()))
    again = StoredChunks.from_message(head, arrays)
    assert again.paths == stored.paths
    assert again.identity == packed.identity
    assert all(np.array_equal(getattr(again, name), getattr(stored, name)) for name in arrays)


def test_a_pipe_that_ends_within_a_message_gives_none(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    with path.open("wb") as stream:
        send_message(stream, {"a": 1}, {"x": np.arange(3)})
    content = path.read_bytes()
    for length in itertools.chain(range(0, len(content), 7), [len(content) - 1]):
        path.write_bytes(content[:length])
        with path.open("rb") as stream:
            assert receive_message(stream) is None
    path.write_bytes(content)
    with path.open("rb") as stream:
        head, arrays = receive_message(stream)
        assert (head, arrays["x"].tolist()) == ({"a": 1}, [0, 1, 2])
        assert receive_message(stream) is None
