"""Which rank has which lanes, from which step on: what moves a lane from a slow rank to a fast one.

The plan knows no ranks, so that a lane's samples do not change when it moves; all that must hold is that at every step
each lane is on exactly one rank. A `Dealing` cannot be built otherwise.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from hpctrain.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Move:
    """A lane's move to another rank.

    Attributes:
        lane: the lane.
        to_rank: the rank that has it from `at_step` on.
        at_step: steps of the run before the move (over all epochs, counted from 0).
    """

    lane: int
    to_rank: int
    at_step: int


class Dealing:
    """The lanes of each rank at each step of a run; immutable.

    Args:
        lanes_of_ranks: the lanes of each rank before any move (`comm.world.deal_lanes`).
        moves: what was moved, by step.

    Raises:
        UsageError: a lane is on no rank or on two, a rank is left without a lane, a move names a lane or a rank that
            does not exist, or comes before the last one.
    """

    def __init__(self, lanes_of_ranks: Sequence[Sequence[int]], moves: Sequence[Move] = ()) -> None:
        self.initial = tuple(tuple(lanes) for lanes in lanes_of_ranks)
        self.moves = tuple(moves)
        lanes = sorted(lane for of_rank in self.initial for lane in of_rank)
        if lanes != list(range(len(lanes))) or not all(self.initial):
            raise UsageError(
                f"lanes of ranks {self.initial}: each of 0, 1, 2 ... must occur once, and no rank be empty"
            )
        # The rank of each lane from a step on, the step ascending; a move that takes effect at once replaces the last.
        owners = [rank for lane in lanes for rank, of_rank in enumerate(self.initial) if lane in of_rank]
        self._steps, self._owners = [0], [tuple(owners)]
        for move in self.moves:
            self._apply(move)

    @property
    def num_lanes(self) -> int:
        """Lanes of the run."""
        return len(self._owners[0])

    @property
    def num_ranks(self) -> int:
        """Ranks they are dealt to."""
        return len(self.initial)

    def move(self, lane: int, to_rank: int, at_step: int) -> Dealing:
        """The dealing in which `lane` is on `to_rank` from step `at_step` of the run on."""
        return Dealing(self.initial, (*self.moves, Move(lane, to_rank, at_step)))

    def ranks(self, step: int) -> tuple[int, ...]:
        """The rank of each lane at this step of the run; `num_lanes` of them."""
        return self._owners[bisect.bisect_right(self._steps, step) - 1]

    def lanes(self, rank: int, step: int) -> tuple[int, ...]:
        """The lanes of a rank at this step of the run, ascending."""
        return tuple(lane for lane, owner in enumerate(self.ranks(step)) if owner == rank)

    def next_change(self, step: int) -> int | None:
        """The first step after `step` from which on some rank has other lanes; None: it stays as it is."""
        now, at = self.ranks(step), bisect.bisect_right(self._steps, step)
        later = zip(self._steps[at:], self._owners[at:], strict=True)
        return next((changed for changed, owners in later if owners != now), None)

    def _apply(self, move: Move) -> None:
        owners = list(self._owners[-1])
        if not (0 <= move.lane < self.num_lanes and 0 <= move.to_rank < self.num_ranks):
            raise UsageError(
                f"{move}: there are {self.num_lanes} lanes and {self.num_ranks} ranks, counted from 0"
            )
        if move.at_step < self._steps[-1]:
            raise UsageError(
                f"{move}: the lanes are dealt up to step {self._steps[-1]} already; move from there on"
            )
        giver = owners[move.lane]
        owners[move.lane] = move.to_rank
        if giver not in owners:
            raise UsageError(f"{move}: rank {giver} would have no lane left; move another one there first")
        if move.at_step == self._steps[-1]:
            self._owners[-1] = tuple(owners)
        else:
            self._steps.append(move.at_step)
            self._owners.append(tuple(owners))
