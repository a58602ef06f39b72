"""What the nodes of a job agree on before they stage: which node uses what when, and which keeps it. Collective."""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
import numpy.typing as npt

from hpctrain.comm.world import World, deal_lanes
from hpctrain.data.plan import Plan
from hpctrain.staging.owners import NEVER, Deal, bids
from hpctrain.staging.stored import Slots

_NO_BID: Final = np.iinfo(np.int64).max
_LAST: Final = 1 << 62
"""Added to the bids of a node that can keep nothing: it owns only what nobody else can."""


@dataclasses.dataclass(frozen=True)
class Node:
    """What all ranks know of a node.

    Attributes:
        ranks: on it.
        address: where its agent listens; None: it has none.
        places: directories of its mirrors.
        is_writable: whether a mirror takes anything.
        room_bytes: what the mirrors hold and could hold.
    """

    ranks: tuple[int, ...]
    address: tuple[str, int] | None = None
    places: tuple[str, ...] = ()
    is_writable: bool = False
    room_bytes: int = 0


def gather_nodes(world: World, mine: Node | None) -> tuple[list[Node], int]:
    """All nodes, by their first rank, and the number of this rank's. `mine` is given by the first rank of each node."""
    from mpi4py import MPI

    local = world.comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        first = local.bcast(world.rank, root=0)
    finally:
        local.Free()
    everyone: list[tuple[int, Node | None]] = world.comm.allgather((first, mine))
    firsts = sorted({of_rank for of_rank, _ in everyone})
    nodes = []
    for number in firsts:
        ranks = tuple(rank for rank, (of_rank, _) in enumerate(everyone) if of_rank == number)
        said = next((node for of_rank, node in everyone if of_rank == number and node is not None), None)
        nodes.append(dataclasses.replace(said or Node(()), ranks=ranks))
    return nodes, firsts.index(first)


class Uses:
    """When the nodes use the chunks of a set. One rank a node works it out for all of its ranks."""

    def __init__(self, world: World, plan: Plan, slots: Slots, nodes: list[Node], here: int) -> None:
        self._world, self._plan, self._slots, self._here = world, plan, slots, here
        self._speaks, self._can_keep = world.rank == nodes[here].ranks[0], nodes[here].is_writable
        dealt = deal_lanes(world.num_lanes, world.size)
        self._lanes = [lane for rank in nodes[here].ranks for lane in dealt[rank]]

    def of_node(self, epoch: int, from_step: int = 0) -> npt.NDArray[np.int64]:
        """The step of the run at which this node first uses each slot in an epoch; `NEVER` where it does not."""
        if not self._speaks:
            return np.full(self._slots.num_slots, NEVER, np.int64)
        plan = self._plan
        steps = plan.first_steps(epoch, self._lanes, from_step)
        in_run = np.where(steps < plan.steps_per_epoch, epoch * plan.steps_per_epoch + steps, NEVER)
        return np.minimum(self._slots.least_of_sample_chunks(in_run), NEVER)

    def of_job(self, epoch: int, from_step: int = 0) -> npt.NDArray[np.int64]:
        """The same for all nodes together."""
        return least(self._world, self.of_node(epoch, from_step))

    def deal(
        self, present: npt.NDArray[np.bool_], epoch: int, from_step: int, replicas: int, num_nodes: int
    ) -> Deal:
        """Which of `num_nodes` nodes keeps what, `replicas` of them each chunk, from a step of an epoch on.

        `present`: what this node has already; shape (slots,).
        """
        steps = np.minimum(self.of_node(epoch, from_step), self.of_node(epoch + 1))
        offer = bids(steps, present, self._here) if self._speaks else np.full_like(steps, _NO_BID)
        if self._speaks and not self._can_keep:
            offer |= _LAST
        return Deal.of(least(self._world, offer), least(self._world, steps), num_nodes, replicas)


def least(world: World, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The least of all ranks' values, element by element."""
    from mpi4py import MPI

    found = np.ascontiguousarray(values).copy()
    world.comm.Allreduce(MPI.IN_PLACE, found, op=MPI.MIN)
    return found
