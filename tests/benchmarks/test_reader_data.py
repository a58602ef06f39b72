from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import inputs, reader_data
from benchmarks.reader_data import DataSet, Reference, digest, random_order
from hpctrain.h5.packed import open_packed

VALUES = np.random.default_rng(0).normal(size=(21, 3, 4)).astype(np.float32)


def a_set(root: Path, values: np.ndarray = VALUES, name: str = "fields") -> DataSet:
    return DataSet.of(name, root, values, chunk_samples=4, batch=3, window=8, workers=(1, 0))


def batches(ids: list[int], sizes: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    parts = np.split(np.array(ids, np.int64), np.cumsum(sizes))
    return [(part, VALUES[part]) for part in parts]


@given(st.permutations(range(len(VALUES))), st.lists(st.integers(1, 5), max_size=4))
def test_the_digest_does_not_depend_on_order_or_batches(ids: list[int], sizes: list[int]) -> None:
    assert digest(batches(ids, sizes)) == (Reference.of(VALUES).expected(len(VALUES)), len(VALUES))


@given(st.data())
def test_the_digest_sees_what_is_wrong(data: st.DataObject) -> None:
    ids = np.arange(len(VALUES))
    values = VALUES.copy()
    at, other = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 19))
    other += other >= at
    match data.draw(st.sampled_from(["bit", "missing", "repeated", "swapped"])):
        case "bit":
            values.view(np.uint32)[at, 1, 2] ^= 1
        case "missing":
            ids, values = np.delete(ids, at), np.delete(values, at, axis=0)
        case "repeated":
            ids[at], values[at] = ids[other], values[other]
        case "swapped":
            values[[at, other]] = values[[other, at]]
    assert digest([(ids, values)]) != (Reference.of(VALUES).expected(len(VALUES)), len(VALUES))


def test_a_part_of_an_epoch_is_the_first_of_the_random_order() -> None:
    taken = random_order(len(VALUES), 0)[:5]
    assert digest([(taken, VALUES[taken])]) == (Reference.of(VALUES).expected(5), 5)
    assert sorted(random_order(len(VALUES), 7)) == list(range(len(VALUES)))
    assert random_order(len(VALUES), 7).tolist() != random_order(len(VALUES), 8).tolist()


def test_a_set_comes_back_from_its_description(tmp_path: Path) -> None:
    made = a_set(tmp_path)
    assert DataSet.load(made.folder) == made
    assert (made.sample_bytes, made.raw_bytes) == (48, 21 * 48)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_users_file_is_one_that_h5py_writes(tmp_path: Path, shuffle: bool) -> None:
    made = a_set(tmp_path)
    reader_data.write_user_file(made, VALUES, shuffle)
    with h5py.File(made.user_file(shuffle)) as file:
        rows = file["fields"]
        assert np.array_equal(rows[:], VALUES)
        assert (rows.compression, rows.compression_opts, rows.shuffle) == ("gzip", 4, shuffle)
        assert rows.chunks == (4, 3, 4)
    with h5py.File(tmp_path / "by-h5py.h5", "w") as file:
        file.create_dataset(
            "x", data=VALUES, chunks=(4, 3, 4), compression="gzip", compression_opts=4, shuffle=shuffle
        )
        size = file["x"].id.get_storage_size()
    with h5py.File(made.user_file(shuffle)) as file:
        assert file["fields"].id.get_storage_size() == pytest.approx(size, rel=0.02)


def test_packed_in_one_shard_with_every_codec(tmp_path: Path) -> None:
    made = a_set(tmp_path)
    stored = reader_data.write_packed(made, VALUES)
    assert set(stored) == {"blosc-lz4", "blosc-zstd"}
    for codec in stored:
        packed = open_packed(made.packed(codec))
        assert [shard.path for shard in packed.shards] == [made.shard(codec)]
        assert packed.chunk_samples == 4


def test_fields_have_ten_bits_of_mantissa_and_the_spectrum() -> None:
    fields = reader_data.rounded_fields(33)
    assert fields.shape == (33, 4, 128, 128)
    assert not np.any(fields.view(np.uint32) & 0x1FFF)  # 13 of 23 bits
    assert np.any(fields.view(np.uint32) & 0x2000)
    assert not np.array_equal(fields[0], fields[32])  # blocks of 32 are made with seeds of their own
    power = np.mean(np.abs(np.fft.rfft2(fields[:8])) ** 2, axis=(0, 1))
    slope = np.log(power[0, 16] / power[0, 4]) / np.log(4)
    assert slope == pytest.approx(2 * reader_data.FIELD_SLOPE, abs=1.0)


def test_pictures_beyond_the_first_part_are_taken_from_the_whole_archive(tmp_path: Path) -> None:
    assert inputs._num_among(10_000) == 10_000
    assert inputs._num_among(10_001) == 60_000
