"""How a set is packed, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from hpctrain.errors import UsageError
from hpctrain.h5.filters import CODECS

DEFAULT_CODEC: Final = "blosc-lz4"
_MAX_SHARD_MIB: Final = 1e12  # 2^60 bytes: no file system holds a larger file
_MAX_THREADS: Final = 1024


@dataclass(frozen=True)
class PackOptions:
    """How to pack.

    `chunk_samples` None: the fewest samples whose largest field fills 256 KiB. `shard_mib`: about how many raw
    MiB a shard holds (at least one chunk; by the mean where rows differ in length). `threads` 0: all cores of
    the process. `store`: type of float fields; None: as they come.
    """

    codec: str = DEFAULT_CODEC
    chunk_samples: int | None = None
    shard_mib: float = 256.0
    threads: int = 0
    store: Literal["float16", "float32"] | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise UsageError(f"codec {self.codec!r} is unknown; choose one of: {', '.join(CODECS)}")
        if self.chunk_samples is not None and self.chunk_samples < 1:
            raise UsageError(f"chunk-samples is {self.chunk_samples}, but must be at least 1")
        if not 0 < self.shard_mib <= _MAX_SHARD_MIB:
            raise UsageError(
                f"shard-mib is {self.shard_mib}, but must be above 0 and at most {_MAX_SHARD_MIB:g}"
            )
        if not 0 <= self.threads <= _MAX_THREADS:
            raise UsageError(
                f"threads is {self.threads}, but must be at least 0 (0: all cores) and at most {_MAX_THREADS}"
            )
        if self.store not in (None, "float16", "float32"):
            raise UsageError(f"store is {self.store!r}, but must be float16 or float32")


@dataclass(frozen=True)
class PackReport:
    """What was packed; sizes in bytes, time in seconds."""

    root: Path
    num_samples: int
    num_shards: int
    chunk_samples: int
    raw_bytes: int
    stored_bytes: int
    seconds: float
    identity: str
    warnings: tuple[str, ...] = ()
