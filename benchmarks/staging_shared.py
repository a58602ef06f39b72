"""A shared directory that can be counted and slowed down: a read-only loop device per node, all over one image.

Every node mounts a device of its own, so it has a page cache of its own, as on a parallel filesystem; what it reads
from the shared directory is what the kernel counts for its device, whoever read it and whatever he says; and the
kernel's I/O throttling limits it. Root only.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from benchmarks.reading import forget
from benchmarks.staging_sets import MIB, size_of
from hpctrain.errors import ConfigError

_THROTTLE: Final = Path("/sys/fs/cgroup/blkio/blkio.throttle.read_bps_device")
"""Of the root group of cgroup v1: in v2 the root group has no limits."""
_SECTOR_BYTES: Final = 512
_SECTORS_READ: Final = 2
_SPARE: Final = 1.1
_SPARE_MIB: Final = 16
_TIMEOUT_S: Final = 60.0
_FORGET_S: Final = 0.5


def make_image(folder: Path, image: Path) -> Path:
    """A filesystem with the files of `folder`; returns `image`."""
    mib = int(size_of(folder) * _SPARE) // MIB + _SPARE_MIB
    _run("mkfs.ext4", "-q", "-F", "-m", "0", "-d", str(folder), str(image), f"{mib}M")
    return image


@dataclass(frozen=True)
class View:
    """One device over the image.

    `read_ahead_kib` 0: nothing is read that nobody asked for, so that counts are exact.
    """

    device: str

    @property
    def _folder(self) -> Path:
        return Path("/sys/block") / Path(self.device).name

    @property
    def read_bytes(self) -> int:
        """Bytes read from the device so far."""
        return int((self._folder / "stat").read_text(encoding="ascii").split()[_SECTORS_READ]) * _SECTOR_BYTES

    def read_ahead(self, kib: int) -> None:
        """How much is read ahead of what is asked for; 0: nothing, so that counts are exact."""
        (self._folder / "queue" / "read_ahead_kb").write_text(f"{kib}\n", encoding="ascii")

    @contextlib.contextmanager
    def limited(self, bytes_per_s: int) -> Iterator[None]:
        """The kernel lets no more through meanwhile. Raises `ConfigError` where it has no such limit."""
        number = (self._folder / "dev").read_text(encoding="ascii").strip()
        try:
            _THROTTLE.write_text(f"{number} {bytes_per_s}\n", encoding="ascii")
        except OSError as error:
            raise ConfigError(
                f"reading cannot be slowed down on this machine: {_THROTTLE}: {error.strerror}; it takes cgroup v1 "
                "with the blkio controller"
            ) from error
        try:
            yield
        finally:
            _THROTTLE.write_text(f"{number} 0\n", encoding="ascii")

    def mount_command(self, place: Path) -> list[str]:
        """What mounts it."""
        return ["mount", "-o", "ro,noload", self.device, str(place)]


@contextlib.contextmanager
def views(image: Path, count: int) -> Iterator[list[View]]:
    """So many devices over an image; to be unmounted everywhere before the end."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            device = _run("losetup", "--read-only", "--find", "--show", str(image)).strip()
            stack.callback(_run, "losetup", "--detach", device)
            found.append(View(device))
        yield found


@contextlib.contextmanager
def mounted(view: View, place: Path) -> Iterator[Path]:
    """The view at a place of this machine."""
    place.mkdir()
    _run(*view.mount_command(place))
    try:
        yield place
    finally:
        _run("umount", str(place))


class Forgetting:
    """Has the kernel forget files every half second, so that what is read again is counted again."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._files = [path for folder in folders for path in sorted(folder.glob("*.h5"))]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forgetting")

    def __enter__(self) -> Forgetting:
        self._forget()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_FORGET_S):
            self._forget()

    def _forget(self) -> None:
        for path in self._files:
            forget(path)


def require_root() -> None:
    """Raise `ConfigError` for other users: they can make no devices."""
    if os.geteuid() != 0:
        raise ConfigError("the shared directory is a loop device of its own: that takes root")


def _run(*command: str) -> str:
    """What a program says; raises `ConfigError` where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        raise ConfigError(
            f"`{' '.join(command)}` failed: {said}; the shared directory of this benchmark needs it"
        ) from error
    return done.stdout
