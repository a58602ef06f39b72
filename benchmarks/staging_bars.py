"""The bars of `staging`: what was to be reached, what was found round by round, and whether that is enough."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from benchmarks.report import Table, number, with_interval
from benchmarks.summary import Summary

RULE: Final = (
    "a bar on times and rates is met where the median of the rounds is, one on bytes and counts where every round is; "
    "what is compared is compared within a round."
)
_REASON: Final = 200
"""Characters of a reason that stand in a table; all of them are said when it happens."""


@dataclass(frozen=True)
class Bar:
    """What must hold of a figure.

    Attributes:
        relation: None: a figure beside the bars, with nothing to hold.
        every: it must hold in every round, not only of the median.
    """

    what: str
    on: str
    bound: float = 0.0
    relation: Literal["at least", "at most"] | None = None
    every: bool = False


@dataclass(frozen=True)
class Judged:
    """A bar and what was found, round by round; `reason` says why nothing was."""

    bar: Bar
    values: tuple[float, ...]
    reason: str = ""

    @property
    def figure(self) -> float | None:
        """What decides: the median, or the worst; None where nothing was measured."""
        if not self.values:
            return None
        if not self.bar.every:
            return Summary.of(self.values).median
        return min(self.values) if self.bar.relation == "at least" else max(self.values)

    @property
    def is_met(self) -> bool | None:
        """None where nothing was measured, or nothing must hold."""
        if self.figure is None or self.bar.relation is None:
            return None
        return (
            self.figure >= self.bar.bound
            if self.bar.relation == "at least"
            else self.figure <= self.bar.bound
        )

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **dataclasses.asdict(self.bar),
            "met": self.is_met,
            "figure": self.figure,
            "found": dataclasses.asdict(Summary.of(self.values)) if self.values else None,
            "reason": self.reason,
        }

    def sentence(self) -> str:
        """Whether it is met, with the number."""
        bar = self.bar
        words = f"{bar.what}, {bar.on}"
        if self.figure is None:
            return f"Not measured: {words}: {self.reason or 'no time'} (bar: {bar.relation} {bar.bound:g})."
        verdict = "Met" if self.is_met else "MISSED"
        return f"{verdict}: {words}: {number(self.figure)}, bar: {bar.relation} {bar.bound:g}."


def bars_table(judged: Sequence[Judged]) -> Table:
    """One row per bar."""
    verdicts = {True: "yes", False: "NO", None: "-"}
    rows = [
        (
            item.bar.what,
            item.bar.on,
            str(len(item.values)),
            with_interval(item.values) if item.values else item.reason or "no time",
            f"{item.bar.relation} {item.bar.bound:g}" if item.bar.relation else "-",
            verdicts[item.is_met],
        )
        for item in judged
    ]
    return Table("Bars", ("what", "on", "n", "found (95 %)", "bar", "met"), rows)


class Reasons:
    """Why parts of the benchmark have no figures."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.of: dict[str, str] = {}

    def add(self, part: str, error: BaseException) -> None:
        """A part failed; it is said at once, and stands in the report."""
        words = f"{type(error).__name__}: {error}"
        self.of[part] = words.splitlines()[0][:_REASON]
        self._say(f"{part}: given up: {words}")
