"""Threads that do small tasks: what `ThreadPoolExecutor` does, without 10 us of the GIL for the future of each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Workers:
    """So many threads, which do tasks in the order given. A task must not raise: nobody would hear of it."""

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Have a task done by any of the threads."""
        self._tasks.put(task)

    def close(self) -> None:
        """Let the tasks under way end, drop the others, and wait for the threads; safe to call twice."""
        self._closed = True
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self._closed:
            task()
