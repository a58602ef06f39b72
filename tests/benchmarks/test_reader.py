from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import inputs, reader
from benchmarks.__main__ import app
from benchmarks.harness import Ended, Measurement, Observation
from benchmarks.reader import QUICK, ReaderConfig, fill, run_reader
from benchmarks.reader_client import INSTALL, SideError, why_absent
from benchmarks.reader_data import Reference
from benchmarks.reader_run import Found, Sides
from benchmarks.report import Report, as_json
from hpctrain.errors import DataError

VALUES = np.arange(60, dtype=np.uint8).reshape(20, 3)
REFERENCES = {"fields": Reference.of(VALUES), "pictures": Reference.of(VALUES)}


class Answers:
    """Stands in for a process of a peer, to answer what no real side answers when asked to."""

    def __init__(self, family: str, **answers: Any) -> None:
        self.family = family
        self.answers = {
            "names": {"names": [f"{family}, fields", f"{family}, pictures"]},
            "open": {"options": [""]},
            "choose": {"option": "", "samples": 20, "tried": {"": 1.0}},
            "check": {"digest": REFERENCES["fields"].expected(20), "count": 20, "dtypes": ["uint8"]},
            "measure": {"gb_per_s": 1.0},
            **answers,
        }
        self.orders: list[dict[str, Any]] = []

    def ask(self, order: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.orders.append(order)
        answer = self.answers[order["do"]]
        if isinstance(answer, Exception):
            raise answer
        return answer


def the_sides(*clients: Answers) -> Sides:
    sides = Sides(clients, 1.0, lambda text: None)  # type: ignore[arg-type]
    sides.prepare(0.1, REFERENCES)
    return sides


def test_sides_that_read_the_same_bytes_are_measured() -> None:
    client = Answers("zarr 3")
    sides = the_sides(client)
    assert sides.names == ["zarr 3, fields", "zarr 3, pictures"]
    assert sides.rate("zarr 3, fields", 2, 0.5, cold=True) == {"gb_per_s": 1.0}
    assert client.orders[-1] == {
        "do": "measure", "side": "zarr 3, fields", "epoch": 3, "seconds": 0.5, "cold": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"digest": 7, "count": 20, "dtypes": ["uint8"]},
        {"digest": REFERENCES["fields"].expected(20), "count": 19, "dtypes": ["uint8"]},
        {"digest": REFERENCES["fields"].expected(20), "count": 20, "dtypes": ["int8"]},
    ],
)
def test_a_side_that_reads_other_bytes_ends_the_benchmark(wrong: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"WebDataset, fields: .* reads other bytes"):
        the_sides(Answers("zarr 3"), Answers("WebDataset", check=wrong))


@pytest.mark.parametrize("at", ["open", "choose", "check"])
def test_a_side_that_fails_before_it_is_measured_is_left_out_with_the_reason(at: str) -> None:
    sides = the_sides(Answers("zarr 3", **{at: SideError("it does not like this")}), Answers("hidefix"))
    assert sides.names == ["hidefix, fields", "hidefix, pictures"]
    assert sides.found.reasons["zarr 3, fields"] == "it does not like this"


def test_a_family_that_does_not_start_is_left_out() -> None:
    sides = the_sides(Answers("zarr", names=SideError("it ended")))
    assert (sides.names, sides.found.reasons) == ([], {"zarr": "it ended"})


def test_a_side_that_fails_while_it_is_measured_is_not_asked_again() -> None:
    client = Answers("zarr 3")
    sides = the_sides(client)
    client.answers["measure"] = SideError("no answer in time")
    assert sides.rate("zarr 3, fields", 0, 0.1, cold=False) == {}
    asked = len(client.orders)
    assert sides.rate("zarr 3, fields", 1, 0.1, cold=False) == {}
    assert len(client.orders) == asked
    assert sides.found.reasons["zarr 3, fields"] == "no answer in time"
    assert sides.names == ["zarr 3, pictures"]


