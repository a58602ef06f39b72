"""Where the time goes, and the sign of life: every phase of a rank feeds a clock and the watchdog."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.resilience.watchdog import Watchdog


class Phases:
    """Seconds per phase, in this process. Phases do not nest.

    Args:
        watchdog: gets a beat at the beginning of each phase.
        slow: phases that may take as long as `slow_s`; the others have the watchdog's own deadline.
        slow_s: their deadline, in seconds.
    """

    def __init__(self, watchdog: Watchdog, slow: frozenset[str] = frozenset(), slow_s: float = 0.0) -> None:
        self._watchdog, self._slow, self._slow_s = watchdog, slow, slow_s
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str, step: int) -> Iterator[None]:
        """Time a block as `name`; its deadline begins anew."""
        self._watchdog.beat(name, step, self._slow_s if name in self._slow else None)
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begun

    def totals(self) -> dict[str, float]:
        """Seconds by phase so far, for an event: it tells where the time went when this process is killed."""
        return {name: round(value, 3) for name, value in self.seconds.items()}

    def still_alive(self, name: str, step: int) -> None:
        """A sign of life within a long phase."""
        self._watchdog.beat(name, step)
