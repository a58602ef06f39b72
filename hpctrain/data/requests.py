"""Which samples are wanted in which step: what a plan says to one rank, in the form that the assembler reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class Requests:
    """The steps of one epoch.

    Attributes:
        epoch: the epoch; user functions and augmentations may depend on it.
        samples: global ids, int64, shape (n,), step by step.
        bounds: step i wants `samples[bounds[i]:bounds[i + 1]]`; int64, shape (num_steps + 1,).
        chunks: the sample chunk of each of the samples, int64, shape (n,).
        first_step: number of step 0 within the epoch, where the steps before it are not wanted.
        inner_bounds: bounds of the steps that were grouped, shape (number of them + 1,); None where none were.
        group_size: how many of them were made one step.
    """

    epoch: int
    samples: IdArray
    bounds: IdArray
    chunks: IdArray
    first_step: int = 0
    inner_bounds: IdArray | None = None
    group_size: int = 1

    @property
    def num_steps(self) -> int:
        """Steps, empty ones included."""
        return len(self.bounds) - 1

    def rows(self, step: int) -> slice:
        """Where a step's samples are."""
        return slice(int(self.bounds[step]), int(self.bounds[step + 1]))

    def part(self, begin: int, end: int) -> Requests:
        """Steps [begin, end) alone."""
        rows = slice(int(self.bounds[begin]), int(self.bounds[end]))
        bounds = self.bounds[begin : end + 1] - self.bounds[begin]
        return dataclasses.replace(
            self,
            samples=self.samples[rows],
            bounds=bounds,
            chunks=self.chunks[rows],
            first_step=self.first_step + begin,
        )

    def grouped(self, size: int) -> Requests:
        """The same samples in steps of `size` steps each, the last maybe shorter; `steps_within` tells them apart."""
        bounds = np.append(self.bounds[:-1:size], self.bounds[-1:])
        return dataclasses.replace(self, bounds=bounds, inner_bounds=self.bounds, group_size=size)

    def steps_within(self, step: int) -> Iterator[tuple[int, int, int]]:
        """Number within the epoch, begin and end in `samples`, of each step that was grouped into this one."""
        inner = self.bounds if self.inner_bounds is None else self.inner_bounds
        size = self.group_size
        for number in range(step * size, min((step + 1) * size, len(inner) - 1)):
            yield self.first_step + number, int(inner[number]), int(inner[number + 1])

    def chunks_of(self, step: int) -> IdArray:
        """The chunks that a step needs, each once, ascending."""
        return np.unique(self.chunks[self.rows(step)])

    def next_uses(self, chunks: IdArray, after_step: int) -> IdArray:
        """The first step after `after_step` that needs each of these chunks; `num_steps` where none does."""
        wanted = chunks * self.num_steps + after_step + 1
        found = self._uses[np.searchsorted(self._uses, wanted)]
        return np.where(found // self.num_steps == chunks, found % self.num_steps, self.num_steps)

    def _steps(self) -> IdArray:
        """The step of each of the samples."""
        return np.repeat(np.arange(self.num_steps), np.diff(self.bounds))

    @cached_property
    def _uses(self) -> IdArray:
        """Which chunk each sample needs in which step: chunk * num_steps + step, ascending, and the greatest number."""
        uses = np.sort(self.chunks * self.num_steps + self._steps())
        return np.append(uses, np.iinfo(np.int64).max)
