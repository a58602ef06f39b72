"""What is wrong with the samples of a source, kind by kind (see `PackOptions.clean`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from hpctrain.errors import DataError
from hpctrain.h5.blocks import joined
from hpctrain.h5.each import EachSource, Numbers, OnBad
from hpctrain.h5.fields import Field
from hpctrain.h5.options import PackOptions
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.sources import Columns, Source

MAP: Final = "map"
"""The kind of what the function of `--map` drops."""


class Finding(NamedTuple):
    """One thing wrong with one sample, by its number in the source; at most one of a kind per sample."""

    sample: int
    kind: str
    words: str


@dataclass(frozen=True)
class Judged:
    """Some samples, judged.

    `samples`: numbers of those that can be read, ascending; for each, in that order, `digests` of the content (uint64,
    shape (samples, 2); of no rows where duplicates do not matter) and `lengths` of its ragged fields.
    """

    num_judged: int
    samples: npt.NDArray[np.int64]
    found: list[Finding]
    digests: npt.NDArray[np.uint64]
    lengths: dict[str, npt.NDArray[np.int64]]

    @classmethod
    def joined(cls, parts: Sequence[Judged]) -> Judged:
        """Parts one after the other; at least one."""
        return cls(
            sum(part.num_judged for part in parts),
            np.concatenate([part.samples for part in parts]),
            [item for part in parts for item in part.found],
            np.concatenate([part.digests for part in parts]),
            {name: np.concatenate([part.lengths[name] for part in parts]) for name in parts[0].lengths},
        )


class Judge:
    """Judges the samples of a source by themselves; used by several threads at once."""

    def __init__(self, source: Source, options: PackOptions) -> None:
        self._source, self._clean = source, options.clean
        named = None if source.classes is None else len(source.classes)
        self._num_classes = options.num_classes or named
        fields = source.fields
        self._floats = [name for name, item in fields.items() if item.dtype.kind == "f"]
        self._texts = [name for name, item in fields.items() if _is_text(item)]
        self._labels = [name for name, item in fields.items() if name == "label" and _is_integer(item)]

    def judge(self, span: range) -> Judged:
        """Judge these samples; raises `DataError` for the first that is wrong in a way that is fatal."""
        found: list[Finding] = []
        columns, samples = self._read(span, found)
        if len(samples):
            found += [
                Finding(int(samples[row]), kind, words)
                for row, kind, words in self._find(columns, len(samples))
            ]
        found.sort()
        self._refuse(found)
        ragged = {name: rows for name, rows in columns.items() if isinstance(rows, Ragged)}
        wanted = "duplicates" in self._clean
        return Judged(
            len(span),
            samples,
            found,
            digests_of(columns, len(samples)) if wanted else np.empty((0, 2), np.uint64),
            {name: np.diff(rows.offsets) for name, rows in ragged.items()},
        )

    def warnings(self) -> tuple[str, ...]:
        """Kinds that were asked for and that no field can have."""
        missing = {
            "nonfinite": (self._floats, "no field holds floats"),
            "empty_text": (self._texts, "no field holds text"),
            "labels": (self._labels, "no field `label` holds integers"),
        }
        return tuple(
            f"--clean {kind}={action} looked at nothing: {missing[kind][1]}"
            for kind, action in self._clean.items()
            if kind in missing and not missing[kind][0]
        )

    def _read(self, span: range, found: list[Finding]) -> tuple[Columns, Numbers]:
        def on_bad(sample: int, error: DataError) -> None:
            if self._clean.get("undecodable") != "drop":
                raise error
            found.append(Finding(sample, "undecodable", str(error)))

        if not span:
            return no_rows(self._source.fields), np.empty(0, np.int64)
        columns, samples = read_each(self._source, span.start, span.stop, on_bad)
        if len(samples) + len(found) < len(span):
            bad = {item.sample for item in found}
            left_out = set(span) - set(samples.tolist()) - bad
            found += [Finding(sample, MAP, "the function gave None") for sample in left_out]
        return columns, samples

    def _find(self, columns: Columns, num_rows: int) -> Iterator[tuple[int, str, str]]:
        """Row, kind and words."""
        kinds: dict[str, Callable[[Columns, int], dict[int, str]]] = {
            "nonfinite": self._nonfinite,
            "empty_text": self._empty_text,
            "labels": self._wrong_labels,
        }
        for kind, look in kinds.items():
            if kind in self._clean:
                for row, words in look(columns, num_rows).items():
                    yield row, kind, words

    def _refuse(self, found: Sequence[Finding]) -> None:
        for item in found:
            if self._clean.get(item.kind) == "fatal":
                raise DataError(fatal_words(item))

    def _nonfinite(self, columns: Columns, num_rows: int) -> dict[int, str]:
        bad: dict[int, str] = {}
        for name in self._floats:
            values = _dense(columns, name).reshape(num_rows, -1)
            for row in np.flatnonzero(~np.isfinite(values).all(axis=1)).tolist():
                first = values[row][~np.isfinite(values[row])][0]
                bad.setdefault(row, f"field {name!r}: {first} is not finite")
        return bad

    def _empty_text(self, columns: Columns, num_rows: int) -> dict[int, str]:
        bad: dict[int, str] = {}
        for name in self._texts:
            rows = columns[name]
            for row in range(num_rows):
                text = bytes(rows.row(row)) if isinstance(rows, Ragged) else b""
                if not text.decode(errors="replace").strip():
                    bad.setdefault(row, f"field {name!r} is {'white space' if text else 'empty'}")
        return bad

    def _wrong_labels(self, columns: Columns, num_rows: int) -> dict[int, str]:
        bad: dict[int, str] = {}
        for name in self._labels:
            values = _dense(columns, name).reshape(num_rows, -1)
            wrong = values < 0
            bound = "but must be at least 0"
            if self._num_classes is not None:
                wrong |= values >= self._num_classes
                bound = f"but must be 0 to {self._num_classes - 1}"
            for row in np.flatnonzero(wrong.any(axis=1)).tolist():
                bad[row] = f"field {name!r} is {values[row][wrong[row]][0]}, {bound}"
        return bad


def fatal_words(item: Finding) -> str:
    """The message of a finding that is fatal."""
    return (
        f"sample {item.sample}: {item.words}; mend the source, or let it pass with --clean {item.kind}=drop or "
        f"--clean {item.kind}=keep"
    )


def read_each(source: Source, start: int, stop: int, on_bad: OnBad) -> tuple[Columns, Numbers]:
    """Those of the samples [start, stop) that can be read, and their numbers; `on_bad` is told of the others.

    A source that cannot tell by itself is read in halves, and halves of those, until the bad ones are alone.
    """
    if isinstance(source, EachSource):
        return source.read_each(start, stop, on_bad)
    try:
        return source.read(start, stop), np.arange(start, stop)
    except DataError as error:
        if stop - start == 1:
            on_bad(start, error)
            return no_rows(source.fields), np.empty(0, np.int64)
    middle = (start + stop) // 2
    first, second = read_each(source, start, middle, on_bad), read_each(source, middle, stop, on_bad)
    return (
        {name: joined([first[0][name], second[0][name]]) for name in source.fields},
        np.concatenate([first[1], second[1]]),
    )


def no_rows(fields: Mapping[str, Field]) -> Columns:
    """Columns of no samples."""
    return {
        name: Ragged.from_rows([], item.dtype)
        if item.kind == "ragged"
        else np.empty((0, *item.sample_shape), item.dtype)
        for name, item in fields.items()
    }


def digests_of(columns: Columns, num_rows: int) -> npt.NDArray[np.uint64]:
    """xxh3_128 of the content of each sample, as two words each: equal in all fields gives equal digests."""
    hashes = [xxhash.xxh3_128() for _ in range(num_rows)]
    for rows in columns.values():
        if isinstance(rows, Ragged):
            for row, content in enumerate(hashes):
                content.update(len(rows.row(row)).to_bytes(8, "little"))  # where one row ends the next begins
                content.update(np.ascontiguousarray(rows.row(row)).data)
        else:
            for content, values in zip(hashes, np.ascontiguousarray(rows), strict=True):
                content.update(np.ascontiguousarray(values).data)
    return np.frombuffer(b"".join(item.digest() for item in hashes), np.uint64).reshape(num_rows, 2)


def _dense(columns: Columns, name: str) -> npt.NDArray[Any]:
    rows = columns[name]
    return rows.values if isinstance(rows, Ragged) else rows


def _is_text(item: Field) -> bool:
    return item.kind == "ragged" and item.dtype == np.uint8 and item.encoding is None


def _is_integer(item: Field) -> bool:
    return item.kind == "dense" and item.dtype.kind in "iu"
