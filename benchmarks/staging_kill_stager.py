"""The stager, killed: alone (as `hpctrain stage` runs it on a node), and as the agent beside a rank that reads on."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from benchmarks.staging_kills import Kind
from benchmarks.staging_kinds import SPEC
from benchmarks.staging_sets import FIELD, SAMPLE_BYTES, write_set, write_user_file
from hpctrain.config import RunConfig, parse_run
from hpctrain.h5.chunks import FileSource
from hpctrain.h5.packed import PackedSet
from hpctrain.resilience import faults
from hpctrain.staging.mirror import Mirror
from hpctrain.staging.owners import Deal
from hpctrain.staging.process import AgentProcess
from hpctrain.staging.source import StagedSource
from hpctrain.staging.stored import Slots, StoredChunks, file_keys_of, stored_chunks
from hpctrain.staging.wire import Client
from hpctrain.training.prestage import make_deal, stage_here
from hpctrain.training.sets import make_plan, open_sets

_LOOPBACK: Final = "127.0.0.1"
_TIMEOUT_S: Final = 30.0
_ENDING_S: Final = 2.0


class Stager(Kind):
    """What a mirror says it has is what the shared file has; and run again, it has everything."""

    point = "staging.write"
    variants = ("packed set", "files without digests", "agent")
    counted: ClassVar[dict[str, str]] = {"agent": "packed set"}

    def make(self, folder: Path) -> None:
        """A packed set, and a user's file of the same samples."""
        write_set(SPEC, folder / "set")
        write_user_file(SPEC, folder / "x.h5")

    def prepare(self, variant: str, fixture: Path, folder: Path) -> None:
        """An empty directory for the mirror."""
        (folder / "ssd").mkdir()

    def run(self, variant: str, fixture: Path, folder: Path) -> str:
        """Stage everything. Of an agent: says how it ended, where it was killed; what was read meanwhile is right."""
        config = _config(variant, fixture, folder)
        if variant != "agent":
            stage_here(config, node=0, num_nodes=1, num_ranks=1)
            return ""
        return _read_beside_agent(config, folder)

    def seen(self, variant: str, fixture: Path, folder: Path) -> str:
        """Every chunk that the mirror has, is that of the shared file; one that does not verify is wrong too."""
        return _wrong_mirror(_stored(variant, fixture), folder, wanted_chunks=0)

    def result(self, variant: str, fixture: Path, folder: Path) -> str:
        """So it is, and all chunks are there."""
        stored = _stored(variant, fixture)
        return _wrong_mirror(stored, folder, stored.num_slots)


def _config(variant: str, fixture: Path, folder: Path) -> RunConfig:
    if variant == "files without digests":
        data = {"train": str(fixture / "x.h5"), "fields": {FIELD: f"/{FIELD}"}}
    else:
        data = {"train": str(fixture / "set")}
    description = {
        "name": "kills",
        "task": {"name": "benchmarks.staging_task:Touch"},
        "data": data,
        "lanes": {"num_lanes": 1, "lane_batch": 8},
        "train": {"epochs": 1},
        "staging": {"dir": str(folder / "ssd")},
    }
    return parse_run(description, source="a kill")


def _stored(variant: str, fixture: Path) -> StoredChunks:
    packed = open_sets(_config(variant, fixture, fixture), None).train
    return stored_chunks(packed, file_keys_of(packed))


def _wrong_mirror(stored: StoredChunks, folder: Path, wanted_chunks: int) -> str:
    mirror = Mirror(folder / "ssd", stored)
    try:
        present = np.flatnonzero(mirror.present())
        if len(present) < wanted_chunks:
            return f"{len(present)} of {wanted_chunks} chunks are there"
        for slot in present.tolist():
            right = _bytes_of(stored, slot)
            if bytes(mirror.read(slot) or b"") != right:
                return f"{stored.describe(slot)}: other bytes in the mirror"
    finally:
        mirror.close()
    return ""


def _bytes_of(stored: StoredChunks, slot: int) -> bytes:
    with stored.paths[stored.files[slot]].open("rb") as file:
        file.seek(max(0, int(stored.offsets[slot])))
        found: bytes = file.read(int(stored.sizes[slot]))
    return found


def _read_beside_agent(config: RunConfig, folder: Path) -> str:
    """Have an agent stage, and read all chunks as a rank does, whatever becomes of the agent."""
    sets = open_sets(config, None)
    stored = stored_chunks(sets.train, file_keys_of(sets.train))
    process = AgentProcess()
    try:
        with _source(process, config, sets.train, stored, folder) as source:
            _check_reading(source, sets.train)
        return _end_of(process.pid)
    finally:
        process.close()


@contextlib.contextmanager
def _source(
    process: AgentProcess, config: RunConfig, packed: PackedSet, stored: StoredChunks, folder: Path
) -> Iterator[StagedSource | FileSource]:
    """What a rank reads from; the shared files alone, where the agent ended before it listened."""
    secret, plan = secrets.token_bytes(32), make_plan(config, open_sets(config, None))
    head, arrays = stored.to_message()
    load = {
        "do": "load", "rank": 0, "attempt": 0, "secret": secret.hex(), "interface": "lo", "on_changed": "restage",
        "places": [{"directory": str(folder / "ssd"), "quota_bytes": None}], "drop_pages": False, "stored": head,
    }  # fmt: skip
    deal: Deal = make_deal(packed, plan, 1, 1, 1)
    how = {"do": "deal", "node": 0, "addresses": [None], "num_nodes": 1, "replicas": 1}
    with FileSource() as shared:
        try:
            loaded, _ = process.ask(load, arrays)
            process.ask(how, {"owners": deal.owners, "first_steps": deal.first_steps})
        except ConnectionError:
            yield shared
            return
        mirror = Mirror(folder / "ssd", stored)
        client = Client(_LOOPBACK, loaded["port"], secret, request_timeout_s=_TIMEOUT_S)
        try:
            yield StagedSource(shared, Slots(packed), [mirror], client, lambda words: None)
        finally:
            client.close()
            mirror.close()


def _check_reading(source: StagedSource | FileSource, packed: PackedSet) -> None:
    """Raises `RuntimeError` for a wrong sample."""
    values, first = SPEC.samples(), 0
    for shard in packed.shards:
        index = shard.dense[FIELD]
        for chunk in range(index.num_chunks):
            found = np.frombuffer(source.read(index, chunk), np.uint8).reshape(-1, SAMPLE_BYTES)
            if not np.array_equal(found, values[first : first + len(found)]):
                raise RuntimeError(f"{index.describe(chunk)}: other samples were read")
            first += len(found)


def _end_of(pid: int) -> str:
    """That a fault killed the agent, where one did: by now it has made all its writes, or is about to be found dead."""
    if not os.environ.get(faults.VARIABLE, "").startswith("kill"):
        return ""
    deadline_s = time.monotonic() + _ENDING_S
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return "the agent was killed" if os.WTERMSIG(status) == signal.SIGKILL else ""
        time.sleep(0.01)
    return ""
