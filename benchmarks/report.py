"""What a benchmark says at its end: JSON with everything, Markdown to read."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Ended, Measurement
from benchmarks.summary import Summary
from hpctrain.errors import HpctrainError, StorageError, UsageError

FORMAT: Final = "hpctrain-benchmark"
VERSION: Final = 1


@dataclass(frozen=True)
class Table:
    """A table of text cells; the first column is aligned left, the others right."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


@dataclass
class Report:
    """The outcome of one benchmark.

    `advice` is one sentence per question, each derived from the figures by the rule that `rules` states. `bars`: what
    was to be reached and what was, as JSON values, where a benchmark has any.
    """

    benchmark: str
    environment: dict[str, Any]
    config: dict[str, Any]
    measurements: dict[str, Measurement] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bars: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ended(self) -> Ended:
        """Complete, or the gravest reason why a part is not."""
        found = [part.ended for part in self.measurements.values()]
        gravity = (Ended.FAILED, Ended.INTERRUPTED, Ended.TIME)
        return next((reason for reason in gravity if reason in found), Ended.COMPLETE)

    @property
    def failure(self) -> HpctrainError | None:
        """The error that ended it early, if one did."""
        return next((part.failure for part in self.measurements.values() if part.failure is not None), None)

    def document(self) -> dict[str, Any]:
        """Everything, as JSON values: figures summarised and one by one."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "benchmark": self.benchmark,
            "ended": str(self.ended),
            "advice": self.advice,
            "rules": self.rules,
            "notes": self.notes,
            "environment": self.environment,
            "config": self.config,
            **({"bars": self.bars} if self.bars else {}),
            "measurements": {name: measurement_document(part) for name, part in self.measurements.items()},
        }

    def markdown(self) -> str:
        """The report as Markdown text."""
        lines = [f"# Benchmark: {self.benchmark}", ""]
        if self.ended is not Ended.COMPLETE:
            lines += [f"**Ended early: {self.ended}.** The figures are those measured until then.", ""]
        lines += [f"**{sentence}**\n" for sentence in self.advice]
        lines += [f"Rule: {rule}\n" for rule in self.rules]
        for table in self.tables:
            lines += [f"## {table.title}", "", *_table_lines(table), ""]
            lines += [table.note, ""] if table.note else []
        lines += ["## How it was measured", "", *(f"- {note}" for note in self.notes), ""]
        lines += ["## Environment", "", *_environment_lines(self.environment), ""]
        return "\n".join(lines)


def measurement_document(part: Measurement) -> dict[str, Any]:
    """One measurement as JSON values."""
    settings: dict[str, Any] = {}
    for name in part.measured():
        quantities = sorted(
            {key for item in part.observations if item.setting == name for key in item.values}
        )
        settings[name] = {key: dataclasses.asdict(Summary.of(part.values(name, key))) for key in quantities}
    return {
        "baseline": part.baseline,
        "ended": str(part.ended),
        "failure": None if part.failure is None else str(part.failure),
        "left_out": list(part.left_out),
        "settings": settings,
        "observations": [dataclasses.asdict(item) for item in part.observations],
    }


def number(value: float) -> str:
    """Three significant digits, without exponents where they are not needed."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    exponent = int(f"{value:.2e}".partition("e")[2])  # of the rounded value: 0.9999 is 1.00
    digits = max(0, 2 - exponent)
    return f"{value:,.{digits}f}" if digits <= 6 else f"{value:.2e}"


def spread(values: Sequence[float]) -> str:
    """`median [min, max]`; a dash for none."""
    if not values:
        return "-"
    found = Summary.of(values)
    return f"{number(found.median)} [{number(found.low)}, {number(found.high)}]"


def with_interval(values: Sequence[float]) -> str:
    """`median (95 % interval low .. high)`, or what there is when there are too few."""
    if not values:
        return "-"
    found = Summary.of(values)
    if found.interval is None:
        return f"{number(found.median)} (no interval, n = {found.n})"
    return f"{number(found.median)} ({number(found.interval.low)} .. {number(found.interval.high)})"


def check_target(path: Path | None) -> None:
    """Refuse a file that could not be written, before minutes are spent; raises `UsageError`."""
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK)):
        raise UsageError(
            f"{path}: cannot be written there; give a file in a folder that exists and may be written"
        )


def write(text: str, path: Path) -> None:
    """Write a file whole or not at all; raises `StorageError`."""
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(
            f"{path}: cannot be written: {error.strerror}; make room, or choose another"
        ) from error


def as_json(report: Report) -> str:
    """`Report.document` as text. Figures that are not finite, as of a diverged run, become null: JSON has none."""
    return json.dumps(_plain(report.document()), indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table_lines(table: Table) -> list[str]:
    aligned = [":--", *("--:" for _ in table.columns[1:])]
    return ["| " + " | ".join(row) + " |" for row in (table.columns, aligned, *table.rows)]


def _environment_lines(environment: dict[str, Any]) -> list[str]:
    lines = []
    for key, value in environment.items():
        if isinstance(value, dict):
            value = ", ".join(f"{name} {item}" for name, item in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) or "none"
        lines.append(f"- {key.replace('_', ' ')}: {'unknown' if value is None else value}")
    return lines
