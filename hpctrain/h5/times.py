"""Where the time of reading goes, and how many bytes it took."""

from __future__ import annotations

import dataclasses
import threading

_ADDING = threading.Lock()  # of all sums: they are pickled, and a lock cannot be


@dataclasses.dataclass
class ReadTimes:
    """Seconds (summed over threads) and bytes.

    Attributes:
        read_s: in reads of the file system, the check of digests included.
        decode_s: in the filters.
        convert_s: in preprocessing: other types, normalisation, augmentation, pictures, user functions.
        copy_s: gathering decoded rows into batches.
        wait_s: of the one who takes the batches, for the next one.
        index_s: until the chunk index was there.
        read_bytes: stored bytes that were read.
        decoded_bytes: bytes that came out of the filters.
        used_bytes: bytes of the samples that were delivered, in stored types.
        chunks: stored chunks read.
    """

    read_s: float = 0.0
    decode_s: float = 0.0
    convert_s: float = 0.0
    copy_s: float = 0.0
    wait_s: float = 0.0
    index_s: float = 0.0
    read_bytes: int = 0
    decoded_bytes: int = 0
    used_bytes: int = 0
    chunks: int = 0

    def add(self, **amounts: float) -> None:
        """Add to several of the sums; from several threads at once."""
        with _ADDING:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def take(self) -> ReadTimes:
        """What was added since the last call; the sums begin anew."""
        with _ADDING:
            taken = dataclasses.replace(self)
            for field in dataclasses.fields(self):
                setattr(self, field.name, field.default)
        return taken
