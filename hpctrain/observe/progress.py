"""What the user sees while a run goes on: a bar on a terminal, else one line per interval; never a flood."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hpctrain.observe.events import EventTail

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_INTERVAL_S = 10.0
_OTHERS_S = 1.0
_OTHERS_PER_S = 50  # so many files of other ranks may be looked at per second
# Kinds of rank 0 that are shown as a line of their own; of the other ranks only warnings are.
_SPOKEN = ("restore", "refused_checkpoint", "checkpoint_failed", "evaluate", "warning", "advice", "stop")


@dataclass(frozen=True)
class Pace:
    """What an attempt has been seen to take, in seconds: until its first step, per step, per save (0: not seen)."""

    start_s: float = 0.0
    step_s: float = 0.0
    save_s: float = 0.0


class Progress:
    """Follows the events of the current attempt. This one keeps count and says nothing."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._tails: dict[Path, EventTail] = {}
        self._first: dict[str, Any] = {}
        self._latest: dict[str, Any] = {}
        self._said: set[str] = set()
        self._sizes: dict[Path, int] = {}
        self._others_s = 0.0
        self._followed_unix_s = 0.0
        self._pace = Pace()

    @property
    def pace(self) -> Pace:
        """What starting, a step and a save took lately, over all attempts that were followed."""
        return self._pace

    @property
    def last_step(self) -> int:
        """The last step seen in the attempt being followed; -1 before the first."""
        return int(self._latest.get("step", -1))

    def follow(self, directory: Path) -> None:
        """Turn to another attempt, whose events lie in `directory` (`rank-N.jsonl`)."""
        self._directory = directory
        self._tails, self._sizes = {}, {}
        self._first, self._latest = {}, {}
        self._said = set()
        self._followed_unix_s = time.time()

    def poll(self) -> None:
        """Take in the events that came since the last call."""
        if self._directory is None:
            return
        for event in self._tail(self._directory / "rank-0.jsonl").poll():
            self._take(event)
        # many ranks, and nothing of theirs is urgent
        if time.monotonic() - self._others_s >= max(_OTHERS_S, len(self._sizes) / _OTHERS_PER_S):
            self._others_s = time.monotonic()
            self._poll_others(self._directory)
        self._show()

    def say(self, text: str) -> None:
        """Tell the user something now."""

    def close(self) -> None:
        """End the display; `say` still works."""

    def _show(self) -> None:
        """Show the latest step, if it is time to."""

    def _words(self) -> str:
        return describe_step(self._latest, _left_s(self._first, self._latest))

    def _tail(self, path: Path) -> EventTail:
        return self._tails.setdefault(path, EventTail(path))

    def _take(self, event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            self._take_step(event)
        elif event["kind"] == "checkpoint":
            self._pace = replace(self._pace, save_s=float(event.get("seconds", 0.0)))
        elif event["kind"] in _SPOKEN or (event["kind"] == "reading" and "message" in event):
            self._say_once(describe_event(event))

    def _take_step(self, event: dict[str, Any]) -> None:
        if not self._first:
            self._first = event
            self._pace = replace(self._pace, start_s=max(event["t"] - self._followed_unix_s, 0.0))
        self._latest = event
        steps = int(event["step"]) - int(self._first["step"])
        if steps > 0:
            self._pace = replace(self._pace, step_s=(event["t"] - self._first["t"]) / steps)

    def _poll_others(self, directory: Path) -> None:
        for path, size in _sizes_of_others(directory):
            if self._sizes.setdefault(path, 0) != size:
                events = self._tail(path).poll()
                if events:  # else it could not be read now, or its last line is not complete: look again
                    self._sizes[path] = size
                for event in events:
                    if event["kind"] == "warning":
                        self._say_once(describe_event(event))

    def _say_once(self, text: str) -> None:
        """Ranks on one node tend to warn of the same thing."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)


class LineProgress(Progress):
    """One line per `interval_s` on a stream that is no terminal."""

    def __init__(self, stream: TextIO, interval_s: float = _INTERVAL_S) -> None:
        super().__init__()
        self._stream = stream
        self._interval_s = interval_s
        self._shown_s = time.monotonic()
        self._shown_step = -1

    def say(self, text: str) -> None:
        """Write one line. A reader that went away does not end the run."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(f"{time.strftime('%H:%M:%S')} {text}\n")
            self._stream.flush()

    def _show(self) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= self._interval_s and self.last_step not in (-1, self._shown_step):
            self._shown_s, self._shown_step = now_s, self.last_step
            self.say(self._words())


class BarProgress(Progress):
    """A bar on a terminal, drawn by rich; lines appear above it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        from rich.console import Console

        self._console = Console(file=stream)
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def follow(self, directory: Path) -> None:
        """Turn to another attempt; the bar's thread ends, because ranks are about to be forked."""
        self.close()
        super().follow(directory)

    def say(self, text: str) -> None:
        """Write one line above the bar."""
        with contextlib.suppress(OSError, ValueError):
            self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the bar as it is and end it."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def _show(self) -> None:
        if self.last_step < 0:
            return
        if self._bar is None or self._task is None:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(BarColumn(), TextColumn("{task.fields[words]}"), console=self._console)
            self._task = self._bar.add_task("train", words="")
            self._bar.start()
        total = self._latest.get("steps_total")
        self._bar.update(self._task, completed=self.last_step, total=total, words=self._words())


def make_progress(stream: TextIO) -> Progress:
    """The display that suits the stream."""
    return BarProgress(stream) if stream.isatty() else LineProgress(stream)


def describe_step(event: dict[str, Any], left_s: float | None = None) -> str:
    """A `step` event in words: step, epoch, loss, samples per second, and the time left where it is known."""
    total = event.get("steps_total")
    parts = [f"step {event.get('step', '?')}" + (f"/{total}" if total else "")]
    for key, form in (("epoch", "epoch {}"), ("loss", "loss {:.4g}"), ("samples_per_s", "{:.4g} samples/s")):
        value = event.get(key)
        if value is not None:
            parts.append(form.format(value) if isinstance(value, int | float) else f"{key} {value}")
    if left_s is not None:
        parts.append(f"{_clock(left_s)} left")
    return ", ".join(parts)


def describe_event(event: dict[str, Any]) -> str:
    """Any other event as one line: its message, else its fields."""
    kind = str(event["kind"]).replace("_", " ")
    if "message" in event:
        return f"{kind}: {event['message']}"
    fields = {key: value for key, value in event.items() if key not in ("t", "kind", "metrics")}
    fields |= event.get("metrics") or {}
    return f"{kind}: " + ", ".join(f"{key} {_short(value)}" for key, value in fields.items())


def _sizes_of_others(directory: Path) -> list[tuple[Path, int]]:
    """The event files of all ranks but 0, and their sizes; none where the filesystem does not answer now."""
    try:
        with os.scandir(directory) as entries:
            others = [entry for entry in entries if entry.name != "rank-0.jsonl"]
            return sorted(
                (Path(entry.path), entry.stat().st_size)
                for entry in others
                if entry.name.startswith("rank-") and entry.name.endswith(".jsonl")
            )
    except OSError:
        return []


def _left_s(first: dict[str, Any], latest: dict[str, Any]) -> float | None:
    """Seconds left, by the mean pace of this attempt (its start-up is not part of it)."""
    try:
        pace_s = (latest["t"] - first["t"]) / (latest["step"] - first["step"])
        return float(pace_s * (latest["steps_total"] - latest["step"]))
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
