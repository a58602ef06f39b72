"""`result.json`: what a finished run says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.snapshot import state_digest, take_snapshot, weights_digest
from hpctrain.durable import replace_file
from hpctrain.resilience.attempts import refuse_superseded
from hpctrain.training.loop import Run


def write_result(run: Run, run_dir: Path, attempt: int, staging: Mapping[str, int]) -> None:
    """Write the result of a finished run (on rank 0), whole or not at all; `staging`: the job's counters.

    Raises `PeerError` where a newer attempt was started: the run, and its result, are that one's.
    """
    refuse_superseded(run_dir, attempt)
    document = describe_result(run, run_dir, attempt) | {"staging": dict(staging)}
    replace_file(run_dir / "result.json", json.dumps(document, indent=1).encode())


def describe_result(run: Run, run_dir: Path, attempt: int) -> dict[str, Any]:
    """The digests, the metrics, and where the time of this attempt went (seconds by phase)."""
    snapshot = take_snapshot(run.model, run.optimizer, run.cursor)
    steps, seconds = run.cursor.step - run.restored_step, dict(run.phases.seconds)
    training_s = sum(seconds.get(phase, 0.0) for phase in ("data", "compute", "exchange", "reduce", "update"))
    samples = steps / run.total_steps * run.data.num_samples * run.config.train.epochs
    return {
        "weights_digest": weights_digest(run.model),
        "state_digest": state_digest(snapshot),
        "samples_digest": run.cursor.samples_digest,
        "steps": run.cursor.step,
        "skipped_steps": run.cursor.skipped_steps,
        "restarts": attempt - 1,
        "metrics": run.metrics,
        "ranks": run.world.size,
        "lanes": run.world.num_lanes,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "samples_per_s": samples / training_s if steps and training_s else None,
        "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
        "numerics": json.loads((run_dir / "numerics.json").read_text(encoding="utf-8")),
    }
