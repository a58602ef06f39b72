"""How a set is packed, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from hpctrain.errors import UsageError
from hpctrain.h5.codecs import CODECS
from hpctrain.h5.rounding import MANTISSA_BITS

if TYPE_CHECKING:
    from hpctrain.h5.choose_codec import Choice

DEFAULT_CODEC: Final = "blosc-lz4"
AUTO: Final = "auto"
"""In the place of a codec: try all, and take the best by the rule of `choose_codec`."""
DEFAULT_STORAGE_GB_PER_S: Final = 0.2  # a 200 Gb/s link shared by 128 cores
_MAX_SHARD_MIB: Final = 1e12  # 2^60 bytes: no file system holds a larger file
_MAX_THREADS: Final = 1024


@dataclass(frozen=True)
class PackOptions:
    """How to pack.

    `codec`: one of `CODECS`, or "auto". `chunk_samples` None: the fewest samples whose largest field fills 1 MiB (in a
    small set a 64th of that field, but 64 KiB at least). `shard_mib`: about how many raw MiB a shard holds (at least
    one chunk; by the mean where rows differ in length). `threads` 0: all cores of the process. `store`: type of float
    fields; None: as they come. `keep_bits`: mantissa bits of float fields, after `store`; None: all. `on_nan`
    "refuse": values that are not finite are an error. `storage_gb_per_s`: what the shared filesystem gives one core,
    for "auto".
    """

    codec: str = DEFAULT_CODEC
    chunk_samples: int | None = None
    shard_mib: float = 256.0
    threads: int = 0
    store: Literal["float16", "float32"] | None = None
    overwrite: bool = False
    keep_bits: int | None = None
    on_nan: Literal["keep", "refuse"] = "keep"
    storage_gb_per_s: float = DEFAULT_STORAGE_GB_PER_S

    def __post_init__(self) -> None:
        if self.codec not in (*CODECS, AUTO):
            raise UsageError(f"codec {self.codec!r} is unknown; choose one of: {', '.join((*CODECS, AUTO))}")
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
        most_bits = max(MANTISSA_BITS.values())
        if self.keep_bits is not None and not 1 <= self.keep_bits <= most_bits:
            raise UsageError(
                f"keep-bits is {self.keep_bits}, but must be at least 1 and at most the mantissa's bits "
                "(float16: 10, float32: 23, float64: 52)"
            )
        if self.on_nan not in ("keep", "refuse"):
            raise UsageError(f"on-nan is {self.on_nan!r}, but must be keep or refuse")
        if not 0 < self.storage_gb_per_s < float("inf"):
            raise UsageError(f"storage-gb-per-s is {self.storage_gb_per_s}, but must be above 0 and finite")


@dataclass(frozen=True)
class SourceOptions:
    """How to take what lies at a path.

    For pictures: `size` (pixels) scales them to size x size; `gray` makes one channel; `keep_encoded` keeps the bytes
    of the files (`size` is then what they must have). For HDF5 files: `fields` are `NAME=/path/in/file`, or only the
    path, whose last part is the name then; none: those that fit together.
    """

    size: int | None = None
    gray: bool = False
    keep_encoded: bool = False
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class PackReport:
    """What was packed; sizes in bytes, time in seconds.

    `keep_bits`: names of the fields that were rounded, and to how many mantissa bits. `choice`: with codec "auto".
    """

    root: Path
    num_samples: int
    num_shards: int
    chunk_samples: int
    raw_bytes: int
    stored_bytes: int
    seconds: float
    identity: str
    warnings: tuple[str, ...] = ()
    codec: str = ""
    keep_bits: Mapping[str, int] = field(default_factory=dict)
    choice: Choice | None = None
