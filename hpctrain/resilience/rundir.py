"""The run directory as a whole: whose it is, and whether it is finished."""

from __future__ import annotations

import time
from pathlib import Path

from hpctrain.config import RunConfig, dump_run, load_run, weight_differences
from hpctrain.durable import replace_file
from hpctrain.errors import ConfigError, StorageError, UsageError
from hpctrain.resilience.attempts import list_attempts, read_json, write_json


def check_world(num_ranks: int, num_lanes: int) -> None:
    """Raise `UsageError` unless every rank gets a lane."""
    if num_ranks < 1:
        raise UsageError(f"{num_ranks} ranks: at least 1 is needed; say -n 1 or more")
    if num_ranks > num_lanes:
        raise UsageError(
            f"{num_ranks} ranks, but the run has {num_lanes} lanes (lanes.num_lanes): every rank needs one; "
            f"use -n {num_lanes} or fewer, or a new run with more lanes"
        )


def open_run_dir(run_dir: Path, config: RunConfig) -> None:
    """Make the directory, or check that it holds this run.

    Raises:
        ConfigError: it cannot be made, holds other things, or holds a run that would end with other weights.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        # hidden names are temporaries of a process that was killed
        names = {path.name for path in run_dir.iterdir() if not path.name.startswith(".")}
    except OSError as error:
        raise ConfigError(f"run directory {run_dir}: {error.strerror}; choose another --dir") from error
    # A description that a user called run.toml makes no run directory, and must not be overwritten.
    is_run = "run.toml" in names and not names.isdisjoint({"attempts", "owner.lock"})
    if names - {"owner.lock", "owner.json"} and not is_run:
        raise ConfigError(f"{run_dir} is not empty and no run directory; choose another --dir")
    _refuse_other_run(run_dir, config)


def adopt_config(run_dir: Path, config: RunConfig) -> None:
    """Write the description to `run.toml` (owner only), after the same check as `open_run_dir`."""
    _refuse_other_run(run_dir, config)
    path, text = run_dir / "run.toml", dump_run(config)
    try:
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            replace_file(path, text.encode())
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror}; free space or choose another --dir"
        ) from error


def _refuse_other_run(run_dir: Path, config: RunConfig) -> None:
    path = run_dir / "run.toml"
    if not path.exists():
        return
    differences = weight_differences(load_run(path), config)
    if differences:
        raise ConfigError(
            f"{path} describes a run that would end with other weights: {'; '.join(differences)}; "
            "choose another --dir for this one, or set these back"
        )


def is_finished(run_dir: Path) -> bool:
    """Whether the run has a result; ranks write it once, whole, when everything else is done."""
    return (run_dir / "result.json").exists()


def complete_result(run_dir: Path) -> int:
    """Add to `result.json` what only the ledger knows, if missing; returns the number of restarts."""
    attempts = list_attempts(run_dir)
    restarts = len(attempts) - 1
    path = run_dir / "result.json"
    result = read_json(path)
    if result is not None:
        began_s = min((item.start.started_unix_s for item in attempts if item.start), default=time.time())
        wall_s = round(time.time() - began_s, 3)
        write_json(path, {"restarts": restarts, "attempts": len(attempts), "wall_s": wall_s, **result})
    return restarts
