"""Private directories on nodes that others use too: `DIRECTORY/hpctrain-UID/NAME`.

They are made 0700 and opened without following links; owner and mode are checked on the open descriptor, so that what
was checked is what is used. Nobody else can plant anything in them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Final

from hpctrain.errors import ConfigError

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO in the way must not block


def private_path(directory: Path, *names: str) -> Path:
    """Where a private directory lies: `DIRECTORY/hpctrain-UID`, and `names` below it."""
    return directory.joinpath(f"hpctrain-{os.getuid()}", *names)


def open_private(directory: Path, *, planted: str, instead: str, make: bool = True) -> int:
    """Open `DIRECTORY/hpctrain-UID`; returns a descriptor.

    `directory` itself is the user's own choice and may be a link.

    Args:
        directory: on the node; made where it is missing.
        planted: what others could plant if they could write there, for the message: "data", "programs".
        instead: what else the user can do, for the message: "choose another staging directory".
        make: make what is missing.

    Raises:
        ConfigError: it belongs to somebody else, is a link or no directory, or others may use it.
        OSError: it cannot be made or opened; `FileNotFoundError` where it is missing and not to be made.
    """
    if make:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    base = os.open(directory, _DIRECTORY & ~os.O_NOFOLLOW)
    try:
        own = private_path(directory)
        return open_private_at(base, own.name, own, planted=planted, instead=instead, make=make)
    finally:
        os.close(base)


def open_private_at(
    parent: int, name: str, shown: Path, *, planted: str, instead: str, make: bool = True
) -> int:
    """Open the private directory `name` in the directory `parent` (a descriptor).

    `shown` is its path, for messages; for the rest see `open_private`. Raises `ValueError` for a name that leads
    elsewhere.
    """
    if "/" in name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is no name of a directory")
    if make:
        with contextlib.suppress(FileExistsError):  # ours from before, or somebody else's: checked below
            os.mkdir(name, 0o700, dir_fd=parent)
    try:
        descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ConfigError(f"{shown} is a link or no directory; remove it, or {instead}") from error
        raise
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(descriptor)
        raise ConfigError(
            f"{shown} belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}; it must belong to uid "
            f"{os.getuid()} with mode 0700, because others could plant {planted} there: remove it, or {instead}"
        )
    return descriptor


def open_private_file(directory: int, name: str, shown: Path, *, make: bool = True) -> int:
    """Open the file `name` in a private directory (a descriptor) for reading and writing.

    Raises `ConfigError` for a link, for what is no file and for another user's; `OSError`.
    """
    try:
        descriptor = os.open(name, _FILE | (os.O_CREAT if make else 0), 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise ConfigError(f"{shown / name} is a link or no file; remove it") from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(descriptor)
        raise ConfigError(f"{shown / name} is no file of uid {os.getuid()}; remove it")
    return descriptor


def by_descriptor(descriptor: int) -> Path:
    """A path that leads through an open descriptor (proc(5)): for code that takes paths, and is not to be led astray.

    It also opens a file anew that has no name any more.
    """
    return Path(f"/proc/self/fd/{descriptor}")
