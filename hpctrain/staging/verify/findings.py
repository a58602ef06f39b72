"""What a verification finds: plain values, to be shown, sent, or acted on by a repair."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from hpctrain.h5.index import ChunkIndex

Kind = Literal["damaged", "unreadable", "missing", "structure"]
"""The bytes are wrong; the disk does not give them; a file is not there; a file, dataset or manifest is not what it
should be."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        path: the file.
        kind: what sort of thing (`Kind`).
        cause: in words, without the file and the place.
        dataset: its name in the file; "" where the whole file is meant.
        chunk: its number in the dataset, in row-major order; None where no single chunk is meant.
        samples: the first one affected and the one behind the last, counted over the whole set; None: not known.
        offset: byte of the chunk in the file; None where no single chunk is meant.
        stored_bytes: of the chunk.
    """

    path: Path
    kind: Kind
    cause: str
    dataset: str = ""
    chunk: int | None = None
    samples: tuple[int, int] | None = None
    offset: int | None = None
    stored_bytes: int | None = None

    def __str__(self) -> str:
        """One line."""
        place = f", dataset {self.dataset!r}" if self.dataset else ""
        if self.chunk is not None:
            place += f", chunk {self.chunk} (byte {self.offset}, {self.stored_bytes} bytes)"
        if self.samples is not None:
            place += f", samples {self.samples[0]} to {self.samples[1] - 1}"
        return f"{self.path}{place}: {self.kind}: {self.cause}"


@dataclass
class VerifyReport:
    """What was checked, and what is wrong.

    Attributes:
        root: the packed set, folder or file that was named.
        findings: everything that is wrong, file by file.
        num_files: files looked at.
        num_chunks: chunks read.
        num_bytes: stored bytes of them.
        unvouched_chunks: of these, how many have no digest and no Fletcher32 sum: they were only decoded.
        decoded: whether all chunks were decoded too.
        seconds: it took.
        notes: what else is worth saying.
    """

    root: Path
    decoded: bool
    findings: list[Finding] = field(default_factory=list)
    num_files: int = 0
    num_chunks: int = 0
    num_bytes: int = 0
    unvouched_chunks: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    @property
    def only_unreadable(self) -> bool:
        """Whether all that is wrong is that the disk does not give some bytes."""
        return bool(self.findings) and all(item.kind == "unreadable" for item in self.findings)


@dataclass(frozen=True)
class Part:
    """One dataset to be checked, and which samples its chunks hold.

    `holds` "rows": its rows are samples; "values": those of a ragged field; "offsets": where the rows of one begin.
    `offsets`, int64 of shape (num_samples + 1,), are those of the ragged field; None where they are not known, and the
    samples of "values" neither. `first_sample` and `num_samples`: those of the file.
    """

    index: ChunkIndex
    holds: Literal["rows", "values", "offsets"]
    first_sample: int
    num_samples: int
    offsets: npt.NDArray[np.int64] | None = None

    def samples(self, chunk: int) -> tuple[int, int] | None:
        """The first sample that a chunk holds a part of, and the one behind the last; None: not known, or none."""
        rows = self.index.region(chunk)[0]
        first, stop = rows.start, rows.stop
        if self.holds == "values":
            if self.offsets is None:
                return None
            # Rows of no values at the edges are not counted: nothing of them is in the chunk.
            first = int(np.searchsorted(self.offsets, first, side="right")) - 1
            stop = int(np.searchsorted(self.offsets, stop, side="left"))
        elif self.holds == "offsets":  # sample i lies between offsets i and i + 1
            first = max(first - 1, 0)
        stop = min(stop, self.num_samples)
        return (self.first_sample + first, self.first_sample + stop) if first < stop else None

    def finding(self, chunk: int, kind: Kind, cause: str) -> Finding:
        """What is wrong with one chunk."""
        index = self.index
        return Finding(
            index.path,
            kind,
            cause,
            index.dataset,
            chunk,
            self.samples(chunk),
            int(index.offsets[chunk]),
            int(index.sizes[chunk]),
        )
