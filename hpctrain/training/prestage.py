"""Staging before a run, on one node: `python -m hpctrain.training.prestage`, as `hpctrain stage` starts it.

Each node works out for itself what all of them will keep, so that nodes need not talk to each other: what the run
finds on a node stays there, and is not read again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpctrain.comm.world import deal_lanes
from hpctrain.config import RunConfig, load_run
from hpctrain.data.plan import Plan
from hpctrain.errors import ConfigError, HpctrainError, StorageError
from hpctrain.h5.chunks import allow_many_files
from hpctrain.h5.packed import PackedSet
from hpctrain.resilience import faults
from hpctrain.staging.directories import places_here
from hpctrain.staging.mirror import MirrorStatus, mirrors_under, remove_mirror
from hpctrain.staging.node import NodeStaging
from hpctrain.staging.owners import NEVER, Deal, Uses, bids
from hpctrain.staging.stored import Slots, file_keys_of, stored_chunks
from hpctrain.training.sets import make_plan, open_sets

_LINE_S: Final = 2.0
_GB: Final = 1e9


def stage_here(config: RunConfig, node: int, num_nodes: int, num_ranks: int) -> None:
    """Bring to this node what it is to keep in a run on so many nodes and ranks; progress goes to standard error.

    Raises `StorageError` where not all of it is there in the end.
    """
    places = places_here(config.staging.dirs)
    if not places:
        raise ConfigError(
            'nothing to stage to: say where in the run description, such as staging = { dir = "$HPCTRAIN_SSD" }'
        )
    sets = open_sets(config, None)
    stored = stored_chunks(sets.train, file_keys_of(sets.train))
    deal = make_deal(sets.train, make_plan(config, sets), num_nodes, num_ranks, config.staging.replicas)
    staging = config.staging
    drop = config.data.page_cache != "keep"
    with NodeStaging(stored, places, staging.on_changed_source, drop_pages=drop) as here:
        never = np.full(stored.num_slots, NEVER, np.int64)
        here.stage(deal, node, Uses(deal.copy_number(node), deal.first_steps, never))
        _follow(here)
        status, is_writable = here.status(), here.is_writable
    if status["present_bytes"] < status["total_bytes"]:
        mend = (
            "make room or raise staging.dirs.quota_gib"
            if is_writable
            else "wait for the job that stages there"
        )
        raise StorageError(
            f"{socket.gethostname()}: {status['present_bytes'] / _GB:.2f} of {status['total_bytes'] / _GB:.2f} GB are "
            f"staged; see the warnings, {mend}, and run again: what is there stays (a run would read the rest as it "
            "needs it)"
        )


def make_deal(packed: PackedSet, plan: Plan, num_nodes: int, num_ranks: int, replicas: int) -> Deal:
    """Who keeps what in a run that begins with epoch 0 on nodes that have nothing yet."""
    slots, dealt = Slots(packed), deal_lanes(plan.num_lanes, num_ranks)
    absent = np.zeros(slots.num_slots, bool)
    least_bid = np.full(slots.num_slots, np.iinfo(np.int64).max)
    first = np.full(slots.num_slots, NEVER, np.int64)
    for node, ranks in enumerate(deal_lanes(num_ranks, num_nodes)):
        steps = plan.first_steps(0, [lane for rank in ranks for lane in dealt[rank]])
        of_node = slots.least_of_sample_chunks(np.where(steps < plan.steps_per_epoch, steps, NEVER))
        np.minimum(least_bid, bids(of_node, absent, node), out=least_bid)
        np.minimum(first, of_node, out=first)
    return Deal.of(least_bid, first, num_nodes, replicas)


def _follow(here: NodeStaging) -> None:
    """Say how far it is, until it is done."""
    begun_s, before = time.monotonic(), here.status()["present_bytes"]
    done = False
    while not done:
        done = here.join(_LINE_S)
        for words in here.take_words():
            _say(f"warning: {words}")
        status, elapsed_s = here.status(), time.monotonic() - begun_s
        rate = (status["present_bytes"] - before) / _GB / max(elapsed_s, 1e-9)
        _say(
            f"staged {status['present_bytes'] / _GB:.2f} of {status['total_bytes'] / _GB:.2f} GB, {rate:.2f} GB/s; "
            f"{status['shared_bytes'] / _GB:.2f} GB read from the shared filesystem"
        )


def mirrors_here(config: RunConfig) -> list[MirrorStatus]:
    """The copies of any set that there are in the directories of the description."""
    return [found for place in places_here(config.staging.dirs) for found in mirrors_under(place.directory)]


def clean_here(config: RunConfig) -> None:
    """Remove the copies of this run's data on this node. Raises `StorageError` where a running job uses them."""
    identity = open_sets(config, None).train.identity
    used = []
    for found in mirrors_here(config):
        if found.identity != identity:
            continue
        if remove_mirror(found.path):
            _say(f"removed {found.path}: {found.present_bytes / _GB:.2f} GB")
        else:
            used.append(str(found.path))
    if used:
        raise StorageError(f"{', '.join(used)}: a running job uses it; clean up once the job has ended")


def _say(words: str) -> None:
    sys.stderr.write(f"{socket.gethostname()}: {words}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(prog="hpctrain.training.prestage")
    parser.add_argument("description", type=Path)
    parser.add_argument("--action", choices=("stage", "status", "clean"), default="stage")
    for name in ("--node", "--nodes", "--ranks"):
        parser.add_argument(name, type=int, required=True)
    given: Any = parser.parse_args(arguments)
    try:
        allow_many_files()
        faults.configure(rank=0, attempt=0)
        config = load_run(given.description)
        if given.action == "stage":
            stage_here(config, given.node, given.nodes, given.ranks)
        elif given.action == "clean":
            clean_here(config)
        else:
            found = [dataclasses.asdict(status) for status in mirrors_here(config)]
            sys.stdout.write(json.dumps({"node": socket.gethostname(), "mirrors": found}, default=str) + "\n")
    except HpctrainError as error:
        _say(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
