"""Where built wheels are kept: one folder per key, whole or absent, and one builder per key at a time.

    ${XDG_CACHE_HOME:-~/.cache}/hpctrain/horovod/KEY/{horovod-*.whl, build.json, build.log}
                                                 KEY.lock    held while building
                                                 KEY.log     of a build that runs or failed

The wheel holds a RUNPATH to the MPI and torch of the environment it was built in, perhaps long gone. That is
harmless: the ranks import mpi4py.MPI and torch first, and the loader takes a library of the same soname that
is already loaded.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hpctrain.errors import BuildError, StorageError

LOCK_POLL_S = 0.5
# Longer than any build: whoever waits longer sits behind something that is broken.
LOCK_TIMEOUT_S = 3600.0


def cache_root(env: Mapping[str, str]) -> Path:
    """The folder of all builds of this user."""
    base = env.get("XDG_CACHE_HOME")
    # The XDG rule: a relative path is to be ignored.
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "hpctrain" / "horovod"


def find_wheel(root: Path, key: str) -> Path | None:
    """The wheel kept under a key, if it is there and as it was built; a damaged entry counts as absent."""
    entry = root / key
    try:
        record = json.loads((entry / "build.json").read_text(encoding="utf-8"))
        wheel = entry / str(record["wheel"])
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return wheel if digest == record.get("sha256") else None


def publish(root: Path, key: str, wheel: Path, log: Path, details: Mapping[str, object]) -> Path:
    """Keep a wheel and its log under a key, by one rename; an entry that is there already gives way.

    Call it with the lock held. Raises `StorageError` when the cache cannot hold it.
    """
    temporary = Path(tempfile.mkdtemp(prefix=f".{key}.partial-", dir=root))
    try:
        shutil.copy(wheel, temporary / wheel.name)
        shutil.copy(log, temporary / "build.log")
        with (temporary / wheel.name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        record = {"wheel": wheel.name, "sha256": digest, "built_unix_s": round(time.time()), **details}
        (temporary / "build.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        temporary.chmod(0o755)
        shutil.rmtree(root / key, ignore_errors=True)
        os.replace(temporary, root / key)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(
            error.errno or errno.EIO,
            f"cannot keep the wheel in {root}: {error.strerror}; make room there, or point XDG_CACHE_HOME "
            f"elsewhere",
        ) from error
    log.unlink(missing_ok=True)
    return root / key / wheel.name


def scratch_prefix(root: Path, key: str) -> str:
    """How the names of the folders begin, in TMPDIR, in which a key of this cache is built.

    The cache is part of it because its lock does not keep off the builds of another cache in the same TMPDIR.
    """
    return f"hpctrain-horovod-{key}-{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:8]}-"


def sweep(root: Path, key: str) -> None:
    """Remove what killed builds of this key left, here and in TMPDIR. Call it with the lock held."""
    scratch = Path(tempfile.gettempdir()).glob(f"{scratch_prefix(root, key)}*")
    for leftover in (*root.glob(f".{key}.partial-*"), *scratch):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def build_lock(
    root: Path, key: str, waiting: Callable[[float], None], timeout_s: float = LOCK_TIMEOUT_S
) -> Iterator[int]:
    """Hold the lock of one key; `waiting(seconds)` is called while another process holds it.

    A kernel lock: it ends with its holder, however that ends, so there is nothing to clean up after a kill. It gives
    its descriptor: a process that inherits that holds the lock as well. Raises `BuildError` after `timeout_s`.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{key}.lock").open("a") as file:
        start_s = time.monotonic()
        while not _try_lock(file.fileno(), root):
            waited_s = time.monotonic() - start_s
            if waited_s > timeout_s:
                raise BuildError(
                    f"{file.name} has been held by another build for {waited_s:.0f} s (limit "
                    f"{timeout_s:.0f} s); "
                    f"see who: `fuser {file.name}`, end it and run again"
                )
            waiting(waited_s)
            time.sleep(LOCK_POLL_S)
        yield file.fileno()


def _try_lock(descriptor: int, root: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a filesystem without locks (ENOLCK, ENOTSUP)
        raise BuildError(
            f"{root}: this filesystem keeps no locks ({error.strerror}); point XDG_CACHE_HOME at one that "
            f"does"
        ) from error
    return True
