"""How soon the first batch is there: `python -m benchmarks.staging_first RUN.toml`, as one rank of a run has it.

The same objects as in a rank stand between the shared files and the batch (`NodeAgent`, `DataPath`, `Loader`); there
is no model. One line of JSON on standard output says the seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

from mpi4py import MPI

from hpctrain.checkpoint.snapshot import Cursor
from hpctrain.comm.world import World
from hpctrain.config import RunConfig, load_run
from hpctrain.errors import HangError
from hpctrain.staging.directories import places_here
from hpctrain.staging.mirror import mirrors_under
from hpctrain.training.data_path import DataPath
from hpctrain.training.sets import make_plan, make_preprocessor, open_sets
from hpctrain.training.staging import NodeAgent

_AGENT_START_S: Final = 1.5
"""In a run the model is built while the agent starts; here it is waited for."""
_POLL_S: Final = 0.01
_DEADLINE_S: Final = 120.0


def measure(config: RunConfig) -> dict[str, float]:
    """Seconds from the loader's start to the first batch, and from the order to stage until all is on the node.

    `open_s`: what opening the data path takes before the loader, with the order to stage in it. `warnings`: how many.
    """
    warnings: list[str] = []

    def emit(kind: str, **fields: Any) -> None:
        if kind == "warning":
            warnings.append(str(fields["message"]))

    world = World(0, 1, 0, 1, config.lanes.num_lanes, MPI.COMM_WORLD)
    with NodeAgent(config, world, 1, emit) as agent:
        sets = open_sets(config, None)
        plan = make_plan(config, sets)
        preprocessor = make_preprocessor(config, sets, {}, training=True)
        if config.staging.dirs:
            time.sleep(_AGENT_START_S)
        opening_s = time.perf_counter()
        with DataPath(config, sets.train, plan, world, Cursor(), preprocessor, agent, emit) as data:
            begun_s = time.perf_counter()
            next(data.loader.steps(0, 0, 1))
            first_s = time.perf_counter()
            staged_s = _staged_s(config, first_s)
    for words in warnings:
        print(words, file=sys.stderr)
    return {
        "open_s": begun_s - opening_s,
        "first_batch_s": first_s - begun_s,
        "opened_and_first_batch_s": first_s - opening_s,
        "staged_s": staged_s - opening_s,
        "warnings": float(len(warnings)),
    }


def _staged_s(config: RunConfig, now_s: float) -> float:
    """When all chunks are in the mirror, by its map; now, where there is no staging."""
    if not config.staging.dirs:
        return now_s
    (place,) = places_here(config.staging.dirs)
    while not _is_staged(place.directory):
        if time.perf_counter() - now_s > _DEADLINE_S:
            raise HangError(f"{place.directory}: not all chunks were staged within {_DEADLINE_S:g} s")
        time.sleep(_POLL_S)
    return time.perf_counter()


def _is_staged(directory: Path) -> bool:
    return all(found.present_chunks == found.total_chunks for found in mirrors_under(directory))


def main(arguments: list[str]) -> None:
    """As the module says."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    with contextlib.closing(answers):
        answers.write(json.dumps(measure(load_run(Path(arguments[0])))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
