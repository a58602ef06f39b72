"""Events of a run: one JSON object per line, appended, never rewritten.

Each line is `{"t": unix seconds, "kind": ..., ...}` and is written by one `write` on a descriptor opened for
appending, so that lines of several processes do not mix and a killed writer tears at most its last line.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any


class EventLog:
    """Appends events to a file, which is opened at the first event.

    A full disk must not end a training run: what cannot be written is counted in `lost`, not raised.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._descriptor: int | None = None
        self._torn = False
        self._lock = threading.Lock()  # the loop, the writer, the stager and the loader all emit

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event. Numbers that are not finite become text (`"nan"`): JSON has none of them."""
        event = {"t": round(time.time(), 6), "kind": kind, **fields}
        line = json.dumps(_plain(event), allow_nan=False, separators=(",", ":"), default=str) + "\n"
        with self._lock:
            self._append(line)

    def _append(self, line: str) -> None:
        content = ("\n" + line if self._torn else line).encode()
        try:
            if self._descriptor is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o644)
            written = os.write(self._descriptor, content)
        except OSError:
            self.lost += 1
            return
        self._torn = written < len(content)
        self.lost += self._torn

    def close(self) -> None:
        """Close the file; a later `emit` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class EventTail:
    """Reads a growing event file from where the last `poll` ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def poll(self) -> list[dict[str, Any]]:
        """The events completed since the last call; none while the file does not exist."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._offset)
                content = stream.read()
        except OSError:  # not there yet, or the filesystem does not answer now: the next poll tries again
            return []
        whole = content[: content.rfind(b"\n") + 1]  # a torn last line is read once it is complete
        self._offset += len(whole)
        return [event for line in whole.splitlines() if (event := parse_event(line)) is not None]


def read_events(path: Path) -> list[dict[str, Any]]:
    """All complete events of a file; torn lines are left out, a missing file has none."""
    return EventTail(path).poll()


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The event in a line; None for anything else, such as a torn one."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None


def _plain(value: Any) -> Any:
    """`value` with NumPy scalars as Python numbers and numbers that are not finite as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, str | int | float | bool) and hasattr(value, "item"):
        return _plain(value.item())
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
