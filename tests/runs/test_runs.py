"""Whole runs through the real command line: the digests, and every way a run can be disturbed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpctrain.observe.events import read_events
from tests.support import ROOT, mpirun, read_json
from tests.toy import STEPS, processes_of, result, start, toy_run, train

pytestmark = pytest.mark.mpi

RANKS = 2
"""Enough to lose one; three are started where the number matters."""


def events(run_dir: Path, attempt: int = 1, rank: int = 0) -> list[dict[str, Any]]:
    return read_events(run_dir / "attempts" / f"a{attempt:04d}" / "events" / f"rank-{rank}.jsonl")


def one_event(run_dir: Path, kind: str, attempt: int) -> dict[str, Any]:
    (found,) = (event for event in events(run_dir, attempt) if event["kind"] == kind)
    return found


def end(run_dir: Path, attempt: int = 1) -> dict[str, Any]:
    return read_json(run_dir / "attempts" / f"a{attempt:04d}" / "end.json")


def record(run_dir: Path, rank: int, attempt: int = 1) -> dict[str, Any]:
    return read_json(run_dir / "attempts" / f"a{attempt:04d}" / "ranks" / f"{rank}.json")


def attempts(run_dir: Path) -> int:
    return len(list((run_dir / "attempts").iterdir()))


def test_the_undisturbed_run(undisturbed: dict[str, Any]) -> None:
    assert undisturbed["steps"] == STEPS
    assert undisturbed["restarts"] == 0
    assert undisturbed["metrics"]["accuracy"] > 0.4
    assert undisturbed["staging"]["damaged_chunks"] == 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_samples_do_not_depend_on_the_ranks(
    ranks: int, tmp_path: Path, data: Path, undisturbed: dict[str, Any]
) -> None:
    done = train(toy_run(tmp_path, data), ranks, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    found = result(tmp_path / "run")
    assert found["samples_digest"] == undisturbed["samples_digest"]
    assert found["ranks"] == ranks


@pytest.mark.slow
@pytest.mark.parametrize("time_number", range(5))
def test_identical_runs_of_3_ranks_end_with_the_same_weights(
    time_number: int, tmp_path: Path, data: Path, undisturbed: dict[str, Any]
) -> None:
    """Six with the undisturbed one. With Horovod's tensor fusion on, such runs gave different bits."""
    done = train(toy_run(tmp_path, data), 3, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    for key in ("weights_digest", "state_digest", "samples_digest"):
        assert result(tmp_path / "run")[key] == undisturbed[key]


def test_a_run_without_staging_ends_the_same(tmp_path: Path, data: Path, pair: dict[str, Any]) -> None:
    description = toy_run(tmp_path, data)
    text = description.read_text()
    description.write_text(text[: text.index("[staging]")] + text[text.index("[checkpoint]") :])
    assert train(description, RANKS, tmp_path / "run").returncode == 0
    assert result(tmp_path / "run")["state_digest"] == pair["state_digest"]


def test_going_on_with_another_number_of_ranks(
    tmp_path: Path, data: Path, undisturbed: dict[str, Any]
) -> None:
    """The cursor is valid for any number of ranks: every sample once, in the same steps."""
    description = toy_run(tmp_path, data, resilience__max_attempts=1)
    assert train(description, 3, tmp_path / "run", "kill@step:rank=1,step=33").returncode == 72
    done = train(description, 2, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "run")["samples_digest"] == undisturbed["samples_digest"]
    assert "other numerics, bits may differ from here on: order_of_sums" in done.stderr


RELAUNCHED = {
    "raises": ("raise@step:rank=1,step=25,attempt=1", "bug"),
    "raises in backward": ("raise@backward:rank=1,step=25,attempt=1", "bug"),
    "exits": ("exit@step:rank=1,step=25,attempt=1,code=3", "other"),
    "is killed in the exchange": ("kill@exchange:rank=0,step=25,attempt=1", "killed"),
    "has an I/O error": ("eio@step:rank=1,step=25,attempt=1", "io"),
    "is killed at the start": ("kill@start:rank=1,attempt=1", "killed"),
    "is killed in the evaluation": ("kill@evaluate:rank=1,attempt=1", "killed"),
}


@pytest.mark.parametrize("what", RELAUNCHED)
def test_a_rank_that(what: str, tmp_path: Path, data: Path, pair: dict[str, Any]) -> None:
    faults, failure = RELAUNCHED[what]
    done = train(toy_run(tmp_path, data), RANKS, tmp_path / "run", faults)
    assert done.returncode == 0, done.stderr
    assert end(tmp_path / "run")["failure"] == failure
    assert attempts(tmp_path / "run") == 2
    assert result(tmp_path / "run")["state_digest"] == pair["state_digest"]
    assert not processes_of(tmp_path / "run")


@pytest.mark.parametrize(("fault", "phase"), [("hang@step", "data"), ("stop@backward", "compute")])
def test_a_hang_becomes_stacks_and_records(
    fault: str, phase: str, tmp_path: Path, data: Path, undisturbed: dict[str, Any]
) -> None:
    """A rank that sleeps for ever dumps itself; one that is stopped cannot, but the others wait for it and dump."""
    description = toy_run(tmp_path, data, resilience__hang_timeout_s=5)
    begun = time.monotonic()
    done = train(description, 3, tmp_path / "run", f"{fault}:rank=1,step=25,attempt=1")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < 100
    assert end(tmp_path / "run")["failure"] == "hang"
    others = [record(tmp_path / "run", rank) for rank in (0, 2)]
    assert {other["failure"] for other in others} == {"hang"}
    stacks = (tmp_path / "run" / "attempts" / "a0001" / "logs" / "rank-0.stacks").read_text()
    assert "take_step" in stacks
    if fault.startswith("hang"):
        assert record(tmp_path / "run", 1)["failure"] == "hang"
        assert "_hang" in (tmp_path / "run" / "attempts" / "a0001" / "logs" / "rank-1.stacks").read_text()
    assert result(tmp_path / "run")["state_digest"] == undisturbed["state_digest"]
    assert not processes_of(tmp_path / "run")


def wait_for_step(run_dir: Path, step: int, deadline_s: float = 60) -> None:
    limit = time.monotonic() + deadline_s
    while not any(event["kind"] == "checkpoint" and event["step"] >= step for event in events(run_dir)):
        assert time.monotonic() < limit, "the run does not get there"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_asked_to_leave_it_saves_and_comes_back(
    number: signal.Signals, tmp_path: Path, data: Path, pair: dict[str, Any]
) -> None:
    description = toy_run(tmp_path, data, task__options={"sleep_s": 0.02})
    process = start(description, RANKS, tmp_path / "run")
    wait_for_step(tmp_path / "run", 10)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert [record(tmp_path / "run", rank)["failure"] for rank in range(RANKS)] == ["leave"] * RANKS
    stopped = next(event["step"] for event in events(tmp_path / "run") if event["kind"] == "stop")
    assert (tmp_path / "run" / "checkpoints" / f"step-{stopped:09d}-a0001").is_dir(), "no step was lost"
    done = train(description, RANKS, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert one_event(tmp_path / "run", "restore", 2)["step"] == stopped
    assert result(tmp_path / "run")["weights_digest"] == pair["weights_digest"]
    assert not processes_of(tmp_path / "run")


def test_asked_to_leave_while_it_starts(tmp_path: Path, data: Path, pair: dict[str, Any]) -> None:
    """The flag is polled before the first step: a short grace must not be spent on a step."""
    description = toy_run(tmp_path, data)
    process = start(description, RANKS, tmp_path / "run")
    pid_files = [
        tmp_path / "run" / "attempts" / "a0001" / "ranks" / f"{rank}.pid.json" for rank in range(RANKS)
    ]
    limit = time.monotonic() + 60
    while not all(path.exists() for path in pid_files):
        assert time.monotonic() < limit
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert [record(tmp_path / "run", rank)["failure"] for rank in range(RANKS)] == ["leave"] * RANKS
    assert record(tmp_path / "run", 0)["step"] == -1
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert train(description, RANKS, tmp_path / "run").returncode == 0
    assert result(tmp_path / "run")["state_digest"] == pair["state_digest"]


def test_a_second_signal_during_the_save_changes_nothing(
    tmp_path: Path, data: Path, pair: dict[str, Any]
) -> None:
    description = toy_run(tmp_path, data, task__options={"sleep_s": 0.02}, checkpoint__interval_steps=40)
    process = start(description, RANKS, tmp_path / "run", "sleep@checkpoint.rename:rank=0,s=1.5,attempt=1")
    limit = time.monotonic() + 60
    while not any(event["kind"] == "step" for event in events(tmp_path / "run")):
        assert time.monotonic() < limit
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.7)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
    assert train(description, RANKS, tmp_path / "run").returncode == 0
    assert result(tmp_path / "run")["weights_digest"] == pair["weights_digest"]


def test_the_supervisor_killed_leaves_no_rank_and_the_next_one_goes_on(
    tmp_path: Path, data: Path, pair: dict[str, Any]
) -> None:
    description = toy_run(tmp_path, data, task__options={"sleep_s": 0.02})
    process = start(description, RANKS, tmp_path / "run")
    wait_for_step(tmp_path / "run", 10)
    process.kill()
    process.communicate(timeout=30)
    limit = time.monotonic() + 30
    while processes_of(tmp_path / "run"):
        assert time.monotonic() < limit, processes_of(tmp_path / "run")
        time.sleep(0.1)
    done = train(description, RANKS, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run" / "attempts" / "a0001" / "end.json").exists()
    assert result(tmp_path / "run")["weights_digest"] == pair["weights_digest"]


def test_a_run_that_is_alive_is_left_alone(tmp_path: Path, data: Path) -> None:
    description = toy_run(tmp_path, data, task__options={"sleep_s": 0.05})
    process = start(description, 1, tmp_path / "run")
    try:
        wait_for_step(tmp_path / "run", 10)
        second = train(description, 1, tmp_path / "run")
        assert second.returncode == 78
        assert str(process.pid) in second.stderr
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_costs_an_interval_and_no_bits(
    file: str, tmp_path: Path, data: Path, pair: dict[str, Any]
) -> None:
    description = toy_run(tmp_path, data, resilience__max_attempts=1)
    assert train(description, RANKS, tmp_path / "run", "kill@step:rank=1,step=45").returncode == 72
    damaged = tmp_path / "run" / "checkpoints" / "step-000000040-a0001" / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    done = train(description, RANKS, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert file in one_event(tmp_path / "run", "refused_checkpoint", 2)["reason"]
    assert one_event(tmp_path / "run", "restore", 2)["step"] == 30
    assert end(tmp_path / "run", 2)["step_before"] == 30
    assert (tmp_path / "run" / "checkpoints" / f"refused-{damaged.parent.name}").is_dir()
    assert file in done.stderr, "the user is told"
    assert result(tmp_path / "run")["state_digest"] == pair["state_digest"]


def test_all_checkpoints_damaged_begins_again(tmp_path: Path, data: Path, pair: dict[str, Any]) -> None:
    description = toy_run(tmp_path, data, resilience__max_attempts=1)
    assert train(description, RANKS, tmp_path / "run", "kill@step:rank=1,step=45").returncode == 72
    for path in (tmp_path / "run" / "checkpoints").glob("step-*/state.json"):
        path.write_text("{}")
    done = train(description, RANKS, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "run")["state_digest"] == pair["state_digest"]


def test_a_late_write_of_an_older_attempt_is_never_read(
    tmp_path: Path, data: Path, pair: dict[str, Any]
) -> None:
    """A zombie of attempt 1 publishes a checkpoint of step 50 while attempt 2 runs; attempt 3 does not read it."""
    description = toy_run(tmp_path, data, resilience__max_attempts=1)
    run_dir = tmp_path / "run"
    assert train(description, RANKS, run_dir, "kill@step:rank=1,step=25").returncode == 72
    assert train(description, RANKS, run_dir, "kill@step:rank=1,step=35").returncode == 72
    late = run_dir / "checkpoints" / "step-000000050-a0001"
    shutil.copytree(run_dir / "checkpoints" / "step-000000020-a0001", late)
    done = train(description, RANKS, run_dir)
    assert done.returncode == 0, done.stderr
    assert late.name not in read_json(run_dir / "attempts" / "a0003" / "start.json")["checkpoints"]
    assert result(run_dir)["state_digest"] == pair["state_digest"]


def test_no_space_for_a_checkpoint_costs_that_checkpoint(
    tmp_path: Path, data: Path, pair: dict[str, Any]
) -> None:
    done = train(
        toy_run(tmp_path, data), RANKS, tmp_path / "run", "enospc@checkpoint.write:rank=0,step=20,attempt=1"
    )
    assert done.returncode == 0, done.stderr
    assert [e["step"] for e in events(tmp_path / "run") if e["kind"] == "checkpoint_failed"] == [20]
    assert "step 20 not saved" in done.stderr
    assert result(tmp_path / "run")["state_digest"] == pair["state_digest"]
    assert result(tmp_path / "run")["restarts"] == 0


def test_no_space_for_the_last_checkpoint_is_an_io_failure(tmp_path: Path, data: Path) -> None:
    description = toy_run(tmp_path, data, resilience__max_attempts=1)
    done = train(description, RANKS, tmp_path / "run", f"enospc@checkpoint.rename:step={STEPS}")
    assert done.returncode == 74, done.stderr
    assert record(tmp_path / "run", 0)["failure"] == "io"
    assert f"step {STEPS} not saved" in done.stderr


def test_no_space_on_the_node_costs_one_warning(tmp_path: Path, data: Path, pair: dict[str, Any]) -> None:
    done = train(toy_run(tmp_path, data), RANKS, tmp_path / "run", "enospc@staging.write:nth=20")
    assert done.returncode == 0, done.stderr
    warnings = [
        event
        for rank in range(RANKS)
        for event in events(tmp_path / "run", 1, rank)
        if event["kind"] == "warning" and "staging" in event["message"]
    ]
    assert 1 <= len(warnings) <= RANKS, "one per rank at most"
    assert all("writing failed" in warning["message"] for warning in warnings)
    assert result(tmp_path / "run")["state_digest"] == pair["state_digest"]


def test_a_dead_agent_costs_a_warning_and_no_bits(tmp_path: Path, data: Path, pair: dict[str, Any]) -> None:
    done = train(toy_run(tmp_path, data), RANKS, tmp_path / "run", "kill@staging.write:nth=9")
    assert done.returncode == 0, done.stderr
    found = result(tmp_path / "run")
    assert (found["restarts"], found["state_digest"]) == (0, pair["state_digest"])
    for rank in range(RANKS):
        warnings = [
            event["message"] for event in events(tmp_path / "run", 1, rank) if event["kind"] == "warning"
        ]
        assert sum("staging agent" in message for message in warnings) == 1, warnings


def copy_of(data: Path, folder: Path) -> Path:
    shutil.copytree(data, folder / "data")
    return folder / "data"


def stops_at_once(
    description: Path, run_dir: Path, code: int, said: str, ranks: int = 1, faults: str = ""
) -> None:
    """The user must mend it: one attempt at most, the right code, the words, and nothing left behind."""
    done = train(description, ranks, run_dir, faults)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert not (run_dir / "attempts").exists() or attempts(run_dir) == 1
    assert not processes_of(run_dir)


def test_a_truncated_shard(tmp_path: Path, data: Path) -> None:
    broken = copy_of(data, tmp_path)
    shard = sorted(broken.glob("shard-*.h5"))[0]
    os.truncate(shard, shard.stat().st_size - 100)
    stops_at_once(toy_run(tmp_path, broken), tmp_path / "run", 65, shard.name)


def test_one_flipped_byte_in_a_shard(tmp_path: Path, data: Path) -> None:
    from hpctrain.h5.packed import open_packed

    broken = copy_of(data, tmp_path)
    index = open_packed(broken).shards[0].dense["image"]
    content = bytearray(index.path.read_bytes())
    content[int(index.offsets[1]) + 20] ^= 1
    index.path.write_bytes(content)
    stops_at_once(toy_run(tmp_path, broken), tmp_path / "run", 65, index.path.name)


def test_data_that_is_not_packed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    stops_at_once(toy_run(tmp_path, tmp_path / "data"), tmp_path / "run", 65, "hpctrain pack")


def test_other_data_at_a_restart(tmp_path: Path, data: Path) -> None:
    from tests.support import small_set

    description = toy_run(tmp_path, data, resilience__max_attempts=1)
    assert train(description, RANKS, tmp_path / "run", "kill@step:rank=1,step=25").returncode == 72
    other = small_set(tmp_path / "other", 240, 10, seed=9)
    done = train(toy_run(tmp_path, other.root, resilience__max_attempts=1), RANKS, tmp_path / "run")
    assert done.returncode == 78, done.stderr
    assert "another --dir" in done.stderr


def test_a_task_that_cannot_be_imported(tmp_path: Path, data: Path) -> None:
    stops_at_once(
        toy_run(tmp_path, data, task__name="tests.toy:Missing"), tmp_path / "run", 78, "it has ['Toy']"
    )


def test_task_options_that_do_not_fit(tmp_path: Path, data: Path) -> None:
    stops_at_once(toy_run(tmp_path, data, task__options={"slep_s": 1}), tmp_path / "run", 78, "slep_s")


def test_more_ranks_than_lanes(tmp_path: Path, data: Path) -> None:
    stops_at_once(toy_run(tmp_path, data), tmp_path / "run", 64, "4", ranks=5)


def test_another_runs_directory(tmp_path: Path, data: Path) -> None:
    description = toy_run(tmp_path, data, resilience__max_attempts=1)
    assert train(description, 2, tmp_path / "run", "kill@step:rank=1,step=12").returncode == 72
    done = train(toy_run(tmp_path, data, train__seed=2, lanes__lane_batch=5), 2, tmp_path / "run")
    assert done.returncode == 78
    assert "train.seed: 1 -> 2" in done.stderr
    assert "lanes.lane_batch: 3 -> 5" in done.stderr
    assert attempts(tmp_path / "run") == 1


def test_a_loss_that_is_not_finite_stops(tmp_path: Path, data: Path) -> None:
    description = toy_run(tmp_path, data, task__options={"bad_step": 7})
    stops_at_once(description, tmp_path / "run", 65, "on_nonfinite", ranks=2)


def test_a_loss_that_is_not_finite_is_skipped_on_all_ranks(tmp_path: Path, data: Path) -> None:
    description = toy_run(tmp_path, data, task__options={"bad_step": 7}, train__on_nonfinite="skip")
    done = train(description, 2, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "run")["skipped_steps"] == 1
    assert result(tmp_path / "run")["steps"] == STEPS


def test_without_progress_it_stops(tmp_path: Path, data: Path) -> None:
    description = toy_run(tmp_path, data, resilience__max_no_progress=2)
    done = train(description, 2, tmp_path / "run", "raise@step:rank=1,step=5")
    assert done.returncode == 70, done.stderr
    assert attempts(tmp_path / "run") == 2
    assert "InjectedFault" in done.stderr


def test_singletons_are_found_and_explained(tmp_path: Path, data: Path) -> None:
    """Ranks that do not find each other: the rank module started without mpirun, for a run of 3."""
    description = toy_run(tmp_path, data)
    run_dir = tmp_path / "run"
    attempt = run_dir / "attempts" / "a0001"
    for name in ("ranks", "events", "logs"):
        (attempt / name).mkdir(parents=True)
    shutil.copy(description, run_dir / "run.toml")
    (attempt / "start.json").write_text(
        json.dumps({"num_ranks": 3, "checkpoints": [], "task_dir": str(tmp_path)})
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMIX_"))}
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain.training", str(run_dir), "1"],
        env={**clean, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 78, done.stderr
    assert "every process is alone in its own world" in record(run_dir, 0)["message"]


def test_mpirun_with_another_number(tmp_path: Path, data: Path) -> None:
    description = toy_run(tmp_path, data)
    run_dir = tmp_path / "run"
    attempt = run_dir / "attempts" / "a0001"
    for name in ("ranks", "events", "logs"):
        (attempt / name).mkdir(parents=True)
    shutil.copy(description, run_dir / "run.toml")
    (attempt / "start.json").write_text(
        json.dumps({"num_ranks": 3, "checkpoints": [], "task_dir": str(tmp_path)})
    )
    done = subprocess.run(
        [*mpirun(2), sys.executable, "-m", "hpctrain.training", str(run_dir), "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0
    assert "2 rank(s), 3 were asked for" in record(run_dir, 0)["message"]


@pytest.mark.parametrize(
    "changes",
    [
        {"precision__compute": "bf16"},
        {"precision__wire": "fp16"},
        {"comm__allreduce": "ring"},
        {"data__io_threads": 3},
    ],
)
def test_other_settings_train_too(
    changes: dict[str, Any], tmp_path: Path, data: Path, pair: dict[str, Any]
) -> None:
    done = train(toy_run(tmp_path, data, **changes), RANKS, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    found = result(tmp_path / "run")
    assert found["samples_digest"] == pair["samples_digest"]
    assert found["metrics"]["accuracy"] > 0.4
    same_bits = found["weights_digest"] == pair["weights_digest"]
    if "data__io_threads" in changes:
        assert same_bits, "reading threads must not change bits"
    if changes.keys() & {"precision__compute", "precision__wire"}:
        assert not same_bits, "the setting had no effect"