def test_what_was_measured_until_an_interruption_is_judged() -> None:
    report = Report("reader", {}, {})
    names = ("hpctrain blosc-lz4, fields", "blosc-lz4 in memory, fields")
    observations = [Observation(name, 0, {"gb_per_s": 3.0, "gb_per_core_s": 1.0}, 1.0) for name in names]
    report.measurements["warm"] = Measurement(names, observations, ended=Ended.INTERRUPTED)
    fill(report, reader.Prepared((), {}, 1.9, ["words"]), Found(reasons={"zarr": INSTALL}))
    met = {(bar["against"], bar["on"]): bar["met"] for bar in report.bars}
    assert met["bare loop, blosc-lz4", "fields"] is True
    assert met["raw float32, capacity", "fields"] is True
    assert met["zarr 3", "fields"] is None
    assert report.advice[0] == "3 of 18 bars are met."
    assert any(INSTALL in sentence for sentence in report.advice)


def test_quick_is_planned_for_less_than_two_minutes_and_full_for_half_an_hour() -> None:
    assert QUICK.warm_s < QUICK.budget_s < 120
    assert ReaderConfig().budget_s <= 1800


SMALL = dataclasses.replace(
    QUICK,
    num_fields=32,
    num_pictures=600,
    workers=(1, 0),
    read_s=0.01,
    choose_s=0.01,
    rounds=1,
    cold_rounds=1,
    memory_epochs=4,
)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    # Decoding the real pictures takes longer than all the rest.
    monkeypatch.setattr(inputs, "pictures", lambda count: (inputs.synthetic_pictures(count), "noise"))

    def choose(*families: str) -> None:
        absent = dict.fromkeys(("hidefix", "mosaicml", "webdataset", "zarr"), INSTALL)
        kept = {family: reason for family, reason in absent.items() if family not in families}
        # Which peers are installed is the environment's matter; a test says which it wants.
        monkeypatch.setattr(reader, "present", lambda: (list(families), kept))

    return choose


@pytest.mark.slow
def test_end_to_end_without_peers(tmp_path: Path, only: Callable[..., None]) -> None:
    only("codec", "hpctrain", "h5py")
    report, said = Report("reader", {}, {}), []
    run_reader(SMALL, tmp_path, report, said.append)
    found = json.loads(as_json(report))
    bars = {(bar["against"], bar["on"]): bar for bar in found["bars"]}
    for (against, on), bar in bars.items():
        peer = against.split(",")[0] in ("MosaicML Streaming", "WebDataset", "zarr 3", "hidefix")
        assert (bar["warm"] is None) is peer, (against, on, bar["reason"])
        assert bar["reason"] == (INSTALL if peer else "")
        assert (bar["met"] is None) is (peer or bar["relation"] is None)
    assert found["config"]["sides"]["options"]["h5py DataLoader, fields"] in ("1 workers", "0 workers")
    assert len(found["config"]["sides"]["resident_bytes"]["hpctrain blosc-lz4, pictures"]) == 4
    text = report.markdown()
    for words in ("## Bars", "## Rates", "## Settings tried", "32 x 4 x 128 x 128 float32", INSTALL):
        assert words in text


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hidefix", "mosaicml", "webdataset", "zarr"])
def test_a_peer_reads_the_same_bytes(tmp_path: Path, only: Callable[..., None], family: str) -> None:
    reason = why_absent(family)  # not imported here: hidefix brings a libhdf5 of its own
    if reason:
        pytest.skip(f"{family}: {reason}")
    only(family)
    report = Report("reader", {}, {})
    run_reader(dataclasses.replace(SMALL, workers=(2, 0)), tmp_path, report, lambda text: None)
    assert report.measurements["warm"].measured()
    assert {bar["reason"] for bar in report.bars if bar["family"] == family} <= {""}


def test_help_shows_an_example() -> None:
    answer = CliRunner().invoke(app, ["reader", "--help"])
    assert answer.exit_code == 0
    for word in ("--quick", "--json", "--markdown", "Example: python -m benchmarks reader"):
        assert word in answer.output
