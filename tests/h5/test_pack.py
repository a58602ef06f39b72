"""Packing: the same bytes from the same input, the right statistics, and layouts within their bounds."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from hpctrain.cli.pack import pack as command
from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.h5.codecs import CODECS
from hpctrain.h5.layout import plan_layout
from hpctrain.h5.options import PackOptions
from hpctrain.h5.pack import Watch, pack, pack_arrays, pack_path
from hpctrain.h5.packed import open_packed
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.shardfile import ShardFile
from hpctrain.h5.sources import ArraySource, Columns
from hpctrain.h5.writer import DatasetWriter, ShardWriter, writing


def arrays(num_samples: int = 300) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 256, (num_samples, 8, 8, 3), dtype=np.uint8),
        "wave": rng.normal(3, 2, (num_samples, 40)),
        "label": rng.integers(0, 5, num_samples),
        "text": Ragged.from_text("so " * int(n) for n in rng.integers(0, 50, num_samples)),
    }


def files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


@pytest.mark.parametrize("codec", CODECS)
def test_equal_input_gives_equal_bytes_for_any_number_of_threads(tmp_path: Path, codec: str) -> None:
    reports = [
        pack_arrays(
            arrays(120),
            tmp_path / f"{threads}",
            PackOptions(codec, chunk_samples=7, shard_mib=0.02, threads=threads),
        )
        for threads in (1, 2, 5)
    ]
    first = files(tmp_path / "1")
    assert len(first) > 2
    assert files(tmp_path / "2") == first
    assert files(tmp_path / "5") == first
    assert len({report.identity for report in reports}) == 1


def test_the_identity_follows_the_data(tmp_path: Path) -> None:
    data = arrays()
    before = pack_arrays(data, tmp_path / "a").identity
    data["label"] = data["label"].copy()
    data["label"][17] += 1
    assert pack_arrays(data, tmp_path / "b").identity != before


def test_mean_and_standard_deviation(tmp_path: Path) -> None:
    data = arrays()
    pack_arrays(data, tmp_path / "set", PackOptions(chunk_samples=7))
    fields = open_packed(tmp_path / "set").fields
    image = data["image"].astype(np.float64)
    assert fields["image"].mean == pytest.approx(image.mean(axis=(0, 1, 2)), rel=1e-12)
    assert fields["image"].std == pytest.approx(image.std(axis=(0, 1, 2)), rel=1e-12)
    assert fields["wave"].mean == pytest.approx(data["wave"].mean(), rel=1e-12)
    assert fields["wave"].std == pytest.approx(data["wave"].std(), rel=1e-12)
    assert isinstance(fields["label"].mean, float)
    assert fields["text"].mean is None


def test_statistics_survive_a_large_offset(tmp_path: Path) -> None:
    """Sums of squares would lose the deviation: 1e8 squared leaves no digits for 1e-3."""
    wave = 1e8 + np.random.default_rng(0).normal(0, 1e-3, 5000)
    pack_arrays({"wave": wave}, tmp_path / "set", PackOptions(chunk_samples=11))
    assert open_packed(tmp_path / "set").fields["wave"].std == pytest.approx(wave.std(), rel=1e-4)


def test_values_that_are_not_finite_give_no_statistics_and_a_warning(tmp_path: Path) -> None:
    wave = np.ones(20, np.float32)
    wave[7], wave[9] = np.nan, np.inf
    report = pack_arrays({"wave": wave, "other": np.ones(20)}, tmp_path / "set", PackOptions(chunk_samples=3))
    fields = open_packed(tmp_path / "set").fields
    assert (fields["wave"].mean, fields["wave"].std) == (None, None)
    assert (fields["other"].mean, fields["other"].std) == (1.0, 0.0)
    assert len(report.warnings) == 1
    assert "'wave' has values that are not finite" in report.warnings[0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_can_be_refused(tmp_path: Path, value: float) -> None:
    wave = np.ones((20, 3))
    wave[13, 1] = value
    fatal = {"nonfinite": "fatal"}
    with pytest.raises(
        DataError, match=rf"sample 13: field 'wave': {value} is not finite; .* nonfinite=keep"
    ):
        pack_arrays({"wave": wave}, tmp_path / "set", PackOptions(chunk_samples=4, clean=fatal))
    assert list(tmp_path.iterdir()) == []
    pack_arrays({"wave": np.ones(5), "label": np.arange(5)}, tmp_path / "set", PackOptions(clean=fatal))


def test_float_fields_are_stored_as_asked(tmp_path: Path) -> None:
    data = arrays()
    pack_arrays(data, tmp_path / "set", PackOptions(store="float16"))
    packed = open_packed(tmp_path / "set")
    assert {name: field.dtype.name for name, field in packed.fields.items()} == {
        "image": "uint8",
        "wave": "float16",
        "label": "int64",
        "text": "uint8",
    }


def test_values_beyond_the_stored_type_are_refused(tmp_path: Path) -> None:
    wave = np.zeros((50, 4))
    wave[33, 2] = -70000.5
    with pytest.raises(
        DataError, match=r"'wave', sample 33: -70000.5 is beyond float16 \(largest 65504.0\); scale"
    ):
        pack_arrays({"wave": wave}, tmp_path / "set", PackOptions(store="float16", chunk_samples=8))
    assert list(tmp_path.iterdir()) == []


class TestLayout:
    """Chunk and shard sizes."""

    @pytest.mark.parametrize(
        ("shape", "dtype", "expected"),
        [
            ((32, 32, 3), "u1", 342),
            ((28, 28), "u1", 1338),
            ((), "i8", 15625),  # a 64th of the set
            ((), "u1", 65536),  # but no less than 64 KiB
            ((600, 600, 3), "u1", 1),
            ((512, 512), "f4", 1),
        ],
    )
    def test_default_chunks_hold_1_mib_or_one_sample(
        self, shape: tuple[int, ...], dtype: str, expected: int
    ) -> None:
        array = np.broadcast_to(np.zeros((), dtype), (10**6, *shape))
        layout = plan_layout(ArraySource({"x": array}), PackOptions())
        assert layout.chunk_samples == expected
        assert layout.shard_samples % layout.chunk_samples == 0

    @pytest.mark.parametrize(
        ("num_samples", "num_values", "dtype", "sample", "expected"),
        [
            (10**6, 200 * 10**6, "i4", (), 1311),  # token rows of 800 bytes
            (10**6, 10**6 + 1, "u1", (), 32_768),  # the mean is rounded up
            (1000, 0, "u1", (), 1000),  # empty text
            (10**6, 50 * 10**6, "u1", (32, 32, 3), 342),  # the pictures are larger
        ],
    )
    def test_ragged_fields_count_by_their_mean(
        self, num_samples: int, num_values: int, dtype: str, sample: tuple[int, ...], expected: int
    ) -> None:
        values = np.broadcast_to(np.zeros((), dtype), num_values)
        offsets = np.linspace(0, num_values, num_samples + 1).astype(np.int64)
        columns: dict[str, Any] = {"tokens": Ragged(values, offsets)}
        if sample:
            columns["image"] = np.broadcast_to(np.uint8(0), (num_samples, *sample))
        assert plan_layout(ArraySource(columns), PackOptions()).chunk_samples == expected

    def test_a_chunk_of_ragged_rows_may_be_larger_than_one_of_a_dense_field(self) -> None:
        values = np.broadcast_to(np.uint8(0), 2 << 30)
        source = ArraySource({"video": Ragged(values, np.array([0, 1 << 30, 2 << 30]))})
        layout = plan_layout(source, PackOptions(chunk_samples=2))
        assert (layout.chunk_samples, layout.chunk_values) == (2, {"video": 1 << 20})

    def test_a_chunk_is_no_longer_than_the_set(self) -> None:
        assert plan_layout(ArraySource({"x": np.zeros(5)}), PackOptions(chunk_samples=100)).chunk_samples == 5

    def test_shards_hold_the_raw_size_asked_for_and_at_least_a_chunk(self) -> None:
        source = ArraySource({"x": np.zeros((1000, 1024), np.uint8)})
        assert plan_layout(source, PackOptions(chunk_samples=10, shard_mib=0.1)).shard_samples == 100
        assert plan_layout(source, PackOptions(chunk_samples=10, shard_mib=1e-6)).shard_samples == 10

    def test_chunks_beyond_the_bound_are_refused(self) -> None:
        source = ArraySource({"x": np.broadcast_to(np.uint8(0), (5000, 1 << 20))})
        with pytest.raises(
            UsageError, match=r"chunk of 1025 samples is 1074790400 bytes, but the bound is 1073741824"
        ):
            plan_layout(source, PackOptions(chunk_samples=1025))

    def test_nothing_to_pack(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="nothing to pack: 0 samples, 1 fields"):
            pack_arrays({"x": np.zeros((0, 3))}, tmp_path / "set")
        with pytest.raises(DataError, match="nothing to pack: 0 samples, 0 fields"):
            pack_arrays({}, tmp_path / "set")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "rar"}, "codec 'rar' is unknown; choose one of"),
        ({"chunk_samples": 0}, "chunk-samples is 0, but must be at least 1"),
        ({"shard_mib": 0.0}, r"shard-mib is 0.0, but must be above 0 and at most 1e\+12"),
        ({"shard_mib": float("inf")}, "shard-mib is inf, but must be"),
        ({"shard_mib": float("nan")}, "shard-mib is nan, but must be"),
        ({"shard_mib": 1e308}, r"shard-mib is 1e\+308, but must be"),
        ({"threads": -1}, "threads is -1, but must be at least 0"),
        ({"threads": 10**6}, r"threads is 1000000, but must be at least 0 .* and at most 1024"),
        ({"store": "float8"}, "store is 'float8', but must be float16 or float32"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PackOptions(**options)


def test_the_largest_shard_size_can_be_planned() -> None:
    layout = plan_layout(ArraySource({"x": np.zeros(5)}), PackOptions(shard_mib=1e12))
    assert layout.shard_samples > 5


def test_store_without_floats_is_said_to_change_nothing(tmp_path: Path) -> None:
    data = {"x": np.arange(5)}
    report = pack_arrays(data, tmp_path / "a", PackOptions(store="float16"))
    assert report.warnings == ("--store float16 changed nothing: no field holds floats",)
    assert pack_arrays(data, tmp_path / "b").warnings == ()
    data["y"] = np.ones(5)
    assert pack_arrays(data, tmp_path / "c", PackOptions(store="float16")).warnings == ()


def test_shards_of_ragged_rows_only_hold_about_the_size_asked_for(tmp_path: Path) -> None:
    """The first rows are the long ones: a shard by the mean is larger, and the help does not promise otherwise."""
    rows = Ragged.from_rows([np.ones(2000 if i < 100 else 100) for i in range(1000)], np.uint8)
    options = PackOptions(codec="none", chunk_samples=10, shard_mib=0.05)
    pack_arrays({"x": rows}, tmp_path / "set", options)
    shard = open_packed(tmp_path / "set").shards[0]
    assert shard.flat["x"].shape[0] > options.shard_mib * (1 << 20)
    (help_text,) = (
        item.help for item in get_type_hints(command, include_extras=True)["shard_mib"].__metadata__
    )
    assert help_text.startswith("About how many")


class TestShardWriter:
    """What is left of a shard that cannot be begun."""

    def test_a_layout_that_libhdf5_refuses_leaves_no_file_open(self, tmp_path: Path) -> None:
        layout = plan_layout(ArraySource({"x": np.zeros(5)}), PackOptions())
        twice = dataclasses.replace(layout, fields={**layout.fields, "y": layout.fields["x"]})
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ValueError, match="already exists") as caught:
            ShardWriter(tmp_path / "shard.h5", twice, ThreadPoolExecutor())
        assert len(os.listdir("/proc/self/fd")) == before
        assert caught.tb is not None  # the frames still hold the writer: nothing was left to the collector

    def test_an_error_is_told_even_when_the_directory_is_gone(self, tmp_path: Path) -> None:
        layout = plan_layout(ArraySource({"x": np.zeros(5)}), PackOptions())
        folder = tmp_path / "gone"
        message = r"No such file .* about 123 bytes, an unknown number were free"
        with pytest.raises(StorageError, match=message), writing(folder, lambda: 123):
            ShardWriter(folder / "shard.h5", layout, ThreadPoolExecutor())

    def test_a_shard_file_is_closed_once(self, tmp_path: Path) -> None:
        file = ShardFile(tmp_path / "shard.h5")
        file.close()
        other = os.open(tmp_path / "shard.h5", os.O_RDONLY)  # takes the number that has become free
        file.close()
        os.fstat(other)
        os.close(other)


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """At most two chunks per thread are read ahead of the writer."""
    read, written = 0, 0
    lock = threading.Lock()
    most = 0

    class Counting(ArraySource):
        def read(self, start: int, stop: int) -> Columns:
            nonlocal read, most
            with lock:
                read += 1
                most = max(most, read - written)
            return super().read(start, stop)

    def progress(done: int, total: int, raw_bytes: int) -> None:
        nonlocal written
        with lock:
            written += 1

    pack(
        Counting({"x": np.zeros((500, 10))}),
        tmp_path / "set",
        PackOptions(chunk_samples=1, threads=3),
        Watch(progress),
    )
    assert read == written == 500
    assert most <= 2 * 3 + 1


def test_values_of_ragged_fields_are_encoded_in_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoders: set[str] = set()
    real = DatasetWriter.encode

    def encode(self: DatasetWriter, values: Any) -> bytes:
        if self.name == "text":
            encoders.add(threading.current_thread().name)
        return real(self, values)

    monkeypatch.setattr(DatasetWriter, "encode", encode)
    rows = Ragged.from_rows([np.arange(5000) % 251] * 100, np.uint8)
    pack_arrays({"text": rows}, tmp_path / "set", PackOptions(chunk_samples=2, threads=2))
    assert encoders
    assert all(name.startswith("pack") for name in encoders)


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    calls: list[tuple[int, int, int]] = []
    report = pack(
        ArraySource(arrays()),
        tmp_path / "set",
        PackOptions(chunk_samples=70),
        Watch(lambda *call: calls.append(call)),
    )
    assert [call[0] for call in calls] == [70, 140, 210, 280, 300]
    assert calls[-1] == (300, 300, report.raw_bytes)
    assert report.raw_bytes == sum(
        value.values.nbytes if isinstance(value, Ragged) else value.nbytes for value in arrays().values()
    )
    assert json.loads((tmp_path / "set/dataset.json").read_text())["raw_bytes"] == report.raw_bytes


def test_an_error_in_a_thread_stops_the_pack(tmp_path: Path) -> None:
    class Broken(ArraySource):
        def read(self, start: int, stop: int) -> Columns:
            if start == 40:
                raise DataError("file 40 is bad")
            return super().read(start, stop)

    with pytest.raises(DataError, match="file 40 is bad"):
        pack(Broken({"x": np.zeros(1000)}), tmp_path / "set", PackOptions(chunk_samples=1))
    assert list(tmp_path.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pack")]


@pytest.mark.parametrize("nested", ["raw/set", "raw", "."])
def test_source_and_target_within_each_other(tmp_path: Path, nested: str) -> None:
    (tmp_path / "raw").mkdir()
    np.save(tmp_path / "raw" / "x.npy", np.zeros(3))
    with pytest.raises(UsageError, match="lie within each other; choose a DST apart from SRC"):
        pack_path(tmp_path / "raw", tmp_path / nested, PackOptions(overwrite=True))
    assert os.listdir(tmp_path / "raw") == ["x.npy"]
