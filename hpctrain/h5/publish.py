"""Publishing a directory whole or not at all: written under another name, then renamed once.

The temporary name is a hidden sibling, `.NAME.partial-WHERE-PID-RANDOM`, so that the rename stays within one
filesystem. A killed process leaves it behind; the next one that publishes the same name removes it. WHERE names the
host, its boot and the PID namespace, because PID says nothing anywhere else: what comes from elsewhere is left alone
until it has not changed for a week.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from hpctrain.durable import fsync_path
from hpctrain.errors import StorageError, UsageError
from hpctrain.resilience.faults import fault_point

_FORGOTTEN_S = 7 * 86_400.0
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def publishing(
    target: Path, marker: str, overwrite: bool = False, point: str = "pack.write"
) -> Iterator[Path]:
    """Give a temporary directory; rename it to `target` when the block ends, remove it when the block raises.

    An existing `target` is replaced only with `overwrite`, and only if it holds the file `marker` (so that a
    mistyped name cannot delete something else). `point`: the fault point before each rename. Raises `UsageError` for a
    target that cannot be used, `StorageError` when the directory cannot be made or renamed.
    """
    target = target.absolute()
    _clean_up(target)  # which may put back what was there
    check_target(target, marker, overwrite)
    partial = _sibling(target, "partial")
    try:
        _make(partial)
        yield partial
        fsync_tree(partial)
        check_target(target, marker, overwrite)
        _move(partial, target, point)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _make(partial: Path) -> None:
    missing = [parent for parent in partial.parents if not parent.exists()]
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        for parent in missing:
            _fsync(parent.parent)
        partial.mkdir()
    except OSError as error:
        raise StorageError(
            f"{partial.parent}: cannot be written to: {error.strerror}; check permissions and space, or choose another"
        ) from error


def fsync_tree(root: Path) -> None:
    """Make all files and directories below a directory, and itself, durable; raises `StorageError`."""
    for at, _, names in os.walk(root, topdown=False, onerror=_refuse):
        for name in names:
            _fsync(Path(at, name))
        _fsync(Path(at))


def _refuse(error: OSError) -> None:
    raise StorageError(f"{error.filename}: cannot be listed: {error.strerror}; check the disk") from error


def _fsync(path: Path) -> None:
    try:
        fsync_path(path)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be made durable (fsync): {error.strerror}; check the disk"
        ) from error


def check_target(target: Path, marker: str, overwrite: bool) -> None:
    """Raise `UsageError` where `publishing` would refuse the target."""
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


def _move(partial: Path, target: Path, point: str) -> None:
    """Rename into place; what stood there is exchanged for it in one step, and deleted last."""
    old = partial
    try:
        fault_point(point)
        if not target.exists():
            partial.rename(target)
        elif not _exchange(partial, target):
            old = _move_aside(partial, target, point)
        _fsync(target.parent)
    except OSError as error:
        raise StorageError(f"{target}: cannot be put into place: {error.strerror or error}") from error
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names (renameat2, Linux); False where the filesystem cannot, as NFS."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # another libc
        return False
    return bool(
        function(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0
    )


def _move_aside(partial: Path, target: Path, point: str) -> Path:
    """Rename in two steps, between which a kill leaves no target: the next one that publishes puts it back."""
    aside = _sibling(target, "replaced")
    try:
        target.rename(aside)
        fault_point(point)
        partial.rename(target)
    except BaseException:  # Ctrl-C between the two, too
        if aside.exists() and not os.path.lexists(target):
            aside.rename(target)
        raise
    return aside


def _clean_up(target: Path) -> None:
    """Deal with what killed processes left: put back what was moved aside without a successor, remove the rest."""
    if not target.parent.is_dir():
        return
    pattern = re.compile(
        rf"\.{re.escape(target.name)}\.(partial|replaced)-([\w-]+\.[0-9a-f]{{8}})-(\d+)-[0-9a-f]{{8}}"
    )
    for path in sorted(target.parent.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None or _may_be_alive(path, match[2], int(match[3])):
            continue
        if match[1] == "replaced" and not os.path.lexists(target):
            with contextlib.suppress(OSError):
                path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _sibling(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{_here()}-{os.getpid()}-{secrets.token_hex(4)}")


def _here() -> str:
    """Where numbers of processes are the same as here: the host, and a digest of its boot and the PID namespace."""
    host, boot, namespace = socket.gethostname(), "", ""
    with contextlib.suppress(OSError):  # not Linux, or no /proc: the host has to do
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = os.readlink("/proc/self/ns/pid")
    digest = hashlib.sha256(f"{host} {boot} {namespace}".encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9-]', '_', host)}.{digest}"


def _may_be_alive(path: Path, where: str, pid: int) -> bool:
    """Whether the process that made a leftover may still be at work."""
    try:
        if where != _here():
            return time.time() - path.stat().st_ctime < _FORGOTTEN_S
        os.kill(pid, 0)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
