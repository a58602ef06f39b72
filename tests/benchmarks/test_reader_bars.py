from __future__ import annotations

import json

import pytest

from benchmarks.harness import Measurement, Observation
from benchmarks.reader_bars import (
    Bar,
    Judged,
    judge_memory,
    judge_rates,
    judge_storage,
    rate_bars,
)
from benchmarks.reader_client import INSTALL
from benchmarks.reader_tables import bars_table, rates_table, tried_table

NONE = Measurement(())


def measured(rates: dict[str, list[float]]) -> Measurement:
    observations = [
        Observation(name, number, {"gb_per_s": rate, "gb_per_core_s": rate / 2}, 1.0)
        for name, values in rates.items()
        for number, rate in enumerate(values)
    ]
    return Measurement(tuple(rates), observations)


def test_every_bar_that_was_asked_for_is_there() -> None:
    bounds = {(bar.against, bar.on): bar.bound for bar in rate_bars() if bar.relation}
    assert bounds == {
        ("bare loop, blosc-lz4", "fields"): 0.75,
        ("bare loop, blosc-zstd", "fields"): 0.75,
        ("bare loop, blosc-lz4", "pictures"): 0.6,
        ("bare loop, blosc-zstd", "pictures"): 0.6,
        ("h5py, random, gzip-4", "fields"): 30,
        ("h5py + DataLoader", "fields"): 8,
        ("h5py + DataLoader", "pictures"): 8,
        ("hidefix, whole read", "fields"): 1,
        **{
            (peer, on): 2
            for peer in ("MosaicML Streaming", "WebDataset", "zarr 3")
            for on in ("fields", "pictures")
        },
    }


def test_rates_are_compared_within_rounds() -> None:
    # The machine is half as fast in the second and third round.
    rates = {
        "hpctrain blosc-lz4, fields": [8.0, 4.0, 4.0],
        "WebDataset, fields": [2.0, 1.0, 1.0],
        "hpctrain whole, fields": [2.0, 1.0, 1.0],
        "hidefix, fields": [2.0, 1.0, 1.0],
    }
    judged = {
        (item.bar.against, item.bar.on): item for item in judge_rates(measured(rates), measured(rates), {})
    }
    web = judged["WebDataset", "fields"]
    assert (web.values, web.cold, web.is_met) == ((4.0, 4.0, 4.0), (4.0, 4.0, 4.0), True)
    assert judged["hidefix, whole read", "fields"].is_met is False  # as fast is not faster
    assert judged["WebDataset", "pictures"].is_met is None


@pytest.mark.parametrize(
    ("relation", "values", "is_met"),
    [
        ("at least", (2.0,), True),
        ("at least", (1.9, 2.1, 1.8), False),
        ("above", (2.0,), False),
        ("above", (2.1,), True),
        ("at most", (2.0,), True),
        ("at most", (2.1,), False),
        (None, (9.0,), None),
        ("at least", (), None),
    ],
)
def test_relations(relation: str, values: tuple[float, ...], is_met: bool | None) -> None:
    assert Judged(Bar("a", "b", 2.0, relation), values).is_met is is_met  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "named", ["WebDataset, fields", "webdataset", "hpctrain blosc-lz4, fields", "hpctrain"]
)
def test_what_is_absent_is_reported_with_the_reason(named: str) -> None:
    judged = judge_rates(NONE, NONE, {named: INSTALL})
    (web,) = [item for item in judged if (item.bar.against, item.bar.on) == ("WebDataset", "fields")]
    assert web.reason == INSTALL == "not installed: pip install hpctrain[peers]"
    assert web.sentence() == f"Not measured: WebDataset, fields: {INSTALL} (bar: at least 2)."
    assert web.document()["reason"] == INSTALL
    (row,) = [row for row in bars_table(judged).rows if row[:2] == ("WebDataset", "fields")]
    assert row == ("WebDataset", "fields", "0", INSTALL, "-", "at least 2", "-")


def test_the_document_has_value_interval_bar_and_whether_it_is_met() -> None:
    values = (0.7, 0.8, 0.9, 0.8, 0.8, 0.8)
    found = json.loads(json.dumps(Judged(Bar("a", "fields", 0.75), values).document()))
    assert (found["against"], found["on"], found["relation"], found["bound"]) == (
        "a",
        "fields",
        "at least",
        0.75,
    )
    assert found["met"] is True
    assert found["warm"]["median"] == 0.8
    assert (found["warm"]["interval"]["low"], found["warm"]["interval"]["high"]) == (0.7, 0.9)
    assert found["cold"] is None


def test_memory_must_be_flat_from_the_third_epoch_on() -> None:
    name = "hpctrain blosc-lz4, fields"
    flat, other = judge_memory({name: [50, 90, 100, 104, 102]}, {"hpctrain blosc-lz4, pictures": "it died"})
    assert flat.values == pytest.approx((0.04,))
    assert flat.is_met
    assert (other.is_met, other.reason) == (None, "it died")
    (grows, _) = judge_memory({name: [50, 90, 100, 106, 112]}, {})
    assert grows.is_met is False


def test_storage_is_judged_by_capacity_and_by_the_rate_of_a_core() -> None:
    warm = measured({"hpctrain blosc-lz4, fields": [2.0, 2.2, 1.8]})
    capacity, rate = judge_storage(1.59, warm, cores=2)
    assert (capacity.is_met, rate.values, rate.is_met) == (False, (1.0, 1.1, 0.9), True)


def test_tables_have_a_row_for_each() -> None:
    warm = measured({"a, fields": [2.0] * 6, "b, fields": [1.0] * 6})
    table = rates_table(warm, NONE, {"a, fields": "2 workers"})
    assert table.rows[0] == ("a, fields", "2 workers", "2.00 (2.00 .. 2.00)", "1.00", "-")
    assert table.rows[1][:2] == ("b, fields", "-")
    tried = tried_table({"a, fields": {"2 workers": 1.5, "0 workers": 1.0}, "b, fields": {"": 2.0}})
    assert tried.rows == [("a, fields", "2 workers: 1.50, 0 workers: 1.00")]
    assert bars_table([Judged(Bar("a", "fields", 0, None), (3.0,))]).rows[0][-2:] == ("-", "-")
