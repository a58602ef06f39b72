"""Where the time goes, and the sign of life: every phase of a rank feeds a clock and the watchdog."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.resilience.watchdog import Watchdog


class Phases:
    """Seconds per phase, in this process. Phases do not nest."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str, step: int) -> Iterator[None]:
        """Time a block as `name`; its deadline begins anew."""
        self._watchdog.beat(name, step)
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begun

    def still_alive(self, name: str, step: int) -> None:
        """A sign of life within a long phase."""
        self._watchdog.beat(name, step)
