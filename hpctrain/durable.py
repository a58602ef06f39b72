"""Writing files that survive a kill or a power cut whole: old content or new, never a part.

The order is that of POSIX: write under another name, fsync the file, rename over the target, fsync the directory.
Without the last step the rename itself may be lost; without the first fsync the name may outlive its content.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Give `path` this content, whole or not at all, durably. Raises `OSError`; nothing is left behind then."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Make the content of a file, or the entries of a directory, durable. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
