"""The loader brings the plan's samples, with their own values, whatever the threads do."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.data.dealing import Dealing
from hpctrain.data.loader import Loader
from hpctrain.data.plan import Plan
from hpctrain.data.preprocess import FieldSteps, Preprocessor
from hpctrain.errors import ConfigError, DataError, UsageError
from hpctrain.h5.chunks import Allocate, ChunkSource, FileSource, fresh
from hpctrain.h5.filters import Buffer
from hpctrain.h5.index import ChunkIndex
from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.h5.packed import PackedSet, open_packed
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


@contextlib.contextmanager
def ended_within(seconds: float) -> Iterator[None]:
    """Dumps all stacks and ends the process where the body hangs."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


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
    planned = {(e, lane): plan.lane_batches(e, lane) for e in range(2) for lane in mine}
    epoch, step = data.draw(st.integers(0, 1)), data.draw(st.integers(0, plan.steps_per_epoch - 1))
    with FileSource() as files, Loader(packed, files, plan, mine, threads, prefetch) as loader:
        position = (epoch, step)
        for batches in loader.steps(epoch, step, 2):
            assert (batches.epoch, batches.step) == position
            assert [lane.lane for lane in batches.lanes] == list(mine)
            for lane in batches.lanes:
                assert np.array_equal(lane.samples, planned[batches.epoch, lane.lane][batches.step])
                check_values(lane.samples, lane.fields, arrays)
            last = position[1] + 1 == plan.steps_per_epoch
            position = (position[0] + 1, 0) if last else (position[0], position[1] + 1)
        assert position == (2, 0)


class CountingSource:
    """A real source that counts the reads of each stored chunk."""

    def __init__(self, inner: ChunkSource) -> None:
        self.inner, self.reads, self.lock = inner, {}, threading.Lock()

    def read(self, index: ChunkIndex, chunk: int, allocate: Allocate = fresh) -> Buffer:
        key = (index.path, index.dataset, chunk)
        with self.lock:
            self.reads[key] = self.reads.get(key, 0) + 1
        return self.inner.read(index, chunk, allocate)

    def reads_of(self, dataset: str) -> int:
        with self.lock:
            return sum(count for (_, name, _), count in self.reads.items() if name == dataset)


def test_a_dense_chunk_is_read_once_per_epoch_and_rank(packed: PackedSet, source: FileSource) -> None:
    counting = CountingSource(source)
    plan = Plan(packed.chunk_sizes, 4, 16, 3, 8)
    with Loader(packed, counting, plan, range(4), 2, 3) as loader:
        list(loader.steps(0, 0, 1))
    dense = {key: count for key, count in counting.reads.items() if key[1] == "image"}
    assert set(dense.values()) == {1}
    assert len(dense) == len(packed.chunk_sizes)


def test_a_set_that_fits_into_the_budget_is_read_once_in_a_run(packed: PackedSet, source: FileSource) -> None:
    counting = CountingSource(source)
    plan = Plan(packed.chunk_sizes, 4, 16, 3, 2)
    with Loader(packed, counting, plan, range(4), 2, 3) as loader:
        list(loader.steps(0, 0, 3))
    assert counting.reads_of("image") == len(packed.chunk_sizes)


class FailingSource(CountingSource):
    def read(self, index: ChunkIndex, chunk: int, allocate: Allocate = fresh) -> Buffer:
        if sum(self.reads.values()) > 30:
            raise DataError("shard-00000.h5: a bad chunk")
        return super().read(index, chunk, allocate)


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


