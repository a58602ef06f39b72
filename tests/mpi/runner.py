"""Runs every body of `tests.mpi.bodies` on the ranks of one mpirun: `python runner.py RESULT.json WORKDIR`.

A body is a function of (world, folder); it fails by raising on any rank. One mpirun serves all bodies of a size, since
starting ranks costs seconds; each body is still a test of its own (`test_bodies.py`).
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path

from tests.mpi import bodies

STACKS_AFTER_S = 100


def main(result: Path, folder: Path) -> None:
    faulthandler.dump_traceback_later(STACKS_AFTER_S, exit=False)
    from hpctrain.comm.world import start_world, stop_world

    world = start_world(int(os.environ["OMPI_COMM_WORLD_SIZE"]), bodies.NUM_LANES)
    outcome: dict[str, list[str]] = {}
    for name, body in bodies.ALL.items():
        error = None
        try:
            body(world, folder / name)
        except Exception:  # noqa: BLE001 - reported as this body's failure
            error = f"rank {world.rank}: {traceback.format_exc()}"
        outcome[name] = [text for text in world.comm.allgather(error) if text]
    if world.is_root:
        result.write_text(json.dumps(outcome))
    stop_world()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
