"""Progress of long work, on standard error: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

Display = Callable[[str, int, int, Callable[[float], str]], None]
"""Called with what is being done, how much of it is done, how much there is, and what gives the words for it from the
seconds it has taken."""
Advance = Callable[[int, int], None]
"""Called with how much is done, and how much there is (in bytes, or in the unit's own count)."""

_LINE_INTERVAL_S: Final = 5.0
_MB: Final = 1e6


@contextmanager
def progress(verb: str, unit: str = "MB") -> Iterator[Advance]:
    """Show one kind of work, as `verb: 12.0 of 96.0 MB, 3.1 MB/s`.

    With the unit "MB" the counts are bytes; with any other ("files", "samples") they are shown as they are.
    """
    with display() as show:
        yield lambda done, total: show(
            verb, done, total, lambda elapsed_s: amount(done, total, unit, elapsed_s)
        )


def amount(done: int, total: int, unit: str, elapsed_s: float) -> str:
    """How much is done, of how much, and how fast; in megabytes for the unit "MB", else in counts."""
    scale, digits = (_MB, 1) if unit == "MB" else (1.0, 0)
    rate = done / scale / max(elapsed_s, 1e-9)
    return f"{done / scale:.{digits}f} of {total / scale:.{digits}f} {unit}, {rate:.1f} {unit}/s"


@contextmanager
def display() -> Iterator[Display]:
    """What shows several kinds of work one after the other, each with words of its own."""
    if not sys.stderr.isatty():
        yield lines(time.monotonic)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, redirect_stderr=True) as bar:
        task = bar.add_task("", total=None)
        since = _Since(time.monotonic)

        def show(activity: str, done: int, total: int, words: Callable[[float], str]) -> None:
            text = words(since.elapsed_s(activity))
            bar.update(task, completed=done, total=total, description=f"{activity}: {text}")

        yield show


def lines(clock: Callable[[], float]) -> Display:
    """A line every few seconds of `clock`, on standard error."""
    since, last_s = _Since(clock), 0.0

    def show(activity: str, done: int, total: int, words: Callable[[float], str]) -> None:
        nonlocal last_s
        elapsed_s = since.elapsed_s(activity)
        if elapsed_s == 0.0:  # the first call for this activity
            last_s = 0.0
        if elapsed_s - last_s < _LINE_INTERVAL_S:
            return
        last_s = elapsed_s
        print(f"{activity}: {words(elapsed_s)}", file=sys.stderr, flush=True)

    return show


class _Since:
    """Seconds from the first call for an activity."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._activity: str | None = None
        self._started_s = 0.0

    def elapsed_s(self, activity: str) -> float:
        now_s = self._clock()
        if activity != self._activity:
            self._activity, self._started_s = activity, now_s
        return now_s - self._started_s
