"""Publishing a directory whole or not at all: written under another name, then renamed once.

The temporary name is a hidden sibling, `.NAME.partial-PID-RANDOM`, so that the rename stays within one
filesystem. A killed process leaves it behind; the next one that publishes the same name removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from hpctrain.durable import fsync_path
from hpctrain.errors import StorageError, UsageError

_OWNER = "owner.json"


@contextlib.contextmanager
def publishing(target: Path, marker: str, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary directory; rename it to `target` when the block ends, remove it when the block raises.

    An existing `target` is replaced only with `overwrite`, and only if it holds the file `marker` (so that a
    mistyped name cannot delete something else). Raises `UsageError` for a target that cannot be used,
    `StorageError` when the directory cannot be made or renamed.
    """
    target = target.absolute()
    _check_target(target, marker, overwrite)
    _clean_up(target)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        _make(partial)
        yield partial
        (partial / _OWNER).unlink()
        fsync_tree(partial)
        _check_target(target, marker, overwrite)
        _move(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _make(partial: Path) -> None:
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        (partial / _OWNER).write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
    except OSError as error:
        raise StorageError(
            f"{partial.parent}: cannot be written to: {error.strerror}; check permissions and space, or choose another"
        ) from error


def fsync_tree(root: Path) -> None:
    """Make the files directly in a directory, and its entries, durable."""
    for path in [*root.iterdir(), root]:
        _fsync(path)


def _fsync(path: Path) -> None:
    try:
        fsync_path(path)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be made durable (fsync): {error.strerror}; check the disk"
        ) from error


def _check_target(target: Path, marker: str, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir() or target.is_symlink():
        raise UsageError(f"{target} exists and is not a directory; choose another name")
    if not any(target.iterdir()):
        return
    if not (target / marker).is_file():
        raise UsageError(
            f"{target} exists and holds no {marker}, so it is not ours to replace; choose another name"
        )
    if not overwrite:
        raise UsageError(f"{target} exists already; choose another name, or replace it with --overwrite")


def _move(partial: Path, target: Path) -> None:
    """Rename into place; what stood there is moved aside first and deleted last."""
    aside = target.with_name(f".{target.name}.replaced-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        if target.exists():
            target.rename(aside)
        try:
            partial.rename(target)
        except OSError:
            if aside.exists():
                aside.rename(target)
            raise
        _fsync(target.parent)
    except OSError as error:
        raise StorageError(f"{target}: cannot be put into place: {error.strerror or error}") from error
    shutil.rmtree(aside, ignore_errors=True)


def _clean_up(target: Path) -> None:
    """Deal with what killed processes left: put back what was moved aside without a successor, remove the rest."""
    if not target.parent.is_dir():
        return
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(partial|replaced)-(\d+)-[0-9a-f]{{8}}")
    for path in sorted(target.parent.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None or _is_alive(path, int(match[2])):
            continue
        if match[1] == "replaced" and not os.path.lexists(target):
            with contextlib.suppress(OSError):
                path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(path: Path, pid: int) -> bool:
    """Whether the process that made a leftover may still be at work; one on another host is taken to be."""
    try:
        if json.loads((path / _OWNER).read_text())["host"] != socket.gethostname():
            return True
    except (OSError, ValueError, KeyError, TypeError):
        pass  # killed before the owner was written, or moved aside: the number in the name has to do
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
