"""Saving beside training: the snapshot is taken in the loop, written by a thread.

One save is under way at most; the next one waits for it, so that memory holds two copies of the state and no more. A
save that fails costs that checkpoint, not the run: it is reported, the older ones stay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hpctrain.checkpoint.snapshot import Snapshot
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import StorageError

Report = Callable[..., None]


class CheckpointWriter:
    """Commits snapshots to a store, on rank 0.

    Args:
        store: where they go.
        keep: committed checkpoints that stay.
        report: called as report(kind, **fields): `checkpoint` with step and seconds; `checkpoint_failed` with message.
    """

    def __init__(self, store: CheckpointStore, keep: int, report: Report) -> None:
        self._store, self._keep, self._report = store, keep, report
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.last_committed_step = -1

    def save(self, snapshot: Snapshot) -> None:
        """Begin to save; waits for the save before."""
        self.wait()
        self._thread = threading.Thread(target=self._save, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    def save_now(self, snapshot: Snapshot) -> None:
        """Save and wait; raises `StorageError` where it failed."""
        self.wait()
        if snapshot.cursor.step != self.last_committed_step:
            self._commit(snapshot)

    def wait(self) -> None:
        """Wait for the save under way; an unexpected error of the thread is raised here."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _save(self, snapshot: Snapshot) -> None:
        try:
            self._commit(snapshot)
        except StorageError as error:
            self._report("checkpoint_failed", step=snapshot.cursor.step, message=str(error))
        except BaseException as error:  # noqa: BLE001 - raised in the loop by wait()
            self._error = error

    def _commit(self, snapshot: Snapshot) -> None:
        begun = time.monotonic()
        self._store.commit(snapshot)
        self.last_committed_step = snapshot.cursor.step
        self._report("checkpoint", step=snapshot.cursor.step, seconds=time.monotonic() - begun)
        try:
            self._store.prune(self._keep)
        except OSError as error:
            self._report("warning", message=f"older checkpoints not removed: {error}")
