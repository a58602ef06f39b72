"""Restore: the newest admissible checkpoint that the ranks, each checking a slice, all verify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpctrain.checkpoint.snapshot import Snapshot
from hpctrain.checkpoint.store import Block, CheckpointRefused, CheckpointStore

Gather = Callable[[Any], list[Any]]
"""An allgather of small objects over the ranks."""


def restore_newest(
    store: CheckpointStore,
    admissible: list[str],
    rank: int,
    size: int,
    gather: Gather,
    refused: Callable[[str, str], None],
) -> tuple[str, Snapshot] | None:
    """Find, verify and load a checkpoint; the same result on every rank. None where there is none to read.

    Args:
        store: the run's checkpoints.
        admissible: names from the attempt's start record, newest first; nothing else is read, so that a late write of
            an older attempt has no effect.
        rank, size: this rank and the number of ranks; rank r checks blocks r, r + size, ...
        gather: an allgather over the ranks; called equally often on every rank.
        refused: called with name and reason for each checkpoint that is passed over.
    """
    for name in admissible:
        reasons = [reason for reason in gather(_check_slice(store, name, rank, size)) if reason]
        if not reasons:
            loaded = _load(store, name)
            reasons = [reason for reason in gather(loaded if isinstance(loaded, str) else None) if reason]
            if not reasons:
                assert isinstance(loaded, Snapshot)
                return name, loaded
        refused(name, reasons[0])
    return None


def _check_slice(store: CheckpointStore, name: str, rank: int, size: int) -> str | None:
    """Check this rank's blocks; the reason in words where one is bad."""
    try:
        blocks: list[Block] = store.blocks(name)
        store.verify(name, blocks[rank::size])
    except CheckpointRefused as error:
        return str(error)
    return None


def _load(store: CheckpointStore, name: str) -> Snapshot | str:
    try:
        return store.load(name)
    except CheckpointRefused as error:
        return str(error)
