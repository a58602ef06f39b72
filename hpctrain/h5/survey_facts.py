"""What a survey of an HDF5 file finds, and how far it goes: plain values that pass between two processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Limits:
    """How far one file may go."""

    max_objects: int = 100_000
    """Groups and datasets that are looked at."""
    max_depth: int = 64
    """Groups within groups."""
    max_bytes: int = 64 << 30
    """Raw bytes of a dataset, beyond which it is refused unless the file is large enough to hold them."""
    memory_bytes: int = 4 << 30
    """Address space the child may add to what Python and its libraries take."""
    object_timeout_s: float = 60.0
    """Seconds one object may take; a million chunks are indexed in less."""
    max_deaths: int = 8
    """Children that may die before the rest of the file is given up."""


@dataclass(frozen=True)
class DatasetSurvey:
    """One dataset, as the file describes it, and how it is read.

    `shape` is None for an empty dataspace; `chunk_shape` is None unless chunked; `filters` are in the order they were
    applied, in words, and `filter_ids` their numbers. `raw_bytes` is shape x item size (for vlen data: of the
    references, the data lie elsewhere). `road` is "parallel", "libhdf5" or "none", and `reason` says why it is
    not "parallel".
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    itemsize: int
    layout: str
    chunk_shape: tuple[int, ...] | None
    filters: tuple[str, ...]
    filter_ids: tuple[int, ...]
    raw_bytes: int
    stored_bytes: int
    road: str
    reason: str

    @property
    def ratio(self) -> float | None:
        """Raw over stored bytes; None where nothing is stored."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else None


@dataclass(frozen=True)
class LinkSurvey:
    """A link that is not followed: soft, external, user-defined, or a further name of an object."""

    name: str
    kind: str
    target: str


@dataclass(frozen=True)
class Finding:
    """An object that is damaged or cannot be read, and the cause."""

    name: str
    cause: str


@dataclass(frozen=True)
class FileSurvey:
    """One file: `refused` says why it could not be opened at all, `cut` why not all of it was looked at."""

    path: Path
    file_bytes: int = 0
    refused: str = ""
    cut: str = ""
    num_groups: int = 0
    datasets: tuple[DatasetSurvey, ...] = ()
    links: tuple[LinkSurvey, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether the file opened and nothing in it is damaged or unreadable."""
        return not (self.refused or self.findings)
