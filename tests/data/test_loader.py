"""The loader brings the plan's samples, with their own values, whatever the threads do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.data.loader import Loader, by_chunk, gather
from hpctrain.data.plan import Plan
from hpctrain.errors import DataError
from hpctrain.h5.chunks import ChunkSource
from hpctrain.h5.index import ChunkIndex
from hpctrain.h5.packed import PackedSet
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.reader import FileSource, read_sample_chunk
from tests.support import small_arrays, small_set

NUM_SAMPLES = 503


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedSet:
    found = small_set(tmp_path_factory.mktemp("loader") / "set", NUM_SAMPLES, 12)
    assert len(found.shards) > 1, "the ids must run over shards"
    return found


@pytest.fixture
def source() -> Iterator[FileSource]:
    with FileSource() as files:
        yield files


def check_values(lane_samples: np.ndarray, fields: dict, arrays: dict) -> None:
    assert np.array_equal(fields["number"], lane_samples)
    assert np.array_equal(fields["image"], arrays["image"][lane_samples])
    assert [fields["text"].text(i) for i in range(len(lane_samples))] == [
        arrays["text"].text(i) for i in lane_samples
    ]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 6), st.integers(1, 40), st.integers(1, 50), st.integers(1, 5), st.integers(1, 3), st.data()
)
def test_every_batch_is_the_plans(
    packed: PackedSet, lanes: int, batch: int, window: int, prefetch: int, threads: int, data: st.DataObject
) -> None:
    arrays = small_arrays(NUM_SAMPLES)
    plan = Plan(packed.chunk_sizes, lanes, batch, 5, window)
    mine = range(data.draw(st.integers(0, lanes - 1)), lanes)
    epoch, step = data.draw(st.integers(0, 1)), data.draw(st.integers(0, plan.steps_per_epoch - 1))
    with FileSource() as files, Loader(packed, files, plan, mine, threads, prefetch) as loader:
        position = (epoch, step)
        for batches in loader.steps(epoch, step, 2):
            assert (batches.epoch, batches.step) == position
            assert [lane.lane for lane in batches.lanes] == list(mine)
            for lane in batches.lanes:
                assert np.array_equal(lane.samples, plan.lane_batches(batches.epoch, lane.lane)[batches.step])
                check_values(lane.samples, lane.fields, arrays)
            last = position[1] + 1 == plan.steps_per_epoch
            position = (position[0] + 1, 0) if last else (position[0], position[1] + 1)
        assert position == (2, 0)


class CountingSource:
    """A real source that counts the reads of each stored chunk."""

    def __init__(self, inner: ChunkSource) -> None:
        self.inner, self.reads, self.lock = inner, {}, threading.Lock()

    def read(self, index: ChunkIndex, chunk: int) -> bytes | memoryview:
        key = (index.path, index.dataset, chunk)
        with self.lock:
            self.reads[key] = self.reads.get(key, 0) + 1
        return self.inner.read(index, chunk)


def test_a_dense_chunk_is_read_once_per_epoch_and_rank(packed: PackedSet, source: FileSource) -> None:
    counting = CountingSource(source)
    plan = Plan(packed.chunk_sizes, 4, 16, 3, 8)
    with Loader(packed, counting, plan, range(4), 2, 3) as loader:
        list(loader.steps(0, 0, 1))
    dense = {key: count for key, count in counting.reads.items() if key[1] == "image"}
    assert set(dense.values()) == {1}
    assert len(dense) == len(packed.chunk_sizes)


class FailingSource(CountingSource):
    def read(self, index: ChunkIndex, chunk: int) -> bytes | memoryview:
        if sum(self.reads.values()) > 30:
            raise DataError("shard-00000.h5: a bad chunk")
        return super().read(index, chunk)


def test_an_error_of_a_thread_is_raised_in_the_loop_and_ends_the_threads(
    packed: PackedSet, source: FileSource
) -> None:
    plan = Plan(packed.chunk_sizes, 2, 8, 3, 2)
    with (
        pytest.raises(DataError, match="a bad chunk"),
        Loader(packed, FailingSource(source), plan, range(2), 2, 2) as loader,
    ):
        list(loader.steps(0, 0, 5))
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith(("loader", "decode"))
    ]


def test_leaving_early_ends_the_threads(packed: PackedSet, source: FileSource) -> None:
    plan = Plan(packed.chunk_sizes, 2, 8, 3, 2)
    begun = time.monotonic()
    with Loader(packed, source, plan, range(2), 2, 2) as loader:
        next(loader.steps(0, 0, 50))
    assert time.monotonic() - begun < 20
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith(("loader", "decode"))
    ]


class SlowSource(CountingSource):
    def read(self, index: ChunkIndex, chunk: int) -> bytes | memoryview:
        time.sleep(0.002)
        return super().read(index, chunk)


def test_batches_are_made_ahead_of_their_use(packed: PackedSet, source: FileSource) -> None:
    """While the first batch is used, the next ones become ready without being asked for."""
    plan = Plan(packed.chunk_sizes, 1, 16, 3, 1)
    slow = SlowSource(source)
    with Loader(packed, slow, plan, range(1), 1, 3) as loader:
        steps = loader.steps(0, 0, 1)
        next(steps)
        deadline = time.monotonic() + 20
        while loader._ready.qsize() < 3:
            assert time.monotonic() < deadline, "nothing was prepared ahead"
            time.sleep(0.01)


def test_an_empty_lane_gives_an_empty_batch(packed: PackedSet, source: FileSource) -> None:
    plan = Plan(packed.chunk_sizes, 5, 100, 1, 3)  # 503 = one full step of 500 and 3 samples for 5 lanes
    with Loader(packed, source, plan, range(5), 1, 1) as loader:
        last = list(loader.steps(0, 0, 1))[-1]
    assert [len(lane.samples) for lane in last.lanes] == [1, 1, 1, 0, 0]
    assert last.lanes[-1].fields["image"].shape == (0, 6, 5)
    assert len(last.lanes[-1].fields["text"]) == 0


def test_gather_keeps_the_dtype(packed: PackedSet, source: FileSource) -> None:
    fields = read_sample_chunk(packed, source, 0)
    rows = np.array([2, 0], dtype=np.int64)
    batch = gather(packed, [(fields, rows, np.array([1, 0], dtype=np.int64))], 2)
    assert batch["image"].dtype == np.uint8
    assert isinstance(batch["text"], Ragged)
    assert batch["number"].tolist() == [0, 2]


@given(st.lists(st.integers(0, 9), max_size=60))
def test_positions_by_chunk(chunks: list[int]) -> None:
    chunk_of = np.array(chunks, dtype=np.int64)
    found = list(by_chunk(chunk_of))
    assert [chunk for chunk, _ in found] == sorted(set(chunks))
    for chunk, positions in found:
        assert np.array_equal(positions, np.flatnonzero(chunk_of == chunk))