def test_nothing_is_made_of_a_chunk_that_could_not_be_read(packed: PackedSet, source: FileSource) -> None:
    """Later steps need the bad chunk as well: no user function may see what happens to lie in its place."""

    class Failing(CountingSource):
        def read(self, index: ChunkIndex, chunk: int, allocate: Allocate = fresh) -> Buffer:
            if index.dataset == "image" and self.reads_of("image") == 2:
                raise DataError("shard-00000.h5: a bad chunk")
            return super().read(index, chunk, allocate)

    arrays, seen = small_arrays(NUM_SAMPLES), []

    def keep(sample: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
        seen.append(sample)
        return sample

    made = Preprocessor(
        packed.fields,
        {"image": FieldSteps(function="m:keep")},
        1,
        first=lambda name: arrays[name][0],
        functions={"m:keep": keep},
        source="here",
    )
    seen.clear()
    plan = Plan(packed.chunk_sizes, 1, 1, 3, 1)  # the third chunk is needed from step 24 on
    with Loader(packed, Failing(source), plan, range(1), 1, 3, preprocessors=made.fields) as loader:
        steps = loader.steps(0, 0, 1)
        for _ in range(22):
            next(steps)
        time.sleep(0.2)  # so that the chunk fails before the steps after 24 are begun
        with pytest.raises(DataError, match="a bad chunk"):
            list(steps)
        time.sleep(0.1)
    assert len(seen) == 24


def test_after_closing_nobody_waits_for_a_batch(packed: PackedSet, source: FileSource) -> None:
    plan = Plan(packed.chunk_sizes, 2, 8, 3, 2)
    loader = Loader(packed, source, plan, range(2), 2, 2)
    steps = loader.steps(0, 0, 50)
    next(steps)
    loader.close()
    with ended_within(20), pytest.raises(RuntimeError, match="closed"):
        list(steps)


def test_closing_wakes_the_one_who_waits(packed: PackedSet, source: FileSource) -> None:
    class Stuck(CountingSource):
        def read(self, index: ChunkIndex, chunk: int, allocate: Allocate = fresh) -> Buffer:
            released.wait(20)
            return super().read(index, chunk, allocate)

    released, found = threading.Event(), []

    def consume() -> None:
        try:
            next(loader.steps(0, 0, 1))
        except RuntimeError as error:
            found.append(error)

    plan = Plan(packed.chunk_sizes, 2, 8, 3, 2)
    loader = Loader(packed, Stuck(source), plan, range(2), 1, 2)
    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    time.sleep(0.1)
    closing = threading.Thread(target=loader.close, daemon=True)
    closing.start()
    time.sleep(0.1)
    released.set()
    for thread in (closing, consumer):
        thread.join(20)
        assert not thread.is_alive()
    assert "closed" in str(found[0])


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
    def read(self, index: ChunkIndex, chunk: int, allocate: Allocate = fresh) -> Buffer:
        time.sleep(0.002)
        return super().read(index, chunk, allocate)


def test_batches_are_made_ahead_of_their_use(packed: PackedSet, source: FileSource) -> None:
    """While the first batch is used, the next ones become ready without being asked for."""
    plan = Plan(packed.chunk_sizes, 1, 16, 3, 1)
    slow = SlowSource(source)
    with Loader(packed, slow, plan, range(1), 1, 3) as loader:
        steps = loader.steps(0, 0, 1)
        next(steps)
        deadline = time.monotonic() + 20
        while (
            slow.reads_of("image") < 5
        ):  # the first step takes two chunks of 12 samples, four steps take six
            assert time.monotonic() < deadline, "nothing was prepared ahead"
            time.sleep(0.01)


class HeldBackSource(CountingSource):
    """Gives only the sample chunks of the first step until it is told to give all."""

    def __init__(self, files: FileSource, chunks: set[int]) -> None:
        super().__init__(files)
        self.chunks, self.all = chunks, threading.Event()

    def read(self, index: ChunkIndex, chunk: int, allocate: Allocate = fresh) -> Buffer:
        if index.dataset == "image" and index.path.name == "shard-00000.h5" and chunk not in self.chunks:
            assert self.all.wait(30), "nobody took the first batch"
        return super().read(index, chunk, allocate)


def test_the_first_batch_waits_for_its_own_chunks_only(tmp_path: Path, source: FileSource) -> None:
    packed = small_set(tmp_path / "set", 200, 10, shard_mib=10)
    plan = Plan(packed.chunk_sizes, 1, 4, 5, 3)
    wanted = set(plan.chunk_of(plan.lane_batches(0, 0)[0]).tolist())
    held = HeldBackSource(source, wanted)
    with ended_within(60), Loader(packed, held, plan, range(1), 2, 16) as loader:
        steps = loader.steps(0, 0, 1)
        assert next(steps).lanes[0].samples.tolist() == plan.lane_batches(0, 0)[0].tolist()
        held.all.set()
        assert len(list(steps)) == plan.steps_per_epoch - 1


def test_an_empty_lane_gives_an_empty_batch(packed: PackedSet, source: FileSource) -> None:
    plan = Plan(packed.chunk_sizes, 5, 100, 1, 3)  # 503 = one full step of 500 and 3 samples for 5 lanes
    with Loader(packed, source, plan, range(5), 1, 1) as loader:
        last = list(loader.steps(0, 0, 1))[-1]
    assert [len(lane.samples) for lane in last.lanes] == [1, 1, 1, 0, 0]
    assert last.lanes[-1].fields["image"].shape == (0, 6, 5)
    assert len(last.lanes[-1].fields["text"]) == 0


def all_samples(loader: Loader, epochs: int = 1) -> list[tuple[list[int], np.ndarray]]:
    return [
        (lane.samples.tolist(), lane.fields["image"].copy())
        for batches in loader.steps(0, 0, epochs)
        for lane in batches.lanes
    ]


def test_a_small_memory_budget_reads_more_and_gives_the_same(packed: PackedSet, source: FileSource) -> None:
    plan = Plan(packed.chunk_sizes, 1, 16, 3, 20)
    with Loader(packed, source, plan, range(1), 2, 2) as loader:
        wide = all_samples(loader, 2)
        assert loader.dropped_chunks == 0
    counting = CountingSource(source)
    with Loader(packed, counting, plan, range(1), 2, 2, 17_000) as loader:
        narrow = all_samples(loader, 2)
        dropped = loader.dropped_chunks
    assert [samples for samples, _ in narrow] == [samples for samples, _ in wide]
    assert all(np.array_equal(one, other) for (_, one), (_, other) in zip(narrow, wide, strict=True))
    assert dropped > 0
    assert 0 < counting.reads_of("image") - dropped <= 2 * len(packed.chunk_sizes)


@pytest.mark.parametrize("budget_bytes", [1000, 12_000])
def test_a_budget_that_holds_no_batch_is_refused_with_numbers(
    packed: PackedSet, source: FileSource, budget_bytes: int
) -> None:
    plan = Plan(packed.chunk_sizes, 1, 16, 3, 20)
    with (
        pytest.raises(ConfigError, match=r"data.memory_budget_mib = .*(chunks|MiB).*raise it"),
        Loader(packed, source, plan, range(1), 2, 2, budget_bytes) as loader,
    ):
        list(loader.steps(0, 0, 1))


def test_a_batch_stays_as_it_is_while_somebody_holds_it(packed: PackedSet, source: FileSource) -> None:
    arrays = small_arrays(NUM_SAMPLES)
    plan = Plan(packed.chunk_sizes, 2, 16, 3, 8)
    with Loader(packed, source, plan, range(2), 2, 2) as loader:
        held = [lane for batches in loader.steps(0, 0, 2) for lane in batches.lanes]
    for lane in held:
        check_values(lane.samples, lane.fields, arrays)


@pytest.fixture(scope="module", params=["blosc-lz4", "blosc-zstd", "gzip", "none"])
def fields(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackedSet:
    """Samples of 128 KiB, 5 a chunk, the last chunk of each shard short; Blosc ones are decoded one by one."""
    folder = tmp_path_factory.mktemp("fields") / "set"
    pack_arrays(field_arrays(), folder, PackOptions(codec=request.param, chunk_samples=5, shard_mib=2.4))
    return open_packed(folder)


def field_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    smooth = np.cumsum(rng.normal(size=(48, 8, 64, 64)), axis=-1).round(1).astype(np.float32)
    noise = rng.integers(
        0, 2**32, (48, 32768), dtype=np.uint32
    )  # Blosc keeps what it cannot compress as it is
    return {"field": smooth, "noise": noise, "number": np.arange(48)}


def test_large_samples(fields: PackedSet, source: FileSource) -> None:
    arrays = field_arrays()
    alone = set(fields.block_bytes) & {"field", "noise"}
    assert alone == ({"field", "noise"} if fields.fields["field"].codec.startswith("blosc") else set())
    plan = Plan(fields.chunk_sizes, 2, 7, 3, 4)
    with Loader(fields, source, plan, range(2), 2, 2) as loader:
        for batches in loader.steps(0, 0, 2):
            for lane in batches.lanes:
                for name, values in arrays.items():
                    assert np.array_equal(lane.fields[name], values[lane.samples]), name
        times = loader.times
        assert times.used_bytes == 2 * sum(values.nbytes for values in arrays.values())
        assert times.read_bytes > 0
        assert times.wait_s > 0


def test_a_rank_without_a_sample_in_the_last_step(fields: PackedSet, source: FileSource) -> None:
    """48 samples are one full step of 40, and 8 for the first lanes of the last step."""
    plan = Plan(fields.chunk_sizes, 20, 2, 3, 4)
    with Loader(fields, source, plan, range(10, 20), 2, 2) as loader:
        *_, last = loader.steps(0, 0, 1)
    assert [len(lane.samples) for lane in last.lanes] == [0] * 10
    assert last.lanes[0].fields["field"].shape == (0, 8, 64, 64)


@pytest.mark.parametrize("fields", ["blosc-lz4", "blosc-zstd"], indirect=True)
def test_a_damaged_frame_is_named(fields: PackedSet, source: FileSource) -> None:
    """Behind a right digest: what packed it was at fault, or the bytes were made to deceive."""

    class Deceiving(CountingSource):
        def read(self, index: ChunkIndex, chunk: int, allocate: Allocate = fresh) -> Buffer:
            stored = super().read(index, chunk, allocate)
            if index.dataset == "field":
                memoryview(stored)[4:8] = (123).to_bytes(4, "little")
            return stored

    plan = Plan(fields.chunk_sizes, 1, 7, 3, 4)
    with (
        pytest.raises(DataError, match=r"shard-.*'field', chunk .* (123 raw bytes|the Blosc header says)"),
        Loader(fields, Deceiving(source), plan, range(1), 2, 2) as loader,
    ):
        list(loader.steps(0, 0, 1))


def test_preprocessing_runs_in_the_loaders_threads(packed: PackedSet, source: FileSource) -> None:
    arrays, names = small_arrays(NUM_SAMPLES), set()

    def double(sample: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
        names.add(threading.current_thread().name.split("_")[0])
        return sample.astype(np.int32) * 2

    steps = {"image": FieldSteps(function="m:double"), "text": FieldSteps(pad_to=3)}
    made = Preprocessor(
        packed.fields,
        steps,
        1,
        first=lambda name: arrays[name][0] if name == "image" else arrays[name].row(0),
        functions={"m:double": double},
        source="here",
    )
    names.clear()
    plan = Plan(packed.chunk_sizes, 2, 16, 3, 8)
    with Loader(packed, source, plan, range(2), 2, 2, preprocessors=made.fields) as loader:
        for batches in loader.steps(0, 0, 1):
            for lane in batches.lanes:
                assert np.array_equal(
                    lane.fields["image"], arrays["image"][lane.samples].astype(np.int32) * 2
                )
                lengths = [len(arrays["text"].row(sample)) for sample in lane.samples]
                assert lane.fields["text_length"].tolist() == [min(length, 3) for length in lengths]
    assert names == {"decode"}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 20)), max_size=4))
