"""Interleaved repetitions under a time limit.

Machines drift: caches warm, clocks fall, neighbours come and go. So every round measures all settings once, every
second round in the opposite order of the one before (a steady drift then weighs on all settings alike), and a setting
is compared with another by the ratio *within* a round, never by two medians of different moments. Warm-up
measurements are made and thrown away. The first round is measured whatever the time: without it there is no figure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from hpctrain.errors import HpctrainError

Values = dict[str, float]
"""What one measurement found, by quantity; units stand in the names."""
Say = Callable[[str], None]
Clock = Callable[[], float]

_MARGIN: Final = 1.15
"""A measurement is expected to take this much longer than the last one of its setting."""


class Ended(StrEnum):
    """Why no more was measured."""

    COMPLETE = "complete"
    TIME = "time limit"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True)
class Repetitions:
    """How often.

    Attributes:
        rounds: rounds at most.
        min_rounds: where fewer would fit into the time, the last settings are left out instead (two always stay).
        warmup: settings measured once before and not counted; None: all of them.
        deadline_s: on the clock of `measure`; a measurement after the first round that would probably end later is not
            begun.
    """

    rounds: int
    min_rounds: int = 2
    warmup: tuple[str, ...] | None = None
    deadline_s: float = math.inf


@dataclass(frozen=True)
class Observation:
    """One measurement of one setting; `seconds` is how long it took in all."""

    setting: str
    round_number: int
    values: Values
    seconds: float


@dataclass
class Measurement:
    """All that was measured. The first setting is the baseline."""

    settings: tuple[str, ...]
    observations: list[Observation] = field(default_factory=list)
    left_out: tuple[str, ...] = ()
    ended: Ended = Ended.COMPLETE
    failure: HpctrainError | None = None

    @property
    def baseline(self) -> str:
        """The setting that ratios refer to; empty where there was none to measure."""
        return next(iter(self.settings), "")

    def measured(self) -> list[str]:
        """Settings with at least one observation, in their order."""
        seen = {item.setting for item in self.observations}
        return [name for name in self.settings if name in seen]

    def values(self, setting: str, quantity: str) -> list[float]:
        """A quantity of a setting, round by round; rounds without it are left out."""
        return list(self._by_round(setting, quantity).values())

    def pairs(self, setting: str, other: str, quantity: str) -> list[tuple[float, float]]:
        """(value of `setting`, value of `other`) of each round that has both."""
        return list(self.pairs_by_round(setting, other, quantity).values())

    def pairs_by_round(self, setting: str, other: str, quantity: str) -> dict[int, tuple[float, float]]:
        """The same, by the number of the round."""
        mine, theirs = self._by_round(setting, quantity), self._by_round(other, quantity)
        return {number: (mine[number], theirs[number]) for number in mine if number in theirs}

    def ratios(self, setting: str, other: str, quantity: str) -> list[float]:
        """`setting` / `other` in each round that has both."""
        return [mine / theirs for mine, theirs in self.pairs(setting, other, quantity)]

    def _by_round(self, setting: str, quantity: str) -> dict[int, float]:
        return {
            item.round_number: item.values[quantity]
            for item in self.observations
            if item.setting == setting and quantity in item.values
        }


def order(settings: Sequence[str], round_number: int) -> list[str]:
    """The settings in the order of a round: rotated by one every two rounds, reversed in the second of the two.

    After an even number of rounds the mean position is the same for all settings.
    """
    turn = round_number // 2 % max(len(settings), 1)
    rotated = [*settings[turn:], *settings[:turn]]
    return rotated[::-1] if round_number % 2 else rotated


def measure(
    settings: Mapping[str, Callable[[int], Values]],
    repetitions: Repetitions,
    say: Say,
    clock: Clock = time.monotonic,
) -> Measurement:
    """Measure every setting once per round; each is called with the number of the round, -1 for the warm-up.

    An interruption (KeyboardInterrupt) or an `HpctrainError` ends the measurement; what was measured before it is
    returned, and `ended` says so.
    """
    done = Measurement(tuple(settings))
    run = _Run(settings, repetitions, say, clock, done)
    try:
        run.warm_up()
        run.all_rounds()
    except KeyboardInterrupt:
        done.ended = Ended.INTERRUPTED
    except HpctrainError as error:
        done.ended, done.failure = Ended.FAILED, error
    return done


class _Run:
    """One call of `measure`."""

    def __init__(
        self,
        settings: Mapping[str, Callable[[int], Values]],
        repetitions: Repetitions,
        say: Say,
        clock: Clock,
        done: Measurement,
    ) -> None:
        self._settings, self._repetitions, self._say, self._clock = settings, repetitions, say, clock
        self._done = done
        self._begun_s = clock()
        self._costs_s: dict[str, float] = {}

    def warm_up(self) -> None:
        """Measure what is thrown away, then leave out settings for which there is no time."""
        names = self._settings if self._repetitions.warmup is None else self._repetitions.warmup
        for name in names:
            self._measure(name, -1, "warm-up")
        kept = self._affordable()
        self._done.left_out = self._done.settings[kept:]
        self._done.settings = self._done.settings[:kept]
        if self._done.left_out:
            self._say(f"left out for want of time: {', '.join(self._done.left_out)}")

    def all_rounds(self) -> None:
        for number in range(self._repetitions.rounds):
            names = order(self._done.settings, number)
            if number >= self._repetitions.min_rounds and not self._fits(names):
                self._done.ended = Ended.TIME
                return
            for name in names:
                if number > 0 and not self._fits([name]):
                    self._done.ended = Ended.TIME
                    return
                label = f"round {number + 1} of {self._repetitions.rounds} at most"
                self._done.observations.append(self._measure(name, number, label))

    def _measure(self, name: str, number: int, label: str) -> Observation:
        begun_s = self._clock()
        self._say(f"{begun_s - self._begun_s:6.1f} s  {label}: {name}")
        values = self._settings[name](number)
        self._costs_s[name] = self._clock() - begun_s
        return Observation(name, number, values, self._costs_s[name])

    def _affordable(self) -> int:
        """How many of the settings, from the first, have time for `min_rounds` rounds; two at least."""
        names = self._done.settings
        for count in range(len(names), 2, -1):
            if self._fits(names[:count] * self._repetitions.min_rounds):
                return count
        return min(len(names), 2)

    def _fits(self, names: Sequence[str]) -> bool:
        unknown_s = max(self._costs_s.values(), default=0.0)
        wanted_s = sum(self._costs_s.get(name, unknown_s) for name in names) * _MARGIN
        return self._clock() + wanted_s <= self._repetitions.deadline_s
