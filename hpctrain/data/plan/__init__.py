"""The plan: a pure function from (seed, epoch, chunk table, number of lanes) to the samples each lane sees, in order.

An epoch's chunks are laid out in an order, permuted anew (`order = "global"`) or kept at home (`"node_local"`), and
the samples within each are permuted; that sequence is cut into lanes by sample count, so that at most `num_lanes - 1`
chunks are shared by two lanes; each lane then shuffles its samples within windows of chunks. Two things may be asked
of the cut: that every lane gets its share of every class (`labels`), or that samples are drawn by weight (`weights`).
Ranks do not occur here: dealing the same lanes to another number of ranks changes nothing.

What is lost: a lane mixes samples only within its window, not over the whole set; a wider window costs memory.
`hpctrain.data.mixing` measures how much.

Modules: `plan` (the class), `orders` (which chunk comes when), `runs` (cutting and permuting), `balance` (classes),
`weighted` (draws). Only NumPy and our own random numbers are used; nothing here knows files or ranks.
"""

from hpctrain.data.plan.plan import Plan

__all__ = ["Plan"]
