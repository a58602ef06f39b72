"""Cleaning: what is found, what is dropped, and that neither threads nor the order of reading matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.h5 import cleaning
from hpctrain.h5.cleaning import CLEANING, clean
from hpctrain.h5.each import EachSource
from hpctrain.h5.fields import Field
from hpctrain.h5.judging import digests_of, read_each
from hpctrain.h5.options import KINDS, PackOptions, parse_clean
from hpctrain.h5.pack import Watch, pack, pack_arrays
from hpctrain.h5.packed import open_packed
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.reader import FileSource, read_sample_chunk
from hpctrain.h5.sources import ArraySource, Columns
from hpctrain.h5.team import Alone

TEXTS = ["", " \t\n", "\N{NO-BREAK SPACE}", "a", "b"]


class Damaged(ArraySource):
    """Arrays of which some samples cannot be read."""

    def __init__(self, arrays: dict[str, Any], bad: set[int], classes: list[str] | None = None) -> None:
        super().__init__(arrays, classes)
        self.bad = bad

    def read(self, start: int, stop: int) -> Columns:
        for number in range(start, stop):
            if number in self.bad:
                raise DataError(f"file-{number}: does not decode")
        return super().read(start, stop)


def arrays_of(rows: list[tuple[float, int, str]]) -> dict[str, Any]:
    return {
        "wave": np.array([[1.0, row[0]] for row in rows], np.float32).reshape(-1, 2),
        "label": np.array([row[1] for row in rows], np.int64),
        "text": Ragged.from_text(row[2] for row in rows),
    }


def expected(
    rows: list[tuple[float, int, str]], bad: set[int], actions: dict[str, str], num_classes: int
) -> tuple[list[int], dict[str, list[int]]]:
    """The same, sample by sample."""
    found: dict[str, list[int]] = {kind: [] for kind in actions}
    seen: set[str] = set()
    kept = []
    for number, row in enumerate(rows):
        wrong = {
            "undecodable": number in bad,
            "nonfinite": not np.isfinite(row[0]),
            "duplicates": repr(row) in seen,
            "empty_text": not row[2].strip(),
            "labels": not 0 <= row[1] < num_classes,
        }
        if number in bad:
            wrong = {"undecodable": True}
        else:
            seen.add(repr(row))
        for kind in actions:
            if wrong.get(kind):
                found[kind].append(number)
        if not any(wrong.get(kind) and action == "drop" for kind, action in actions.items()):
            kept.append(number)
    return kept, found


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0.5, 1.5, np.nan, np.inf]), st.integers(-1, 3), st.sampled_from(TEXTS)),
        min_size=1,
        max_size=140,  # of more than 128, two are judged at a time
    ),
    bad=st.sets(st.integers(0, 20)),
    wanted=st.sets(st.sampled_from([kind for kind in KINDS if kind != "undecodable"])),
    kept=st.sets(st.sampled_from(KINDS)),
    threads=st.sampled_from([1, 3]),
)
def test_the_samples_kept_are_those_that_a_look_at_each_would_keep(
    rows: list[tuple[float, int, str]], bad: set[int], wanted: set[str], kept: set[str], threads: int
) -> None:
    actions = {kind: "keep" if kind in kept else "drop" for kind in KINDS if kind in wanted}
    actions = {"undecodable": "drop", **actions}
    bad = {number for number in bad if number < len(rows)}
    numbers, found = expected(rows, bad, actions, 3)
    source = Damaged(arrays_of(rows), bad, ["a", "b", "c"])
    options = PackOptions(clean=actions, threads=threads)
    if not numbers:
        with pytest.raises(DataError, match="nothing to pack: all samples are dropped"):
            clean(source, options, Alone())
        return
    cleaned, report = clean(source, options, Alone())
    assert cleaned.numbers.tolist() == numbers
    assert {kind: [item.sample for item in report.of(kind)] for kind in actions} == found
    assert (report.num_samples, report.num_kept) == (len(rows), len(numbers))
    assert [entry["sample"] for entry in report.as_json()["dropped"]] == sorted(
        set(range(len(rows))) - set(numbers)
    )
    columns = cleaned.read(0, cleaned.num_samples)
    text = columns["text"]
    assert isinstance(text, Ragged)
    assert [text.text(row) for row in range(len(text))] == [rows[number][2] for number in numbers]
    assert cleaned.num_values("text") == len(text.values)
    assert np.array_equal(columns["label"], [rows[number][1] for number in numbers])


def test_a_cleaned_set_and_its_report(tmp_path: Path) -> None:
    rows = [(0.5, number % 3, f"row {number}") for number in range(200)]
    rows[7] = (np.nan, 1, "x")
    rows[90] = rows[12]
    rows[91] = rows[12]
    options = PackOptions(
        clean={"nonfinite": "drop", "duplicates": "drop", "empty_text": "keep"}, chunk_samples=16
    )
    seen: list[tuple[int, int]] = []
    report = pack(
        ArraySource(arrays_of(rows)),
        tmp_path / "set",
        options,
        Watch(checking=lambda *call: seen.append(call)),
    )
    assert report.cleaning is not None
    assert report.cleaning.lines() == [
        "cleaning: 197 of 200 samples kept",
        "  nonfinite: 1 dropped; sample 7: field 'wave': nan is not finite",
        "  duplicates: 2 dropped; sample 90: equals sample 12; sample 91: equals sample 12",
        "  empty_text: 0 kept",
    ]
    written = json.loads((tmp_path / "set" / CLEANING).read_text())
    assert written["counts"] == {"nonfinite": 1, "duplicates": 2, "empty_text": 0}
    assert written["dropped"][0] == {"sample": 7, "reasons": {"nonfinite": "field 'wave': nan is not finite"}}
    assert [entry["sample"] for entry in written["dropped"]] == [7, 90, 91]
    packed = open_packed(tmp_path / "set")
    assert packed.num_samples == 197
    with FileSource() as source:
        texts = [
            chunk["text"].text(row)
            for chunk in (read_sample_chunk(packed, source, n) for n in range(len(packed.chunk_sizes)))
            for row in range(len(chunk["text"]))
        ]
    assert texts == [row[2] for number, row in enumerate(rows) if number not in (7, 90, 91)]
    assert packed.fields["wave"].mean is not None
    assert seen[-1] == (200, 200)


def test_nothing_is_looked_for_unasked(tmp_path: Path) -> None:
    rows = [(np.nan, -5, "")] * 3
    report = pack_arrays(arrays_of(rows), tmp_path / "set")
    assert (report.num_samples, report.cleaning) == (3, None)
    assert not (tmp_path / "set" / CLEANING).exists()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "nonfinite",
            r"sample 2: field 'wave': inf is not finite; mend the source, .* --clean nonfinite=drop",
        ),
        ("duplicates", "sample 4: equals sample 1; mend"),
        ("empty_text", "sample 3: field 'text' is white space; mend"),
        ("labels", "sample 5: field 'label' is 9, but must be 0 to 4; mend"),
        ("undecodable", "file-6: does not decode"),
    ],
)
def test_a_kind_that_is_fatal_names_the_first_sample(tmp_path: Path, kind: str, message: str) -> None:
    rows = [(0.1, 0, "x"), (0.2, 1, "y"), (np.inf, 2, "z"), (0.3, 3, "  "), (0.2, 1, "y"), (0.5, 9, "u")]
    rows += [(0.6, 0, "v"), (np.inf, 9, "")]
    bad = {6} if kind == "undecodable" else set()
    options = PackOptions(clean={kind: "fatal"}, num_classes=5 if kind == "labels" else None)
    with pytest.raises(DataError, match=message):
        pack(Damaged(arrays_of(rows), bad), tmp_path / "set", options)
    assert list(tmp_path.iterdir()) == []


def test_labels_without_a_number_of_classes_must_not_be_negative(tmp_path: Path) -> None:
    labels = np.array([3, -2, 1000])
    report = pack_arrays({"label": labels}, tmp_path / "set", PackOptions(clean={"labels": "drop"}))
    assert report.cleaning is not None
    assert [tuple(item) for item in report.cleaning.found] == [
        (1, "labels", "field 'label' is -2, but must be at least 0")
    ]


def test_kinds_that_no_field_can_have_are_said_to_look_at_nothing(tmp_path: Path) -> None:
    asked = {"nonfinite": "fatal", "empty_text": "drop", "labels": "drop"}
    report = pack_arrays({"x": np.arange(5)}, tmp_path / "set", PackOptions(clean=asked))
    assert report.warnings == (
        "--clean nonfinite=fatal looked at nothing: no field holds floats",
        "--clean empty_text=drop looked at nothing: no field holds text",
        "--clean labels=drop looked at nothing: no field `label` holds integers",
    )


def test_messages_after_cleaning_name_samples_as_the_source_numbers_them(tmp_path: Path) -> None:
    wave = np.array([1.0, np.nan, 2.0, 1e6])
    options = PackOptions(clean={"nonfinite": "drop"}, store="float16")
    with pytest.raises(DataError, match=r"'wave', sample 3: 1000000\.0 is beyond float16"):
        pack_arrays({"wave": wave}, tmp_path / "set", options)


def test_a_failing_filesystem_is_no_bad_sample(tmp_path: Path) -> None:
    class Broken(ArraySource):
        def read(self, start: int, stop: int) -> Columns:
            raise StorageError("stale file handle")

    with pytest.raises(StorageError, match="stale"):
        pack(Broken({"x": np.zeros(9)}), tmp_path / "set", PackOptions(clean={"undecodable": "drop"}))


def test_a_source_that_reads_each_is_asked_to(tmp_path: Path) -> None:
    class Own(Damaged, EachSource):
        calls = 0

        def read_each(self, start: int, stop: int, on_bad: Any) -> tuple[Columns, Any]:
            self.calls += 1
            on_bad(start, DataError("my own words"))
            return ArraySource.read(self, start + 1, stop), np.arange(start + 1, stop)

    source = Own({"x": np.arange(200)}, set())
    cleaned, report = clean(source, PackOptions(clean={"undecodable": "drop"}), Alone())
    assert source.calls == 67  # three at a time
    assert cleaned.numbers.tolist() == [number for number in range(200) if number % 3]
    assert report.found[1] == (3, "undecodable", "my own words")


def test_reading_each_without_help_finds_the_bad_ones() -> None:
    source = Damaged({"x": np.arange(100), "r": Ragged.from_text(map(str, range(100)))}, {0, 41, 42, 99})
    told: list[int] = []
    columns, samples = read_each(source, 0, 100, lambda sample, error: told.append(sample))
    assert told == [0, 41, 42, 99]
    assert samples.tolist() == [number for number in range(100) if number not in told]
    assert np.array_equal(columns["x"], samples)
    assert len(columns["r"]) == 96


def test_digests_know_where_rows_end() -> None:
    first, second = Ragged.from_text(["ab", "a"]), Ragged.from_text(["c", "bc"])
    digests = digests_of({"x": first, "y": second}, 2)
    assert not np.array_equal(digests[0], digests[1])
    same = digests_of({"x": np.array([[1, 2], [1, 2]]), "y": np.array([3, 3])}, 2)
    assert np.array_equal(same[0], same[1])


def test_blocks_are_a_small_part_of_the_set() -> None:
    class Large(ArraySource):
        fields = {"x": Field("x", "dense", np.dtype("u1"), (1 << 20,))}  # noqa: RUF012

        def __init__(self) -> None:
            self.num_samples = 10_000

    assert cleaning._block_samples(Large()) == 4
    assert cleaning._block_samples(ArraySource({"x": np.zeros(640)})) == 10
    assert cleaning._block_samples(ArraySource({"x": np.zeros(3)})) == 1
    assert cleaning._block_samples(ArraySource({"x": np.zeros(10**6, np.uint8)})) == 4096


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["nan=drop"], "clean: 'nan' is unknown; choose one of: undecodable, nonfinite, duplicates"),
        (["nonfinite=refuse"], "clean: nonfinite='refuse', but must be one of: drop, keep, fatal"),
        (["nonfinite"], "'nonfinite' is not KIND=ACTION; write for example"),
        (["labels=drop", "labels=keep"], "'labels=keep' is given twice"),
        (["undecodable=keep"], "undecodable cannot be kept"),
    ],
)
def test_wrong_words(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_clean(texts)


def test_wrong_options() -> None:
    with pytest.raises(UsageError, match="num-classes is 0, but must be at least 1"):
        PackOptions(clean={"labels": "drop"}, num_classes=0)
    with pytest.raises(UsageError, match="num-classes is for --clean labels=ACTION"):
        PackOptions(num_classes=3)
    with pytest.raises(UsageError, match="clean: 'nan' is unknown"):
        PackOptions(clean={"nan": "drop"})
    assert parse_clean(["labels=drop", "nonfinite=fatal"]) == {"labels": "drop", "nonfinite": "fatal"}
