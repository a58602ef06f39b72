"""`--codec auto`: every codec and some chunk sizes, tried on a sample of the source.

The rule: a core first waits for the stored bytes of a sample and then decodes them, so it trains on

    1 / (1 / decode rate + 1 / (ratio x storage rate))

raw bytes per second (the effective rate). The storage rate is what the shared filesystem gives one core, and has to be
assumed. Settings within 5 % of the best are as good: one measurement cannot tell them apart. Of these, those that store
fewest bytes are kept, again within 5 %, and of what is left the codec that decodes fastest is taken. Where several of
its chunk sizes are left, the default is taken: what a small request costs a parallel filesystem is not measured here.
Decoding is timed in one thread, by its CPU time, whole chunks, best of three.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpctrain.h5.codecs import CODECS
from hpctrain.h5.encoding import padded, stored_columns
from hpctrain.h5.filters import FilterPipeline
from hpctrain.h5.layout import Layout, chunk_pipeline, plan_layout
from hpctrain.h5.options import PackOptions
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import Columns, Source

RULE: Final = (
    "highest 1 / (1 / decode + 1 / (ratio x storage)) in raw GB/s per core; within 5 % of it the highest ratio; "
    "within 5 % of that the codec fastest to decode, and the default chunk where it is among them"
)
_NEAR: Final = 0.95
_SAMPLED_BYTES: Final = 32 << 20
_CHUNK_FACTORS: Final = (0.25, 4)  # of the default chunk
_PASSES: Final = 3


@dataclass(frozen=True)
class Trial:
    """What one setting did to the sample; rates in raw GB/s of one core."""

    codec: str
    chunk_samples: int
    ratio: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    effective_gb_per_s: float


@dataclass(frozen=True)
class Choice:
    """The trials so far, of `planned` in all, on `sampled_bytes` raw bytes; those with the default chunk come first."""

    trials: tuple[Trial, ...]
    planned: int
    storage_gb_per_s: float
    sampled_bytes: int

    rule = RULE

    @property
    def best(self) -> Trial:
        """The one that the rule takes."""
        most = max(trial.effective_gb_per_s for trial in self.trials)
        near = [trial for trial in self.trials if trial.effective_gb_per_s >= _NEAR * most]
        smallest = max(trial.ratio for trial in near)
        kept = [trial for trial in near if trial.ratio >= _NEAR * smallest]
        fastest = max(kept, key=lambda trial: trial.decode_gb_per_s)
        return next(trial for trial in kept if trial.codec == fastest.codec)

    def as_json(self) -> dict[str, Any]:
        """What the manifest keeps."""
        return {
            "rule": RULE,
            "storage_gb_per_s": self.storage_gb_per_s,
            "sampled_bytes": self.sampled_bytes,
            "codec": self.best.codec,
            "chunk_samples": self.best.chunk_samples,
            "trials": [dataclasses.asdict(trial) for trial in self.trials],
        }


Trying = Callable[[Choice], None]
"""Called after every trial."""


def choose_codec(
    source: Source, options: PackOptions, trying: Trying | None = None, codecs: Sequence[str] = CODECS
) -> Choice:
    """Try the codecs on a sample of the source, with the chunk size given or three around the default.

    Reads at most about 32 MiB (but one chunk), spread evenly over the source, and stores nothing. Errors as for `pack`.
    """
    plain = dataclasses.replace(options, codec="none")
    layouts = _layouts(source, plain)
    spans = _spans(source, max(layouts, key=lambda layout: layout.chunk_samples))
    sampled_bytes = sum(_bytes(values) for columns in spans for values in columns.values())
    choice = Choice((), len(layouts) * len(codecs), options.storage_gb_per_s, sampled_bytes)
    with ThreadPoolExecutor(options.threads or len(os.sched_getaffinity(0))) as pool:
        for layout in layouts:
            for codec in codecs:
                trial = _try(layout, codec, spans, options.storage_gb_per_s, pool)
                choice = dataclasses.replace(choice, trials=(*choice.trials, trial))
                if trying is not None:
                    trying(choice)
    return choice


def _layouts(source: Source, options: PackOptions) -> list[Layout]:
    """Those to try, the default first."""
    default = plan_layout(source, options)
    if options.chunk_samples is not None:
        return [default]
    # A 64th of the set at most, as by default: chunks are what is shuffled; and no more than is sampled.
    fitting = default.num_samples * _SAMPLED_BYTES // max(1, default.raw_bytes)
    most = max(default.chunk_samples, min(default.num_samples // 64, fitting))
    wanted = {min(max(1, int(factor * default.chunk_samples)), most) for factor in _CHUNK_FACTORS}
    others = sorted(wanted - {default.chunk_samples})
    return [
        default,
        *(plan_layout(source, dataclasses.replace(options, chunk_samples=samples)) for samples in others),
    ]


def _spans(source: Source, layout: Layout) -> list[Columns]:
    """Runs of samples, evenly spread, each as long as the largest chunk."""
    length = layout.chunk_samples
    span_bytes = max(1, layout.raw_bytes * length // layout.num_samples)
    count = max(1, min(_SAMPLED_BYTES // span_bytes, layout.num_samples // length))
    starts = np.linspace(0, layout.num_samples - length, count).astype(np.int64)
    return [stored_columns(source, layout.fields, int(start), int(start) + length) for start in starts]


def _bytes(values: npt.NDArray[Any] | Ragged) -> int:
    return values.values.nbytes if isinstance(values, Ragged) else values.nbytes


def _try(
    layout: Layout, codec: str, spans: Sequence[Columns], storage_gb_per_s: float, pool: ThreadPoolExecutor
) -> Trial:
    chunks = [chunk for columns in spans for chunk in _chunks(layout, codec, columns)]
    timed = list(pool.map(lambda chunk: _encode(*chunk), chunks))
    raw_bytes = sum(values.nbytes for _, values in chunks)
    stored_bytes = sum(len(stored) for stored, _ in timed)
    encode_s = max(sum(seconds for _, seconds in timed), 1e-9)
    decode_s = min(_decode(chunks, [stored for stored, _ in timed]) for _ in range(_PASSES))
    # Rows that are all empty make no chunk.
    ratio = raw_bytes / stored_bytes if stored_bytes else 1.0
    decode_gb_per_s = max(raw_bytes, 1) / 1e9 / decode_s
    effective = 1 / (1 / decode_gb_per_s + 1 / (ratio * storage_gb_per_s))
    return Trial(codec, layout.chunk_samples, ratio, raw_bytes / 1e9 / encode_s, decode_gb_per_s, effective)


def _chunks(layout: Layout, codec: str, columns: Columns) -> list[tuple[FilterPipeline, npt.NDArray[Any]]]:
    """The chunks that a span makes, each with what encodes it."""
    chunks = []
    for name, values in columns.items():
        field = dataclasses.replace(layout.fields[name], codec=codec)
        flat = values.values if isinstance(values, Ragged) else values
        rows = layout.chunk_values[name] if isinstance(values, Ragged) else layout.chunk_samples
        pipeline = chunk_pipeline(field, (rows, *field.sample_shape))
        # Padding would flatter; there is more where a chunk is whole.
        stop = len(flat) // rows * rows or len(flat)
        chunks += [(pipeline, padded(flat[start : start + rows], rows)) for start in range(0, stop, rows)]
    return chunks


def _encode(pipeline: FilterPipeline, values: npt.NDArray[Any]) -> tuple[bytes, float]:
    """The stored bytes, and the CPU time of this thread in seconds: others encode beside it."""
    begun_s = time.thread_time()
    return pipeline.encode(values), max(time.thread_time() - begun_s, 1e-9)


def _decode(chunks: Sequence[tuple[FilterPipeline, npt.NDArray[Any]]], stored: Sequence[bytes]) -> float:
    """Seconds (CPU time of this thread) to decode all chunks, into memory that is used again where the shape stays."""
    elapsed_s, out = 0.0, np.empty(0)
    for (pipeline, values), data in zip(chunks, stored, strict=True):
        if (out.shape, out.dtype) != (values.shape, values.dtype):
            out = np.zeros_like(values)  # touched now, not while decoding
        begun_s = time.thread_time()
        pipeline.decode(data, 0, out)
        elapsed_s += time.thread_time() - begun_s
    return max(elapsed_s, 1e-9)
