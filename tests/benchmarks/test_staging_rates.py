from __future__ import annotations

import os
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import staging, staging_rates
from benchmarks.__main__ import app
from benchmarks.harness import Ended
from benchmarks.report import Report
from benchmarks.staging import StagingConfig, run_staging
from benchmarks.staging_cluster import describe
from benchmarks.staging_first_runs import FirstBatch
from benchmarks.staging_rates import RATE, Keeping, StagingRates
from benchmarks.staging_sets import KIB, MIB, SetSpec, size_of, write_set
from benchmarks.staging_shared import Forgetting, View, make_image, mounted, views
from benchmarks.training import BenchmarkFailed
from hpctrain.config import parse_run
from hpctrain.errors import ConfigError

SMALL = SetSpec(num_chunks=16, chunk_bytes=64 * KIB)


def test_staging_and_cp_are_measured_and_leave_nothing(tmp_path: Path) -> None:
    rates = StagingRates({"64 KiB": write_set(SMALL, tmp_path / "set")}, tmp_path)
    settings = rates.settings()
    found = {name: measure(0) for name, measure in settings.items() if "warm" in name or "cp" in name}
    assert list(settings) == [
        f"{how}, 64 KiB chunks, {state}" for state in ("warm", "cold") for how in ("staging", "cp")
    ]
    assert all(values[RATE] > 0 for values in found.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]


def test_what_does_not_come_from_a_device_is_not_called_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a filesystem in memory: the real counter depends on the machine."""
    monkeypatch.setattr(staging_rates, "device_bytes", lambda: 0)
    settings = StagingRates({"64 KiB": write_set(SMALL, tmp_path / "set")}, tmp_path).settings()
    assert settings["staging, 64 KiB chunks, cold"](0) == {}
    assert settings["staging, 64 KiB chunks, warm"](0)


def test_a_rate_of_what_was_not_staged_whole_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stager has too little room: replaced because a disk of that size takes root."""
    place = staging_rates.Place
    monkeypatch.setattr(staging_rates, "Place", lambda directory: place(directory, SMALL.num_bytes // 2))
    rates = StagingRates({"64 KiB": write_set(SMALL, tmp_path / "set")}, tmp_path)
    with pytest.raises(BenchmarkFailed, match="was not staged whole"):
        rates.settings()["staging, 64 KiB chunks, warm"](0)


def test_what_a_second_generation_adds_is_measured(tmp_path: Path) -> None:
    keeping = Keeping(SetSpec(num_chunks=50, chunk_bytes=64 * KIB, changed=5), tmp_path)
    found = keeping.settings()["backup, restore"](0)
    assert found["changed_share"] == 0.1
    assert 0.1 <= found["grown_share"] < 0.13
    assert found["grown_share"] == pytest.approx(found["added_share"], abs=0.01)


@pytest.mark.mpi
def test_the_first_batch_is_timed_in_a_process_of_its_own(tmp_path: Path) -> None:
    first = FirstBatch(write_set(SMALL, tmp_path / "set"), tmp_path)
    found = first.settings("disk")["staging, disk"](0)
    assert 0 < found["first_batch_s"] < found["opened_and_first_batch_s"]
    assert found["staged_s"] > found["open_s"]
    assert not (tmp_path / "ssd").exists()


def test_the_description_of_a_job_holds_little_in_memory() -> None:
    config = parse_run(tomllib.loads(describe(Path("/data/set"), "node_local", 5, 3, staged=True)))
    assert (config.data.order, config.train.epochs, config.lanes.num_lanes) == ("node_local", 5, 3)
    assert config.staging.dirs[0].path == Path("$HPCTRAIN_SSD")
    assert config.data.memory_budget_mib <= 32
    assert (
        parse_run(tomllib.loads(describe(Path("/data/set"), "global", 5, 3, staged=False))).staging.dirs == ()
    )


# ---- A shared directory that is counted ------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="loop devices and mounts take root")
def test_each_view_counts_what_is_read_through_it_and_can_be_slowed_down(tmp_path: Path) -> None:
    write_set(SMALL, tmp_path / "files" / "set")
    image = make_image(tmp_path / "files", tmp_path / "image")
    try:
        with (
            views(image, 2) as (one, other),
            mounted(one, tmp_path / "one") as place,
            mounted(other, tmp_path / "two"),
        ):
            one.read_ahead(0)
            before, before_other = one.read_bytes, other.read_bytes
            with Forgetting([place / "set"]):
                (path,) = (place / "set").glob("*.h5")
                begun_s = time.monotonic()
                with one.limited(2 * MIB):
                    path.read_bytes()
                slow_s = time.monotonic() - begun_s
            assert 0 <= one.read_bytes - before - path.stat().st_size < 256 * KIB
            assert other.read_bytes == before_other
            assert slow_s > 0.3
    except ConfigError as error:
        pytest.skip(f"not on this machine: {error}")


def test_a_machine_without_the_limit_says_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.staging_shared._THROTTLE", tmp_path / "absent" / "throttle")
    monkeypatch.setattr(View, "_folder", tmp_path)
    (tmp_path / "dev").write_text("7:0\n")
    with (
        pytest.raises(ConfigError, match="reading cannot be slowed down on this machine"),
        View("/dev/x").limited(1),
    ):
        pass


# ---- The benchmark as a whole ----------------------------------------------------------------------------------


def test_parts_that_cannot_be_measured_here_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without root; the parts that take seconds are replaced, for other tests measure them."""

    def refused() -> None:
        raise ConfigError("takes root")

    for name in ("require_root", "require_cluster"):
        monkeypatch.setattr(staging, name, refused)
    for name in ("FirstBatch", "Keeping", "StagingRates"):
        monkeypatch.setattr(staging, name, _Nothing)
    config = StagingConfig(set_mib=1, first_mib=1, cluster_mib=1, rounds=1, first_rounds=1, kills=0)
    report = Report("staging", {"load_1min_before": 0.0}, {})
    run_staging(config, tmp_path, report, lambda text: None)
    assert report.ended is Ended.COMPLETE
    assert report.config["reasons"] == {
        "first batch, limited": "ConfigError: takes root",
        "cluster": "ConfigError: takes root",
    }
    assert {item["what"]: item["reason"] for item in report.bars}[
        "epoch reading the shared directory / staged"
    ]


def test_the_command_line_says_how_to_use_it() -> None:
    answer = CliRunner().invoke(app, ["staging", "--help"])
    assert answer.exit_code == 0
    for word in (
        "--quick",
        "--kills",
        "--json",
        "--markdown",
        "--dir",
        "Example: python -m benchmarks staging",
    ):
        assert word in answer.output


class _Nothing:
    """Settings that take no time."""

    def __init__(self, *_: Any) -> None:
        pass

    def settings(self, *_: Any) -> dict[str, Any]:
        return {"nothing": lambda number: {"seconds": 1.0}}


def test_sizes_are_those_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(b"123")
    (tmp_path / "b").write_bytes(b"4")
    assert size_of(tmp_path) == 4
