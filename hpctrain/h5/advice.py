"""What a file costs when it is read at random, and one line of advice about it. Pure functions of a `FileSurvey`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from hpctrain.h5.filters import DEFLATE, SHUFFLE
from hpctrain.h5.index import DIGESTS_GROUP
from hpctrain.h5.survey_facts import DatasetSurvey, FileSurvey

_KIB: Final = 1024
_GOOD_CHUNK_BYTES: Final = 256 * _KIB  # long enough for a disk, and few samples too many for a batch
_TINY_CHUNK_BYTES: Final = 16 * _KIB  # below it, finding a chunk takes longer than decoding it
_SMALL_BYTES: Final = 1 << 20  # a dataset that is read at once, however it lies
_UNWANTED: Final = 2.0  # decoding twice what is used is the price of any chunk
_NOT_ARRAYS: Final = ("vlen", "reference", "H5T_TIME")

Rule = Callable[[DatasetSurvey, int], str | None]


def samples_per_chunk(dataset: DatasetSurvey) -> int | None:
    """Samples (rows along the first axis) that share a chunk; None where there are no chunks or no rows."""
    return dataset.chunk_shape[0] if dataset.chunk_shape and dataset.shape else None


def chunk_bytes(dataset: DatasetSurvey) -> int | None:
    """Raw bytes of a whole chunk; None where there are no chunks."""
    return math.prod(dataset.chunk_shape) * dataset.itemsize if dataset.chunk_shape else None


def sample_bytes(dataset: DatasetSurvey) -> int:
    """Raw bytes of one sample; 0 for a dataset without a first axis or without data."""
    return math.prod(dataset.shape[1:]) * dataset.itemsize if dataset.shape and dataset.shape[0] else 0


def chunks_per_sample(dataset: DatasetSurvey) -> int:
    """Chunks that one sample lies in."""
    if not dataset.chunk_shape or not dataset.shape:
        return 1
    return math.prod(
        -(-extent // chunk) for extent, chunk in zip(dataset.shape[1:], dataset.chunk_shape[1:], strict=True)
    )


def expected_slabs(num_samples: int, slab_samples: int, batch_size: int) -> float:
    """How many slabs a batch drawn at random without replacement is expected to touch.

    The samples lie in slabs of `slab_samples` (the last may hold fewer). A slab of n of the N samples is missed by B
    of them with probability C(N - n, B) / C(N, B) (hypergeometric), so the answer is the sum over the slabs
    of 1 - C(N - n, B) / C(N, B). B is at most N.
    """
    drawn = min(batch_size, num_samples)

    def touched(slab: int) -> float:
        return 1 - math.prod(max(num_samples - slab - i, 0) / (num_samples - i) for i in range(drawn))

    whole, rest = divmod(num_samples, slab_samples)
    return whole * touched(slab_samples) + (touched(rest) if rest else 0)


def read_amplification(dataset: DatasetSurvey, batch_size: int) -> float | None:
    """Bytes that must be decoded for one batch of random samples, over the bytes of these samples.

    A slab is the chunks with the same place on the first axis: `chunks_per_sample` of them, each decoded whole. With
    E = `expected_slabs`, the amplification is E x chunks per sample x chunk bytes / (B x sample bytes). It is 1
    without chunks, and None where nothing can be said: no samples, virtual data, or nothing that is read.
    """
    one, chunk = sample_bytes(dataset), chunk_bytes(dataset)
    if not one or not dataset.shape or dataset.layout == "virtual":
        return None
    if chunk is None or not dataset.chunk_shape:
        return 1.0
    slabs = expected_slabs(dataset.shape[0], dataset.chunk_shape[0], batch_size)
    return slabs * chunks_per_sample(dataset) * chunk / (min(batch_size, dataset.shape[0]) * one)


def size_words(num_bytes: float) -> str:
    """Bytes with a unit: `512 B`, `1.5 MiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < _KIB:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= _KIB
    return f"{size:.1f} TiB"


def advice(survey: FileSurvey, batch_size: int) -> str:
    """One line about the largest dataset that can be read: what to change, or that nothing is to be gained."""
    readable = [dataset for dataset in survey.datasets if dataset.road != "none"]
    if not readable:
        elsewhere = any(link.kind == "external" for link in survey.links)
        return "its data lie in other files: inspect those that its external links name" if elsewhere else ""
    largest = max(readable, key=lambda dataset: dataset.raw_bytes)
    if largest.raw_bytes < _SMALL_BYTES:
        return f"nothing to gain: the largest dataset holds {size_words(largest.raw_bytes)}"
    packed = any(is_internal(dataset) for dataset in survey.datasets)
    for rule in _RULES_PACKED if packed else _RULES:
        words = rule(largest, batch_size)
        if words:
            return f"{largest.name}: {words}"
    return f"all is well: {largest.name} is decoded by all cores, {_whole_samples(largest)}"


def is_internal(dataset: DatasetSurvey) -> bool:
    """Whether this is what `pack` keeps beside the data."""
    return dataset.name.startswith(f"/{DIGESTS_GROUP}/")


def _whole_samples(dataset: DatasetSurvey) -> str:
    rows = samples_per_chunk(dataset)
    if rows is None:
        return "straight from where it lies"
    return f"in chunks of {rows:,} whole samples" if rows > 1 else "one sample a chunk"


def _good_samples(dataset: DatasetSurvey) -> int:
    """Samples a chunk should hold: the power of two that fills a good chunk, at least one."""
    fitting = _GOOD_CHUNK_BYTES // max(sample_bytes(dataset), 1)
    return 1 << max(fitting.bit_length() - 1, 0)


def _repack(dataset: DatasetSurvey) -> str:
    return f"repack with `hpctrain pack FILE DST --chunk-samples {_good_samples(dataset)}`"


def _never_written(dataset: DatasetSurvey, batch_size: int) -> str | None:
    if dataset.stored_bytes or dataset.layout not in ("contiguous", "chunked"):
        return None
    return "nothing of it was ever written: every value is the fill value"


def _by_libhdf5(dataset: DatasetSurvey, batch_size: int) -> str | None:
    if dataset.road != "libhdf5":
        return None
    remedy = "`hpctrain pack FILE DST` stores it so that all cores can decode it"
    if any(word in dataset.dtype for word in _NOT_ARRAYS):
        remedy = "arrays of fixed-size numbers, or a ragged field of a packed set, are read by all cores"
    return f"read by libhdf5, one thread at a time, because {dataset.reason}; {remedy}"


def _samples_cut(dataset: DatasetSurvey, batch_size: int) -> str | None:
    pieces = chunks_per_sample(dataset)
    amplified = read_amplification(dataset, batch_size) or 0
    if pieces == 1 or (amplified <= _UNWANTED and pieces <= batch_size):
        return None
    return (
        f"a sample lies in {pieces:,} chunks, and a random batch of {batch_size} decodes {amplified:,.1f} times "
        f"what it uses; {_repack(dataset)}"
    )


def _large_chunks(dataset: DatasetSurvey, batch_size: int) -> str | None:
    rows = samples_per_chunk(dataset) or 1
    amplified = read_amplification(dataset, batch_size) or 0
    if rows < 2 * _good_samples(dataset) or amplified <= _UNWANTED:
        return None
    return (
        f"a chunk holds {rows:,} samples, the lane batch is {batch_size}: a random batch decodes {amplified:,.1f} "
        f"times what it uses; {_repack(dataset)}"
    )


def _tiny_chunks(dataset: DatasetSurvey, batch_size: int) -> str | None:
    size = chunk_bytes(dataset)
    if size is None or size >= _TINY_CHUNK_BYTES or sample_bytes(dataset) >= _TINY_CHUNK_BYTES:
        return None
    return f"chunks of {size_words(size)}: finding one takes longer than decoding it; {_repack(dataset)}"


def _plain_gzip(dataset: DatasetSurvey, batch_size: int) -> str | None:
    """Rates measured: deflate of unshuffled float32 0.34 GB/s a core, shuffled 2.3, Blosc-LZ4 1.8 to 2.1."""
    if DEFLATE not in dataset.filter_ids or SHUFFLE in dataset.filter_ids:
        return None
    return "gzip without shuffle decodes at about a fifth of the rate of Blosc-LZ4: `hpctrain pack FILE DST`"


_RULES: Final[tuple[Rule, ...]] = (
    _never_written,
    _by_libhdf5,
    _samples_cut,
    _large_chunks,
    _tiny_chunks,
    _plain_gzip,
)
# A packed set is read in the order of a shuffle window, which takes each chunk once an epoch, however large it is.
_RULES_PACKED: Final[tuple[Rule, ...]] = (_tiny_chunks, _plain_gzip)
