from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from hpctrain.errors import StorageError
from hpctrain.resilience.lockfile import LockFile, exclusive


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first, second = LockFile(tmp_path / "lock"), LockFile(tmp_path / "lock")
    assert first.try_take()
    assert not second.try_take()
    first.release()
    assert second.try_take()
    assert (first.is_held, second.is_held) == (False, True)
    second.release()
    second.release()


def test_a_replaced_lock_leaves_its_holder_with_nothing(tmp_path: Path) -> None:
    stuck, new, third = (LockFile(tmp_path / "lock") for _ in range(3))
    stuck.try_take()
    new.replace()
    assert (stuck.is_replaced(), new.is_replaced(), third.is_replaced()) == (True, False, False)
    assert not third.try_take()
    stuck.release()
    assert not third.try_take()
    new.release()
    assert third.try_take()
    assert os.listdir(tmp_path) == ["lock"]
    third.release()


def test_a_file_replaced_between_opening_and_locking_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook in flock: nothing else can hit that moment for certain."""
    new, late, flock = LockFile(tmp_path / "lock"), LockFile(tmp_path / "lock"), fcntl.flock

    def replaced_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        new.replace()
        flock(descriptor, operation)  # of the old file: it is free

    monkeypatch.setattr(fcntl, "flock", replaced_first)
    assert not late.try_take()
    assert new.is_held
    new.release()


def test_sections_do_not_overlap(tmp_path: Path) -> None:
    inside: list[int] = []
    seen: list[int] = []

    def enter(number: int) -> None:
        for _ in range(20):
            with exclusive(tmp_path / "guard", 30):
                inside.append(number)
                seen.append(len(inside))
                inside.remove(number)

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [1] * 80


def test_a_section_that_another_never_leaves(tmp_path: Path) -> None:
    guard = LockFile(tmp_path / "guard")
    assert guard.try_take()
    with pytest.raises(TimeoutError, match="guard"), exclusive(tmp_path / "guard", 0.1):
        pass
    guard.release()
    with exclusive(tmp_path / "guard", 0):
        pass


def test_a_lock_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No filesystem of a test machine fails at flock."""

    def unknown(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", unknown)
    with pytest.raises(StorageError, match=r"lock: cannot be made and locked: Input/output.*another --dir"):
        LockFile(tmp_path / "lock").try_take()
    with pytest.raises(StorageError):
        LockFile(tmp_path / "missing" / "lock").replace()


def test_where_there_are_no_locks_everybody_gets_one_that_is_not_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre mounted without `-o flock` answers so, and there is none here."""

    def unknown(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unknown)
    first, second = LockFile(tmp_path / "lock"), LockFile(tmp_path / "lock")
    assert first.try_take()
    assert second.try_take()
    assert [first.is_real, second.is_real] == [False, False]
