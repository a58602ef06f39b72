"""Bounds on archives and on what is read whole: what a file claims is not believed beyond them.

An archive is refused, with the entry named, when it has too many entries, holds too much, or has a name that leads out
of it: nothing is ever written under such a name here, but an archive that has one was not made for this.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from hpctrain.errors import DataError

if TYPE_CHECKING:
    from hpctrain.h5.options import SourceOptions

MAX_MEMBER_BYTES: Final = 1 << 30
"""A picture, a text or an array of one sample, which are read whole; a chunk of samples is no larger either."""


class ArchiveCount:
    """Counts the entries of one archive as they are read, against the bounds of `SourceOptions`."""

    def __init__(self, path: Path, how: SourceOptions) -> None:
        self._path, self._how = path, how
        self._max_bytes = int(how.max_archive_gib * (1 << 30))
        self._entries = self._bytes = 0

    def add(self, name: str, num_bytes: int) -> None:
        """One more entry; raises `DataError` for its name, or for one too many or too large with those before."""
        check_name(self._path, name)
        self._entries += 1
        self._bytes += num_bytes
        if self._entries > self._how.max_entries:
            raise DataError(
                f"{self._path}: has more than {self._how.max_entries} entries (first beyond: {name!r}); "
                "allow more with --max-entries, or cut it into shards"
            )
        self.check_bytes(self._bytes, f" with entry {name!r}")

    def check_bytes(self, num_bytes: int, where: str = "") -> None:
        """Raise `DataError` where the archive unpacks to more than the bound."""
        if num_bytes > self._max_bytes:
            raise DataError(
                f"{self._path}: unpacks to more than {self._how.max_archive_gib:g} GiB{where}; allow more with "
                "--max-archive-gib, or cut it into shards"
            )


def check_name(path: Path, name: str) -> None:
    """Raise `DataError` for the name of an entry that is absolute or climbs out of the archive."""
    if name.startswith("/") or ".." in name.split("/"):
        raise DataError(f"{path}: the entry {name!r} points out of the archive; make the archive without it")


def check_member_bytes(where: str, num_bytes: int) -> None:
    """Raise `DataError` for what is too large to be one value of one sample."""
    if num_bytes > MAX_MEMBER_BYTES:
        raise DataError(
            f"{where}: {num_bytes} bytes, but the bound of one value is {MAX_MEMBER_BYTES}; scale it down or remove it"
        )
