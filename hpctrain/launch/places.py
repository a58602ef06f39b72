"""Who runs where: a node keeps its place among the ranks, because its SSD has the chunks of those ranks' lanes.

Rank r has the same lanes in every attempt. After a requeue Slurm gives the nodes in an order of its own, in which one
other node can push all of them to other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.resilience.attempts import list_attempts


def last_places(run_dir: Path) -> list[str]:
    """The nodes of the run's last attempt, in the order of its ranks; none where that is not known."""
    try:
        starts = [attempt.start for attempt in list_attempts(run_dir) if attempt.start is not None]
    except OSError:  # then chunks are staged anew: no reason to end the run
        return []
    return starts[-1].nodes if starts else []


def keep_places(previous: Sequence[str], available: Sequence[str], count: int) -> list[str]:
    """`count` of the `available` nodes (all of them, where there are not so many), each in its `previous` place.

    Places of nodes that are gone go to nodes that had one beyond `count`, then to others in the order of `available`.
    """
    previous, available = list(dict.fromkeys(previous)), list(dict.fromkeys(available))
    count, usable = min(count, len(available)), set(available)
    places = [node if node in usable else None for node in previous[:count]]
    places += [None] * (count - len(places))
    late = [node for node in previous[count:] if node in usable]
    kept = set(places)
    others = (node for node in dict.fromkeys([*late, *available]) if node not in kept)
    return [next(others) if node is None else node for node in places]


def choose_nodes(
    previous: Sequence[str], available: Sequence[str], tasks: Mapping[str, int], num_ranks: int
) -> list[str]:
    """As few nodes as have room for the ranks, in their `previous` places; all nodes where there is too little room.

    Args:
        previous: nodes of the last attempt.
        available: nodes that can be had.
        tasks: how many ranks a node takes, by its name.
        num_ranks: how many there are to be.
    """
    if not available:
        return []
    count = -(-num_ranks // max(tasks[node] for node in available))
    while True:
        chosen = keep_places(previous, available, count)
        if sum(tasks[node] for node in chosen) >= num_ranks or count >= len(available):
            return chosen
        count += 1


def task_nodes(chosen: Sequence[str], tasks: Mapping[str, int], num_ranks: int) -> list[str]:
    """The node of each rank, where Slurm would choose others: it goes through `tasks` in their order; else none."""
    order = {node: number for number, node in enumerate(tasks)}
    if sorted(chosen, key=order.__getitem__) == list(chosen):
        return []
    return [node for node in chosen for _ in range(tasks[node])][:num_ranks]
