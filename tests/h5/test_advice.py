import dataclasses
import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.h5.advice import (
    advice,
    chunk_bytes,
    chunks_per_sample,
    expected_slabs,
    read_amplification,
    sample_bytes,
    samples_per_chunk,
    size_words,
)
from hpctrain.h5.survey_facts import DatasetSurvey, FileSurvey, LinkSurvey

GZIP, SHUFFLE, BLOSC = 1, 2, 32001


def dataset(
    shape: tuple[int, ...] | None,
    chunk_shape: tuple[int, ...] | None = None,
    *,
    itemsize: int = 4,
    filter_ids: tuple[int, ...] = (BLOSC,),
    road: str = "parallel",
    reason: str = "",
    dtype: str = "float32",
    layout: str = "",
    name: str = "/x",
) -> DatasetSurvey:
    return DatasetSurvey(
        name=name,
        shape=shape,
        dtype=dtype,
        itemsize=itemsize,
        layout=layout or ("chunked" if chunk_shape else "contiguous"),
        chunk_shape=chunk_shape,
        filters=(),
        filter_ids=filter_ids,
        raw_bytes=math.prod(shape or (0,)) * itemsize,
        stored_bytes=1,
        road=road,
        reason=reason,
    )


def advise(*datasets: DatasetSurvey, batch_size: int = 8) -> str:
    return advice(FileSurvey(Path("f.h5"), datasets=datasets), batch_size)


class TestAmplification:
    @given(num_samples=st.integers(1, 9), slab=st.integers(1, 10), batch=st.integers(1, 10))
    def test_expected_slabs_is_the_mean_over_all_batches(
        self, num_samples: int, slab: int, batch: int
    ) -> None:
        touched = [
            len({sample // slab for sample in drawn})
            for drawn in itertools.combinations(range(num_samples), min(batch, num_samples))
        ]
        assert expected_slabs(num_samples, slab, batch) == pytest.approx(sum(touched) / len(touched))

    @given(
        shape=st.tuples(st.integers(1, 500), st.integers(1, 20), st.integers(1, 20)),
        chunk=st.tuples(st.integers(1, 600), st.integers(1, 25), st.integers(1, 25)),
        batch=st.integers(1, 50),
    )
    def test_it_falls_with_the_batch_and_is_at_least_one(
        self, shape: tuple[int, ...], chunk: tuple[int, ...], batch: int
    ) -> None:
        item = dataset(shape, chunk)
        one, many, all_of_it = (read_amplification(item, size) for size in (1, batch, shape[0]))
        assert one is not None
        assert many is not None
        assert one + 1e-9 >= many >= 1 - 1e-9
        stored = math.prod(-(-n // c) * c for n, c in zip(shape, chunk, strict=True))
        assert all_of_it == pytest.approx(stored / math.prod(shape))

    def test_by_hand(self) -> None:
        item = dataset((1000, 4, 6), (10, 4, 4))  # two chunks a slab, of 160 values; a sample has 24
        assert chunks_per_sample(item) == 2
        assert samples_per_chunk(item) == 10
        assert chunk_bytes(item) == 640
        assert sample_bytes(item) == 96
        assert read_amplification(item, 1) == pytest.approx(2 * 160 / 24)

    @pytest.mark.parametrize(
        ("item", "expected"),
        [
            (dataset((5, 3)), 1.0),
            (dataset(()), None),
            (dataset(None), None),
            (dataset((0, 3), (1, 3)), None),
            (dataset((3, 0)), None),
            (dataset((5, 3), layout="virtual"), None),
        ],
    )
    def test_without_chunks(self, item: DatasetSurvey, expected: float | None) -> None:
        assert read_amplification(item, 8) == expected

    def test_a_large_set_takes_no_time(self) -> None:
        item = dataset((10**12, 100), (1000, 100))
        assert read_amplification(item, 4096) == pytest.approx(1000, rel=1e-3)


class TestAdvice:
    def test_large_chunks(self) -> None:
        words = advise(dataset((50_000, 3072), (1000, 3072), itemsize=1))
        assert "a chunk holds 1,000 samples, the lane batch is 8" in words
        assert "decodes 9" in words  # 50 slabs, 8 samples: about 7.5 slabs of 1,000 for 8
        assert "--chunk-samples 64" in words

    def test_cut_samples(self) -> None:
        words = advise(dataset((100, 512, 512), (100, 64, 64)))
        assert "a sample lies in 64 chunks" in words
        assert "--chunk-samples 1" in words

    def test_tiny_chunks(self) -> None:
        words = advise(dataset((100_000, 100), (1, 100)))
        assert "chunks of 400 B" in words
        assert "--chunk-samples 512" in words

    def test_gzip(self) -> None:
        assert "a fifth" in advise(dataset((1000, 4, 128, 128), (1, 4, 128, 128), filter_ids=(GZIP,)))
        assert "all is well" in advise(
            dataset((1000, 4, 128, 128), (1, 4, 128, 128), filter_ids=(SHUFFLE, GZIP))
        )

    def test_libhdf5(self) -> None:
        words = advise(dataset((1000, 1000), (10, 1000), road="libhdf5", reason="bzip2 is not decoded here"))
        assert "one thread at a time, because bzip2 is not decoded here" in words
        assert "hpctrain pack FILE DST" in words
        ragged = advise(dataset((10**6,), (10**4,), road="libhdf5", reason="vlen", dtype="vlen string"))
        assert "hpctrain pack" not in ragged
        assert "ragged" in ragged

    def test_never_written(self) -> None:
        empty = dataclasses.replace(dataset((1000, 1000)), stored_bytes=0)
        assert advise(empty) == "/x: nothing of it was ever written: every value is the fill value"

    def test_all_is_well(self) -> None:
        packed = advise(dataset((1000, 4, 128, 128), (1, 4, 128, 128)))
        assert packed == "all is well: /x is decoded by all cores, one sample a chunk"
        assert "straight from where it lies" in advise(dataset((1000, 1000)))

    def test_it_is_about_the_largest_that_can_be_read(self) -> None:
        words = advise(
            dataset((1000, 1000), name="/small"),
            dataset((4000, 1000), name="/large"),
            dataset((90_000, 1000), name="/damaged", road="none"),
        )
        assert "/large" in words

    def test_a_packed_set_is_read_in_window_order(self) -> None:
        large = dataset((50_000, 3072), (1000, 3072), itemsize=1)
        assert "all is well" in advise(large, dataset((50,), name="/_digests/x"))
        tiny = dataset((10**6, 100), (1, 100))
        assert "chunks of 400 B" in advise(tiny, dataset((50,), name="/_digests/x"))

    def test_little_is_not_worth_a_word(self) -> None:
        assert "nothing to gain: the largest dataset holds 400 B" in advise(
            dataset((100,), (1,), filter_ids=(GZIP,))
        )

    def test_nothing_to_read(self) -> None:
        assert advise() == ""
        far = FileSurvey(Path("f.h5"), links=(LinkSurvey("/x", "external", "/y in other.h5"),))
        assert "other files" in advice(far, 8)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (1 << 43, "8.0 TiB"),
        (1 << 53, "8192.0 TiB"),
    ],
)
def test_size_words(size: int, words: str) -> None:
    assert size_words(size) == words
