"""What `recovery` says: the bars with what was found, and tables of where the time goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.harness import Measurement
from benchmarks.report import Table, number, spread, with_interval
from benchmarks.summary import Summary

KILLED: Final = "one rank killed"
WARNED: Final = "warning"
NODE: Final = "one node lost, one spare"
RULE: Final = (
    "a bar in seconds is met where the median of the rounds is within it; one in steps, where every round is."
)


@dataclass(frozen=True)
class Bar:
    """At most `bound` of a quantity, by its name in the values."""

    setting: str
    quantity: str
    bound: float
    words: str

    @property
    def unit(self) -> str:
        """As the name of the quantity says."""
        return "s" if self.quantity.endswith("_s") else "steps"


@dataclass(frozen=True)
class Judged:
    """A bar and what was found, round by round; `figure` is what decides by `RULE`, None where nothing was."""

    bar: Bar
    values: tuple[float, ...]

    @classmethod
    def of(cls, bar: Bar, bars: Measurement) -> Judged:
        """Judge by what was measured."""
        return cls(bar, tuple(bars.values(bar.setting, bar.quantity)))

    @property
    def figure(self) -> float | None:
        """The median of seconds, the most of steps."""
        if not self.values:
            return None
        return Summary.of(self.values).median if self.bar.unit == "s" else max(self.values)

    @property
    def is_met(self) -> bool | None:
        """None where nothing was measured."""
        return None if self.figure is None else self.figure <= self.bar.bound

    @property
    def num_kept(self) -> int:
        """Rounds within the bound."""
        return sum(value <= self.bar.bound for value in self.values)

    def sentence(self) -> str:
        """Whether it is met, with the number."""
        bar = self.bar
        if self.figure is None:
            return f"Not measured: {bar.words} (bar: at most {bar.bound:g} {bar.unit})."
        verdict = "Met" if self.is_met else "MISSED"
        kept = f"kept in {self.num_kept} of {len(self.values)} rounds"
        figure = number(self.figure) if bar.unit == "s" else f"{self.figure:g}"
        return f"{verdict}: {bar.words}: {figure} {bar.unit}, bar: at most {bar.bound:g} {bar.unit} ({kept})."


def bars_of(interval_steps: int) -> list[Bar]:
    """The bars. Seconds are differences within a run, so that a slow machine raises both sides."""
    return [
        Bar(
            KILLED, "excess_s", 3.0, "from SIGKILL of a rank to the next finished step, beyond a plain start"
        ),
        Bar(KILLED, "lost_steps", interval_steps, "steps lost after SIGKILL (one checkpoint interval)"),
        Bar(
            WARNED, "excess_s", 5.0, "from a warning to all ranks gone and the job requeued, beyond the save"
        ),
        Bar(WARNED, "lost_steps", 0, "steps lost after a warning"),
    ]


def bars_table(judged: list[Judged]) -> Table:
    """One row per bar."""
    columns = ("bar", "n", "median [min, max]", "median (95 %)", "at most", "kept in", "met")
    verdicts = {True: "yes", False: "NO", None: "-"}
    rows = [
        (
            item.bar.words,
            str(len(item.values)),
            spread(item.values),
            with_interval(item.values),
            f"{item.bar.bound:g} {item.bar.unit}",
            f"{item.num_kept} of {len(item.values)}",
            verdicts[item.is_met],
        )
        for item in judged
    ]
    return Table("Bars", columns, rows)


def relaunch_table(parts: list[Measurement]) -> Table:
    """Where the time goes until the next step."""
    quantities = {
        "plain start s": "plain_start_s", "recovery s": "recovery_s", "detection s": "detection_s",
        "ending s": "ending_s", "sweep s": "placing_s", "start s": "start_s", "steps lost": "lost_steps",
        "load, 1 min": "load_1min",
    }  # fmt: skip
    note = (
        "Recovery is from the fault to the next finished step. Detection: until srun speaks of it (at the latest, "
        "until the attempt's end record). Ending: until that record, when nothing of the attempt is left. Sweep: until "
        "the next attempt's start record, with the look at the nodes. Start: until its first step, with the restoring; "
        "a plain start is the same of an undisturbed first attempt. A lost node is noticed when Slurm calls it down, "
        "after SlurmdTimeout: 10 s here, 300 s by default."
    )
    return _table("Relaunched inside the allocation", quantities, parts, (KILLED, NODE), note)


def warning_table(bars: Measurement) -> Table:
    """Where the time goes until the job is requeued."""
    quantities = {
        "both s": "warning_s", "saved s": "saved_s", "ranks gone s": "gone_s", "requeued s": "requeued_s",
        "save s": "save_s", "steps lost": "lost_steps", "load, 1 min": "load_1min",
    }  # fmt: skip
    note = (
        "Both: from the signal until all ranks are gone and the job is requeued. Saved, ranks gone, requeued: each "
        "from the signal. Save: what the last save itself took; the step under way is finished before it."
    )
    return _table("Warned, with hours left", quantities, [bars], (WARNED,), note)


def _table(
    title: str, quantities: dict[str, str], parts: list[Measurement], settings: tuple[str, ...], note: str
) -> Table:
    rows = [
        (
            name,
            str(len(part.values(name, "lost_steps"))),
            *(spread(part.values(name, key)) for key in quantities.values()),
        )
        for part in parts
        for name in part.measured()
        if name in settings
    ]
    return Table(title, ("what happens", "n", *quantities), rows, f"Each: median [min, max]. {note}")
