"""Samples through a function of the user: fields, ragged rows, drops, and whose mistake an error is."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.mapped import MappedSource, load_function
from hpctrain.h5.options import PackOptions
from hpctrain.h5.pack import pack
from hpctrain.h5.packed import PackedSet, open_packed
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.reader import FileSource, read_sample_chunk
from hpctrain.h5.sources import ArraySource, Columns, UnpackableError


def source(num_samples: int = 30) -> ArraySource:
    numbers = np.arange(num_samples)
    return ArraySource(
        {
            "wave": numbers[:, None] * np.ones(4, np.float32),
            "label": numbers % 3,
            "text": Ragged.from_text(f"Row {i}" for i in numbers),
        },
        ["a", "b", "c"],
    )


def packed_of(function: Callable[[dict[str, Any]], Any], root: Path, **options: Any) -> PackedSet:
    pack(MappedSource(source(), function, "mine:f"), root, PackOptions(**options))
    return open_packed(root)


def everything(packed: PackedSet) -> Columns:
    assert len(packed.chunk_sizes) == 1
    with FileSource() as files:
        return read_sample_chunk(packed, files, 0)


def test_fields_types_and_shapes_come_from_the_function(tmp_path: Path) -> None:
    def function(sample: dict[str, Any]) -> dict[str, Any]:
        sample["wave"] *= 2  # a copy
        return {
            "power": sample["wave"].astype(np.float64).reshape(2, 2),
            "label": sample["label"],
            "even": bool(sample["label"] % 2 == 0),
            "count": 7,
            "text": bytes(sample["text"]).decode().lower(),
        }

    packed = packed_of(function, tmp_path / "set", chunk_samples=30)
    assert {
        name: (item.kind, item.dtype.name, item.sample_shape) for name, item in packed.fields.items()
    } == {
        "power": ("dense", "float64", (2, 2)),
        "label": ("dense", "int64", ()),
        "even": ("dense", "uint8", ()),
        "count": ("dense", "int64", ()),
        "text": ("ragged", "uint8", ()),
    }
    assert packed.classes == ("a", "b", "c")
    columns = everything(packed)
    assert np.array_equal(columns["power"][:, 0, 1], 2.0 * np.arange(30))
    assert columns["text"].text(17) == "row 17"


def test_rows_are_ragged_where_two_differ_in_length(tmp_path: Path) -> None:
    def function(sample: dict[str, Any]) -> dict[str, Any]:
        number = int(sample["wave"][0])
        return {
            "fixed": np.arange(5, dtype=np.int32),
            "tokens": np.arange(6 if number == 29 else 5, dtype=np.int32),
            "name": "abc",  # text is ragged in any case
            "none": np.empty(0, np.uint8),
        }

    packed = packed_of(function, tmp_path / "set", chunk_samples=30)
    assert {name: (item.kind, item.sample_shape) for name, item in packed.fields.items()} == {
        "fixed": ("dense", (5,)),
        "tokens": ("ragged", ()),
        "name": ("ragged", ()),
        "none": ("ragged", ()),
    }
    assert packed.classes is None
    tokens = everything(packed)["tokens"]
    assert isinstance(tokens, Ragged)
    assert np.diff(tokens.offsets).tolist() == [5] * 29 + [6]


def test_rows_that_differ_only_in_samples_dropped_are_not_ragged(tmp_path: Path) -> None:
    def function(sample: dict[str, Any]) -> dict[str, Any]:
        odd = sample["label"] == 1
        return {"tokens": np.zeros(9 if odd else 4, np.uint16), "label": -1 if odd else 0}

    packed = packed_of(function, tmp_path / "set", clean={"labels": "drop"})
    assert (packed.fields["tokens"].sample_shape, packed.num_samples) == ((4,), 20)


def test_none_drops_the_sample(tmp_path: Path) -> None:
    def function(sample: dict[str, Any]) -> dict[str, Any] | None:
        return None if sample["label"] == 0 else {"number": sample["wave"][0]}

    report = pack(MappedSource(source(), function, "mine:f"), tmp_path / "set", PackOptions(chunk_samples=30))
    assert report.cleaning is not None
    assert report.cleaning.lines()[1].startswith(
        "  map: 10 dropped; sample 0: the function gave None; sample 3"
    )
    packed = open_packed(tmp_path / "set")
    assert everything(packed)["number"].tolist() == [i for i in range(30) if i % 3]


def test_samples_that_cannot_be_read_are_told_from_those_dropped() -> None:
    class Damaged(ArraySource):
        def read(self, start: int, stop: int) -> Columns:
            if start <= 0 < stop:
                raise DataError("does not decode")
            return super().read(start, stop)

    damaged = Damaged({"x": np.arange(6)})
    mapped = MappedSource(damaged, lambda sample: sample if sample["x"] != 3 else None, "mine:f")
    told: list[int] = []
    columns, samples = mapped.read_each(0, 6, lambda sample, error: told.append(sample))
    assert (told, samples.tolist(), columns["x"].tolist()) == ([0], [1, 2, 4, 5], [1, 2, 4, 5])


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (
            {"x": np.zeros(4), "y": 1},
            "gave 'x' as float64 of shape (4,), but float64 of shape (3,) for sample 0",
        ),
        ({"x": np.zeros(3, "f4"), "y": 1}, "gave 'x' as float32 of shape (3,), but float64 of"),
        ({"x": np.zeros(3), "y": 1.0}, "gave 'y' as float64 of shape (), but int64 of shape ()"),
        (
            {"x": np.zeros(3)},
            "gave the fields x, but x, y for sample 0; all samples must give the same, only 1-D",
        ),
        (5, "gave int, but must give a dict of fields, or None to drop the sample"),
    ],
)
def test_a_sample_that_gives_something_else_is_named(tmp_path: Path, later: Any, message: str) -> None:
    def function(sample: dict[str, Any]) -> Any:
        return later if sample["wave"][0] == 13 else {"x": np.zeros(3), "y": 1}

    with pytest.raises(DataError, match=re.escape(message)) as caught:
        packed_of(function, tmp_path / "set")
    assert str(caught.value).startswith("sample 13: mine:f gave")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "result", [{"x": object()}, {"x": "a", "y": np.array(["b"])}, {"x": np.zeros((2, 0))}]
)
def test_what_cannot_be_a_field_is_refused(result: dict[str, Any]) -> None:
    with pytest.raises(UnpackableError, match=r"what mine:f gives as '[xy]' has"):
        MappedSource(source(), lambda sample: result, "mine:f")


def test_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to pack: mine:f gave None for all 30 samples"):
        packed_of(lambda sample: None, tmp_path / "set")


def test_a_function_that_changes_its_mind_is_found_out(tmp_path: Path) -> None:
    calls = 0

    def function(sample: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal calls
        calls += sample["wave"][0] == 7
        return None if calls == 2 and sample["wave"][0] == 7 else sample

    with pytest.raises(
        DataError, match="sample 7: mine:f gave None, but something else when it was called before"
    ):
        packed_of(function, tmp_path / "set")


class TestLoading:
    """Functions by name."""

    @pytest.fixture(autouse=True)
    def path(self) -> Iterator[None]:
        before = list(sys.path)
        yield
        sys.path[:] = before

    def test_the_folder_comes_first_and_errors_name_the_line(self, tmp_path: Path) -> None:
        code = "def f(sample):\n    return helper(sample)\n\ndef helper(sample):\n    return {}[sample['label']]\n"
        (tmp_path / "map_features.py").write_text(code)
        function = load_function("map_features:f", tmp_path)
        message = (
            rf"sample 0: m:f failed in {tmp_path}/map_features.py, line 5, helper: KeyError: .*; mend the"
        )
        with pytest.raises(DataError, match=message):
            MappedSource(source(), function, "m:f")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("features", "'features' is not module:function"),
            ("map_absent:f", "importing map_absent failed: ModuleNotFoundError: .*; it was looked up in"),
            ("map_broken:f", "importing map_broken failed: ZeroDivisionError"),
            ("map_empty:f", "map_empty has no function of that name"),
        ],
    )
    def test_what_cannot_be_loaded(self, tmp_path: Path, name: str, message: str) -> None:
        (tmp_path / "map_broken.py").write_text("1 / 0")
        (tmp_path / "map_empty.py").write_text("f = 3")
        with pytest.raises(UsageError, match=message):
            load_function(name, tmp_path)
