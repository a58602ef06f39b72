"""One `up` or `down` of a cluster at a time."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator

from hpctrain.errors import ConfigError

_PATIENCE_S = 10.0
_POLL_S = 0.1


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold cluster `name`. Raises `ConfigError` where another process holds it for 10 s.

    The lock is the name of a socket that no file stands for (unix(7), abstract): it ends with its process, however
    that ends, and leaves nothing behind.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    with socket.socket(socket.AF_UNIX) as holder:
        while not _bound(holder, f"\0hpctrain-minicluster-{name}"):
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"another `hpctrain minicluster up` or `down` of {name} is at work: wait for it, or end it"
                )
            time.sleep(_POLL_S)
        yield


def _bound(holder: socket.socket, address: str) -> bool:
    try:
        holder.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True