def test_lanes_move_between_ranks_without_losing_a_sample(
    packed: PackedSet, moves: list[tuple[int, int, int]]
) -> None:
    """Two ranks with a loader each, begun anew wherever the dealing changes: every step is the plan's."""
    plan = Plan(packed.chunk_sizes, 4, 24, 3, 8)
    dealing = Dealing([[0, 1], [2, 3]])
    for lane, rank, step in sorted(moves, key=lambda move: move[2]):
        with contextlib.suppress(UsageError):  # a rank would be left without a lane
            dealing = dealing.move(lane, rank, step)
    found: dict[tuple[int, int, int], list[int]] = {}
    total = 2 * plan.steps_per_epoch
    for rank in range(2):
        step = 0
        while step < total:
            end = min(dealing.next_change(step) or total, total)
            epoch, within = divmod(step, plan.steps_per_epoch)
            with (
                FileSource() as files,
                Loader(packed, files, plan, dealing.lanes(rank, step), 1, 1) as loader,
            ):
                for batches in itertools.islice(loader.steps(epoch, within, 2), end - step):
                    for lane in batches.lanes:
                        key = (batches.epoch, batches.step, lane.lane)
                        assert key not in found
                        found[key] = lane.samples.tolist()
            step = end
    for epoch in range(2):
        for lane in range(4):
            for step, samples in enumerate(plan.lane_batches(epoch, lane)):
                assert found[epoch, step, lane] == samples.tolist()
