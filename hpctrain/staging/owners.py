"""Which node stages which chunk: pure arithmetic over what each node will use, and what it has already.

Every chunk has one owner, which reads it from the shared filesystem; the others get it from there. A node that has a
chunk already owns it, so that nothing is read again after a requeue, whatever nodes the job gets; among several, and
for chunks that nobody has, it is the node that uses the chunk first.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

NEVER: Final = (1 << 40) - 1
"""A step that does not come: the use of a chunk that is not used."""
_NODE_BITS: Final = 20
_ABSENT: Final = 1 << 61


def bids(first_steps: Ints, present: npt.NDArray[np.bool_], node: int) -> Ints:
    """What a node offers for each slot; the least of all nodes' offers wins (`Deal.of`).

    Args:
        first_steps: the step at which this node first uses each slot, at most `NEVER`; shape (slots,).
        present: whether it has the slot; shape (slots,).
        node: its number.
    """
    steps = np.minimum(first_steps, NEVER)
    absent = np.where(present, 0, _ABSENT)
    offers: Ints = absent | (steps << _NODE_BITS) | node
    return offers


@dataclasses.dataclass(frozen=True, eq=False)
class Deal:
    """Who stages what.

    Attributes:
        owners: node number of the owner of each slot; int32, shape (slots,).
        first_steps: the step of the first use on any node; int64, shape (slots,).
        num_nodes: nodes of the job.
        replicas: nodes that are to keep each chunk, the owner included.
    """

    owners: npt.NDArray[np.int32]
    first_steps: Ints
    num_nodes: int
    replicas: int = 1

    @classmethod
    def of(cls, least_bids: Ints, first_steps: Ints, num_nodes: int, replicas: int = 1) -> Deal:
        """The deal from the least bid and the first step of all nodes."""
        owners = (least_bids & ((1 << _NODE_BITS) - 1)).astype(np.int32)
        unused = first_steps >= NEVER
        unowned = unused & (least_bids >= _ABSENT)  # all bid alike: spread them
        owners[unowned] = np.flatnonzero(unowned) % num_nodes
        return cls(owners, first_steps, num_nodes, min(replicas, num_nodes))

    def holders(self, slot: int) -> list[int]:
        """The nodes that are to keep a slot, the owner first."""
        owner = int(self.owners[slot])
        return [(owner + copy) % self.num_nodes for copy in range(self.replicas)]

    def copy_number(self, node: int) -> npt.NDArray[np.int32]:
        """For each slot which copy a node keeps: 0 as its owner, 1 as the first replica ...; -1: none."""
        number = (node - self.owners) % self.num_nodes
        return np.where(number < self.replicas, number, -1).astype(np.int32)

    def staging_order(self, node: int) -> npt.NDArray[np.int64]:
        """The slots that a node is to keep: first those it owns, then its replicas; each by their first use."""
        copy = self.copy_number(node)
        kept = np.flatnonzero(copy >= 0)
        return kept[np.lexsort((kept, self.first_steps[kept], copy[kept]))]


@dataclasses.dataclass(frozen=True, eq=False)
class Uses:
    """When slots are used, as far as it is known: in one epoch and in the next.

    Attributes:
        copies: which copy of the slot this node is to keep (`Deal.copy_number`); shape (slots,).
        this_epoch: step of the first use, `NEVER` for none; shape (slots,).
        next_epoch: the same for the epoch after it.
    """

    copies: npt.NDArray[np.int32]
    this_epoch: Ints
    next_epoch: Ints

    def next_use(self, slots: Ints, now: int) -> Ints:
        """Step of the next use of slots that this node owns, from step `now` on.

        What it does not own is needed less, whenever it is used: beyond all steps come replicas, then all others.
        """
        this, following, copies = self.this_epoch[slots], self.next_epoch[slots], self.copies[slots]
        owned = np.where(this >= now, this, following)
        return np.where(copies == 0, owned, np.where(copies > 0, NEVER + 1, NEVER + 2))
