"""How well an epoch is mixed, and what the mixing costs in reading: two numbers to be read beside each other.

*Mixing* compares where file neighbours end up. Take the samples that the lanes see in an epoch in file order, and the
steps at which two neighbours are used: their mean distance, rescaled so that it is

- 1 (in expectation) where the steps are those of a uniform random permutation, whose mean distance is known exactly
  from the number of samples in each step (near a third of the steps of an epoch);
- 0 where the samples are read in file order: no order has a smaller one that visits every step.

Between them it is near the share of a lane's epoch that its shuffle window spans: neighbours lie in one chunk, and a
chunk is spread over one window. It is cut off at 1. It looks at one epoch: that the chunks come in another order in
the next one, or are exchanged between lanes, it does not see; nor which lane of a step a sample is in.

*Read amplification* is samples decoded over samples used, where every lane decodes each chunk that it uses whole and
once: 1 where no chunk is shared by two lanes. It is an upper bound where one rank has both lanes, and where single
samples can be decoded. Of weighted draws it may be below 1, as a sample decoded once is used at each of its draws.

*Chunks a step* is the mean number of chunks that a full batch of these lanes comes from: samples of one chunk are often
alike (one class, one simulation), and a batch of few chunks has a noisier gradient than its size says.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.permutation import mix_key, permutation
from hpctrain.data.plan import Plan

_STEPS_LOOKED_AT = 64
"""Steps from which `chunks_per_step` is taken, evenly spaced over the epoch."""


@dataclasses.dataclass(frozen=True)
class Mixing:
    """The quality of an epoch's order, for some lanes.

    Attributes:
        mixing: 1 as a uniform permutation mixes, 0 as file order does.
        read_amplification: samples decoded over samples used.
        chunks_per_step: distinct chunks in a batch of these lanes, mean over full steps.
    """

    mixing: float
    read_amplification: float
    chunks_per_step: float


def quality(plan: Plan, epoch: int, lanes: range) -> Mixing:
    """The quality of `epoch` for `lanes`: those of one rank, or all of them.

    Takes about 0.6 s for each million samples of these lanes. A function of the plan alone.
    """
    of_lanes = [plan.lane_samples(epoch, lane) for lane in lanes]
    samples = np.concatenate(of_lanes)
    if len(samples) == 0:  # fewer samples than lanes
        return Mixing(1.0, 1.0, 0.0)
    steps = np.concatenate([np.arange(len(of_lane)) // plan.lane_batch for of_lane in of_lanes])
    chunks = plan.chunk_of(samples)
    decoded = sum(int(plan.chunk_sizes[np.unique(plan.chunk_of(of_lane))].sum()) for of_lane in of_lanes)
    return Mixing(step_mixing(samples, steps), decoded / len(samples), _chunks_per_step(chunks, steps))


def step_mixing(samples: NDArray[np.int64], steps: NDArray[np.int64]) -> float:
    """Mixing of an order that uses `samples[i]` at step `steps[i]`, every step from 0 on occurring; shapes (n,)."""
    counts = np.bincount(steps)
    if len(counts) == 1 or len(samples) < 3:  # no order differs from another
        return 1.0
    # Draws of one sample are neighbours in no particular order.
    shuffled = permutation(mix_key(len(samples)), len(samples))
    in_file_order = steps[shuffled[np.argsort(samples[shuffled], kind="stable")]]
    distance = float(np.abs(np.diff(in_file_order)).mean())
    least = (len(counts) - 1) / (len(samples) - 1)
    uniform = _mean_distance(counts)
    return min((distance - least) / (uniform - least), 1.0)


def _mean_distance(counts: NDArray[np.int64]) -> float:
    """Mean distance in steps of two different samples, step i holding counts[i] of them."""
    before = np.cumsum(counts)[:-1].astype(
        np.float64
    )  # a pair crosses the bound after step i if one lies before it
    total = float(counts.sum())
    return float((before * (total - before)).sum()) / (total * (total - 1) / 2)


def _chunks_per_step(chunks: NDArray[np.int64], steps: NDArray[np.int64]) -> float:
    last = int(steps.max())
    full = max(last, 1)  # the last step is short, unless it is the only one
    looked_at = np.unique(np.linspace(0, full - 1, min(full, _STEPS_LOOKED_AT)).astype(np.int64))
    of_step = np.isin(steps, looked_at)
    pairs = np.unique(chunks[of_step] * (last + 1) + steps[of_step])
    return len(pairs) / len(looked_at)
