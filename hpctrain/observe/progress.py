"""What the user sees while a run goes on: bars on a terminal, else one line per interval; never a flood."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hpctrain.observe.event_words import describe_event, describe_step, left_s
from hpctrain.observe.events import EventTail
from hpctrain.observe.staging import StagingView

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_INTERVAL_S = 10.0
_OTHERS_S = 1.0
_OTHERS_PER_S = 50  # so many files of other ranks may be looked at per second
_SETTLE_S = 5.0  # staging is over when no node has said otherwise for so long
# Kinds of rank 0 that are shown as a line of their own; of the other ranks only warnings are. Staging is told by one
# rank of each node, and shown as one.
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
        self._staging, self._staging_s = StagingView(), 0.0
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
        self._staging = StagingView()
        self._followed_unix_s = time.time()

    def poll(self) -> None:
        """Take in the events that came since the last call."""
        if self._directory is None:
            return
        for event in self._tail(self._directory / "rank-0.jsonl").poll():
            self._take(event)
        # many ranks, and nothing of theirs is urgent
        pause_s = max(_OTHERS_S, len(self._sizes) / _OTHERS_PER_S)
        if time.monotonic() - self._others_s >= pause_s:
            self._others_s = time.monotonic()
            self._poll_others(self._directory)
        if time.monotonic() - self._staging_s > _SETTLE_S + 2 * pause_s:
            self._say_staged()
        self._show()

    def say(self, text: str) -> None:
        """Tell the user something now."""

    def close(self) -> None:
        """End the display, with what other ranks said last; `say` still works."""
        if self._directory is not None:
            self._poll_others(self._directory)
        self._say_staged()

    def _show(self) -> None:
        """Show the latest step and how far staging is, if it is time to."""

    def _step_words(self) -> str:
        return describe_step(self._latest, left_s(self._first, self._latest)) if self._latest else ""

    def _staging_words(self) -> str:
        going_on = self._staging.going_on()
        return f"staging {going_on}" if going_on else ""

    def _tail(self, path: Path) -> EventTail:
        return self._tails.setdefault(path, EventTail(path))

    def _take(self, event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            self._take_step(event)
        elif event["kind"] == "checkpoint":
            self._pace = replace(self._pace, save_s=float(event.get("seconds", 0.0)))
        elif event["kind"] == "staging":
            self._take_staging(event)
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

    def _take_staging(self, event: dict[str, Any]) -> None:
        self._staging.take(event)
        self._staging_s = time.monotonic()

    def _say_staged(self) -> None:
        if summary := self._staging.summary():
            self._say_once(f"staged {summary}")

    def _poll_others(self, directory: Path) -> None:
        for path, size in _sizes_of_others(directory):
            if self._sizes.setdefault(path, 0) != size:
                events = self._tail(path).poll()
                if events:  # else it could not be read now, or its last line is not complete: look again
                    self._sizes[path] = size
                for event in events:
                    if event["kind"] == "warning":
                        self._say_once(describe_event(event))
                    elif event["kind"] == "staging":
                        self._take_staging(event)

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
        self._shown = ""

    def say(self, text: str) -> None:
        """Write one line. A reader that went away does not end the run."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(f"{time.strftime('%H:%M:%S')} {text}\n")
            self._stream.flush()

    def _show(self) -> None:
        now_s, words = time.monotonic(), ", ".join(filter(None, (self._step_words(), self._staging_words())))
        if now_s - self._shown_s >= self._interval_s and words not in ("", self._shown):
            self._shown_s, self._shown = now_s, words
            self.say(words)


class BarProgress(Progress):
    """A bar on a terminal, drawn by rich, and another for staging while it goes on; lines appear above them."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        from rich.console import Console

        self._console = Console(file=stream)
        self._bar: RichProgress | None = None
        self._rows: tuple[TaskID, ...] = ()

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
        super().close()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self) -> None:
        step, staging, staged = self._step_words(), self._staging_words(), self._staging.sum
        if step or staging or self._bar is not None:
            bar, (steps_row, staging_row) = self._get_bar(), self._rows
            done, total = max(self.last_step, 0), self._latest.get("steps_total")
            bar.update(steps_row, completed=done, total=total, words=step, visible=bool(step))
            done, total = staged.present_bytes, staged.total_bytes
            bar.update(staging_row, completed=done, total=total, words=staging, visible=bool(staging))

    def _get_bar(self) -> RichProgress:
        if self._bar is None:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            # a narrow one, or a terminal of 80 columns has no room for the words
            self._bar = Bar(BarColumn(20), TextColumn("{task.fields[words]}"), console=self._console)
            self._rows = tuple(self._bar.add_task("", total=None, visible=False, words="") for _ in range(2))
            self._bar.start()
        return self._bar


def make_progress(stream: TextIO) -> Progress:
    """The display that suits the stream."""
    return BarProgress(stream) if stream.isatty() else LineProgress(stream)


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
