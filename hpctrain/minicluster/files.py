"""Files of a mini cluster: made with a mode whatever the umask is, and removed only where nothing is mounted."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from hpctrain.errors import ConfigError


def make_directory(path: Path, mode: int = 0o755) -> None:
    """Make `path` where it is missing, with this mode."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)


def write_public(path: Path, text: str) -> None:
    """Write a file that everybody may read."""
    path.write_text(text)
    path.chmod(0o644)


def remove_tree(path: Path) -> None:
    """Remove a directory with all below it.

    Hosts mount people's directories below theirs. Only they see that, but whoever removed a tree with such a mount
    in sight would remove what is mounted: that is refused by `ConfigError`.
    """
    inside = [mount for mount in _mount_points() if mount == path or path in mount.parents]
    if inside:
        raise ConfigError(f"{path} is not removed, for something is mounted there: umount {inside[0]} first")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _mount_points() -> list[Path]:
    """All that this process sees (field 5 of proc_pid_mountinfo(5), where blanks are written in octal)."""
    fields = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return [Path(field.encode("latin-1", "replace").decode("unicode_escape")) for field in fields]
