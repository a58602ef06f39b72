"""`hpctrain attempts`: the attempts of a run, one per row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from hpctrain.cli.status import JsonOption, RunArgument, all_missing, in_words, rounded, show

if TYPE_CHECKING:
    from rich.table import Table

    from hpctrain.observe.account import Seconds
    from hpctrain.observe.story import AttemptStory
    from hpctrain.observe.timeline import Timeline

_SHOWN_S = 0.05


def attempts(run: RunArgument, as_json: JsonOption = False) -> None:
    """Every attempt of a run: how it ended and why, what it started from, steps gained and lost, where its time went.

    Only looks: it writes nothing, loads no code of the run, and works on a damaged run directory too.

    Example: hpctrain attempts runs/digits
    """
    import json
    import time

    from hpctrain.observe.timeline import read_timeline

    timeline = read_timeline(run, time.time())
    if as_json:
        typer.echo(json.dumps(_document(timeline), indent=1, allow_nan=False))
        return
    if not timeline.attempts:
        typer.echo(f"{timeline.run_dir}: no attempt was made yet")
        return
    show(_table(timeline))
    for name in all_missing(timeline):
        typer.echo(f"missing: {name}")


def _document(timeline: Timeline) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "run": str(timeline.run_dir),
        "name": timeline.name,
        "attempts": [{**asdict(story), "seconds": rounded(story.seconds)} for story in timeline.attempts],
        "seconds": rounded(timeline.seconds),
        "missing": timeline.missing,
    }


def _table(timeline: Timeline) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_footer=True)
    stories = timeline.attempts
    with_job = any(story.job for story in stories)
    table.add_column("#", "", justify="right")
    if with_job:
        table.add_column("job", overflow="fold")
    table.add_column("ranks", overflow="fold")
    table.add_column("ended", overflow="fold")
    table.add_column("why", overflow="fold", ratio=1)
    table.add_column("from", overflow="fold", min_width=8)
    table.add_column("gained", str(sum(story.steps_gained for story in stories)), justify="right")
    table.add_column("lost", str(sum(story.steps_lost for story in stories)), justify="right")
    table.add_column("time", _times(timeline.seconds), overflow="fold")
    for story in stories:
        job = [story.job + (f" restart {story.restart}" if story.restart else "")] if with_job else []
        table.add_row(
            str(story.number),
            *job,
            f"{story.num_ranks or '?'} on {' '.join(story.nodes) or '?'}",
            story.ended,
            story.reason,
            _origin(story),
            str(story.steps_gained),
            str(story.steps_lost),
            _times(story.seconds),
        )
    return table


def _origin(story: AttemptStory) -> str:
    if story.from_step is None:
        return "-"
    origin = story.checkpoint or (f"step {story.from_step}" if story.from_step else "the beginning")
    return "; ".join([origin, *(f"refused {refused}" for refused in story.refused)])


def _times(seconds: Seconds) -> str:
    """What took time, the most first; and the sum."""
    spent = [(value, name.replace("_", "-")) for name, value in rounded(seconds).items() if value >= _SHOWN_S]
    parts = [f"{name} {in_words(value)}" for value, name in sorted(spent, reverse=True)]
    return f"{in_words(seconds.total)}: {', '.join(parts)}" if parts else in_words(seconds.total)
