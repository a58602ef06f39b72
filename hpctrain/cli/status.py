"""`hpctrain status`: how a run stands, on one screen. What it shares with `hpctrain attempts` is here too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from hpctrain.observe.account import Seconds
    from hpctrain.observe.slurm_state import SlurmState
    from hpctrain.observe.staging import StagingView
    from hpctrain.observe.status import Status
    from hpctrain.observe.timeline import Timeline

PIPED_WIDTH = 160
"""Columns where there is no terminal that says how many it has."""

RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="The run directory, or RUN.toml for runs/NAME of it.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")]


def status(run: RunArgument, as_json: JsonOption = False) -> None:
    """How a run stands: running, waiting or stopped, why, what to do next, and where its time went.

    Only looks: it writes nothing, loads no code of the run, and works on a damaged run directory too.

    Example: hpctrain status runs/digits
    """
    import json
    import time

    from hpctrain.observe.slurm_state import ask_slurm
    from hpctrain.observe.status import describe_status, staging_now
    from hpctrain.observe.timeline import read_timeline

    timeline = read_timeline(run, time.time())
    slurm = ask_slurm(timeline.job) if timeline.job else None
    found, staging = describe_status(timeline, slurm), staging_now(timeline)
    if as_json:
        document = _document(timeline, slurm, found) | {"staging": staging.as_dict()}
        typer.echo(json.dumps(document, indent=1, allow_nan=False))
        return
    show(_facts(timeline, slurm, found, staging))
    if timeline.seconds.total:
        typer.echo()
        show(_time_table(timeline))


def show(table: Table) -> None:
    """Write a table; wide, without colours and without blanks at the ends of lines where there is no terminal."""
    from rich.console import Console

    width = None if Console().is_terminal else PIPED_WIDTH
    console = Console(width=width, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def in_words(seconds: float) -> str:
    """Seconds as `4.2s`, from a minute on as hours:minutes:seconds."""
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def rounded(seconds: Seconds) -> dict[str, float]:
    """By name, to the millisecond."""
    from dataclasses import asdict

    return {name: round(value, 3) for name, value in asdict(seconds).items()}


def all_missing(timeline: Timeline) -> list[str]:
    """Everything that is missing or damaged in the run directory."""
    return timeline.missing + [name for story in timeline.attempts for name in story.missing]


def _document(timeline: Timeline, slurm: SlurmState | None, found: Status) -> dict[str, Any]:
    from dataclasses import asdict

    latest = timeline.latest
    return {
        "run": str(timeline.run_dir),
        "name": timeline.name,
        "state": found.state,
        "headline": found.headline,
        "reason": found.reason,
        "next": found.next,
        "attempt": timeline.attempts[-1].number if timeline.attempts else None,
        "step": latest.get("step"),
        "steps_total": latest.get("steps_total"),
        "samples_per_s": latest.get("samples_per_s"),
        "last_checkpoint": timeline.last_checkpoint,
        "slurm": None if slurm is None else asdict(slurm),
        "seconds": rounded(timeline.seconds),
        "missing": all_missing(timeline),
    }


def _facts(timeline: Timeline, slurm: SlurmState | None, found: Status, staging: StagingView) -> Table:
    from rich.table import Table

    missing = all_missing(timeline)
    facts = {
        "run": f"{timeline.name} ({timeline.run_dir})",
        "state": found.headline,
        "why": found.reason,
        "next": found.next,
        "staging": staging.going_on(),
        "staged": staging.summary(),
        "checkpoint": timeline.last_checkpoint or "none yet",
        "Slurm": "" if slurm is None else f"job {slurm.job}: {slurm}",
        "missing": "; ".join(missing),
    }
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            table.add_row(name, value)
    return table


def _time_table(timeline: Timeline) -> Table:
    from rich.table import Table

    last, whole = timeline.attempts[-1], timeline.seconds
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("time")
    for title in (f"attempt {last.number}", "whole run", "share"):
        table.add_column(title, justify="right")
    mine = rounded(last.seconds)
    for name, seconds in rounded(whole).items():
        share = seconds / whole.total if whole.total else 0.0
        table.add_row(name.replace("_", "-"), in_words(mine[name]), in_words(seconds), f"{share:.0%}")
    table.add_row("in all", in_words(last.seconds.total), in_words(whole.total), "")
    return table
