"""No rank hangs: a missed deadline becomes stacks, an end record and an exit, within the configured time.

The loop calls `beat` whenever it enters a phase. A daemon thread compares the last beat with its deadline.
Code that holds the interpreter lock for ever would stop that thread too, so it keeps a second alarm armed
in faulthandler, whose C thread needs no lock: that one leaves stacks and no record (class killed).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from pathlib import Path
from typing import NamedTuple, TextIO

from hpctrain.resilience.exits import EndRecord, FailureClass, write_end_record

_GRACE_S = 3.0  # from the record to the exit, which makes the launcher kill the peers: they should dump first
_POLL_S = 0.2
_REARM_S = 5.0


class _Beat(NamedTuple):
    phase: str
    step: int
    since_s: float
    timeout_s: float


class Watchdog:
    """Deadline of one rank.

    Args:
        attempt_dir: `attempts/aNNNN`; stacks go to `logs/rank-N.stacks`, the end record to `ranks/N.json`.
        rank: this process's rank.
        hang_timeout_s: deadline of a phase for which `beat` states none.
        start_timeout_s: deadline of the first phase, from `start` to the first `beat`.
    """

    def __init__(self, attempt_dir: Path, rank: int, hang_timeout_s: float, start_timeout_s: float) -> None:
        self._attempt_dir = attempt_dir
        self._rank = rank
        self._hang_timeout_s = hang_timeout_s
        self._beat = _Beat("start", -1, time.monotonic(), start_timeout_s)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._parent_pid = os.getppid()
        self._stacks: TextIO | None = None

    @property
    def current(self) -> tuple[str, int]:
        """The phase and step of the last beat, for the end records of other failures."""
        return self._beat.phase, self._beat.step

    def start(self) -> None:
        """Begin watching; the first deadline is `start_timeout_s` from now."""
        self._beat = self._beat._replace(since_s=time.monotonic())
        self._stacks = self._open_stacks()
        if self._stacks is not None:
            # A launcher that ends the job sends SIGTERM first: then the ranks that did not see their own deadline,
            # or cannot run Python, leave their stacks too. The handler that was there before runs as well.
            faulthandler.register(signal.SIGTERM, file=self._stacks, all_threads=True, chain=True)
        self._thread = threading.Thread(target=self._watch, name="hpctrain-watchdog", daemon=True)
        self._thread.start()

    def beat(self, phase: str, step: int, timeout_s: float | None = None) -> None:
        """A sign of life: `phase` of `step` begins now and may last `timeout_s` (None: the hang timeout)."""
        allowed_s = self._hang_timeout_s if timeout_s is None else timeout_s
        self._beat = _Beat(
            phase, step, time.monotonic(), allowed_s
        )  # one assignment: no lock on the hot path

    def stop(self) -> None:
        """End watching. A rank that only has to shut down should `beat("exit", ...)` instead."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _POLL_S + 1.0)
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGTERM)
            if self._stacks is not None:
                self._stacks.close()

    def _open_stacks(self) -> TextIO | None:
        path = self._attempt_dir / "logs" / f"rank-{self._rank}.stacks"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("a", encoding="utf-8")
        except OSError:  # a full or lost disk: standard error then takes the stacks
            return None

    def _watch(self) -> None:
        armed_s = 0.0
        while not self._stop.wait(_POLL_S):
            if os.getppid() != self._parent_pid:  # the launcher is gone: no rank outlives it
                os.kill(os.getpid(), signal.SIGKILL)
            now_s = time.monotonic()
            beat = self._beat
            if now_s - beat.since_s > beat.timeout_s:
                self._end_of(beat)
            if now_s - armed_s > _REARM_S:
                armed_s = now_s
                self._arm_backstop(beat.since_s + beat.timeout_s - now_s)

    def _arm_backstop(self, remaining_s: float) -> None:
        wait_s = max(remaining_s, 0.0) + 2 * _REARM_S + _GRACE_S
        if self._stacks is not None:
            faulthandler.dump_traceback_later(wait_s, exit=True, file=self._stacks)
        else:
            faulthandler.dump_traceback_later(wait_s, exit=True)

    def _end_of(self, beat: _Beat) -> None:
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            if self._stacks is not None:
                self._stacks.write(
                    f"phase {beat.phase}, step {beat.step}: no beat for {beat.timeout_s:g} s\n"
                )
                self._stacks.flush()
                faulthandler.dump_traceback(file=self._stacks, all_threads=True)
            else:
                faulthandler.dump_traceback(all_threads=True)
        message = (
            f"phase {beat.phase!r} of step {beat.step} gave no sign of life for {beat.timeout_s:g} s; "
            f"stacks: logs/rank-{self._rank}.stacks"
        )
        hang = FailureClass.HANG
        record = EndRecord.now(self._rank, hang, step=beat.step, phase=beat.phase, message=message)
        write_end_record(self._attempt_dir, record)
        time.sleep(_GRACE_S)
        os._exit(FailureClass.HANG.exit_code)
