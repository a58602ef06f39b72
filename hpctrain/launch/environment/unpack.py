"""An environment archive, unpacked on a node: once per node, whole or not at all.

It lands in `DIR/hpctrain-UID/env-DIGEST`. That folder is made 0700 and checked by descriptor, so that nobody else can
plant an environment. A kernel lock lets one process of the node unpack while the others wait; it ends with its holder,
so a killed one leaves a partial directory, which the next one sweeps, and never a lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hpctrain.errors import ConfigError, HangError, HpctrainError, StorageError, UsageError
from hpctrain.launch.environment.extract import Progress, extract
from hpctrain.launch.environment.header import Header, read_header
from hpctrain.staging.private import open_private, private_path

LOCK_TIMEOUT_S = 900.0
_LOCK_POLL_S = 0.2
_INTERPRETER_TIMEOUT_S = 120.0
_BLOCK_BYTES = 4096
_PARTIAL = "partial-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TELL = "import platform, sysconfig; print(platform.python_version(), sysconfig.get_config_var('SOABI'))"


def unpack_archive(
    archive: Path,
    directory: str,
    progress: Progress = lambda done, total: None,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> Path:
    """Unpack `archive` below `directory` unless it is there already; returns the path of its `python`.

    Variables and `~` in `directory` are expanded here, on the node. Safe to call from several processes at once, and
    again after a kill.

    Raises:
        UsageError: there is no such archive, or `directory` names a variable that is not set.
        ConfigError: the node lacks the base interpreter, or the folder belongs to somebody else.
        DataError: the archive is damaged, or not one.
        StorageError: it cannot be read, or the disk is full or broken; nothing is left then.
        HangError: another process has been unpacking for longer than `lock_timeout_s`.
    """
    try:
        with _open(archive) as file:
            header = read_header(file)
            _check_interpreter(archive, header)
            folder = _private_folder(expand(directory))
            target = folder / f"env-{header.digest[:16]}"
            if not target.is_dir():
                with _lock(folder, lock_timeout_s):
                    _sweep(folder)
                    if not target.is_dir():
                        _unpack(file, header, target, progress)
    except OSError as error:
        if isinstance(error, HpctrainError):
            raise
        raise StorageError(
            f"unpacking to {directory}: {error.filename or archive}: {error.strerror or error}; mend that and run again"
        ) from error
    return target / "bin" / "python"


def _open(archive: Path) -> BinaryIO:
    try:
        return archive.open("rb")
    except FileNotFoundError as error:
        raise UsageError(
            f"{archive}: no such archive on {socket.gethostname()}; make it with `hpctrain env-archive create`, on a "
            "filesystem that the nodes see"
        ) from error


def expand(directory: str) -> Path:
    """Variables and `~` replaced; raises `UsageError` for one that is not set."""
    expanded = os.path.expanduser(os.path.expandvars(directory))
    if "$" in expanded or expanded.startswith("~") or not expanded:
        raise UsageError(
            f"{directory!r} is {expanded!r} on {socket.gethostname()}: a variable in it is not set there; name another "
            "directory of the node's own disk"
        )
    return Path(expanded).absolute()


def _check_interpreter(archive: Path, header: Header) -> None:
    """Refuse a node that lacks the interpreter, of just this version, which the environment builds on."""
    wanted, python = f"{header.python_version} {header.soabi}", header.base_executable
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", _TELL],
            capture_output=True,
            text=True,
            timeout=_INTERPRETER_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        found = done.stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        found = f"not usable ({said})"
    if found != wanted:
        raise ConfigError(
            f"{archive} needs {python} to be Python {wanted}, but on {socket.gethostname()} it is {found}; load the "
            "same Python module there as where the archive was made, or make the environment from an interpreter that "
            "all nodes have (`PYTHON -m venv ENV`) and archive that"
        )


def _private_folder(directory: Path) -> Path:
    """`DIR/hpctrain-UID`, which nobody else may write to."""
    os.close(open_private(directory, planted="programs", instead="name another directory"))
    return private_path(directory)


@contextlib.contextmanager
def _lock(folder: Path, timeout_s: float) -> Iterator[None]:
    """Be the only one on this node who unpacks into `folder`."""
    descriptor = os.open(folder / "env.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline_s = time.monotonic() + timeout_s
        while not _try_lock(descriptor):
            if time.monotonic() > deadline_s:
                raise HangError(
                    f"another process has been unpacking in {folder} for {timeout_s:g} s; find it with "
                    f"`fuser {folder}/env.lock`, end it and run again"
                )
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _sweep(folder: Path) -> None:
    """Remove what killed processes left; call it with the lock held."""
    for path in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path)


def _unpack(file: BinaryIO, header: Header, target: Path, progress: Progress) -> None:
    _check_space(header, target.parent)
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=target.parent))
    try:
        extract(file, header, partial, progress)
        for name in header.interpreter_links:
            (partial / name).symlink_to(header.base_executable)
        _sync(partial)
        partial.rename(target)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, HpctrainError):
            raise StorageError(
                error.errno,
                f"{target.parent}: {error.strerror or error} while unpacking {header.total_bytes / 1e6:.0f} MB; "
                "nothing was left behind: make room there, or name another directory",
            ) from error
        raise


def _check_space(header: Header, folder: Path) -> None:
    found = os.statvfs(folder)
    free_bytes = found.f_bavail * found.f_frsize
    needed_bytes = header.total_bytes + header.members * _BLOCK_BYTES
    if free_bytes < needed_bytes:
        raise StorageError(
            errno.ENOSPC,
            f"{folder}: the environment needs {needed_bytes / 1e6:.0f} MB, but {free_bytes / 1e6:.0f} MB are free; "
            "make room there, or name another directory",
        )


def _sync(folder: Path) -> None:
    """Make all files durable before the rename, so that a power cut cannot leave a whole-looking half.

    One call for the file system instead of one for each of tens of thousands of files.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(folder, _DIRECTORY)
    try:
        if libc.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)
