"""How a set is packed, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from hpctrain.errors import UsageError
from hpctrain.h5.codecs import CODECS
from hpctrain.h5.rounding import MANTISSA_BITS

if TYPE_CHECKING:
    from hpctrain.h5.choose_codec import Choice
    from hpctrain.h5.cleaning import CleaningReport

DEFAULT_CODEC: Final = "blosc-lz4"
AUTO: Final = "auto"
"""In the place of a codec: try all, and take the best by the rule of `choose_codec`."""
DEFAULT_STORAGE_GB_PER_S: Final = 0.2  # a 200 Gb/s link shared by 128 cores
_MAX_SHARD_MIB: Final = 1e12  # 2^60 bytes: no file system holds a larger file
_MAX_THREADS: Final = 1024
KINDS: Final = ("undecodable", "nonfinite", "duplicates", "empty_text", "labels")
"""What can be wrong with a sample: see `PackOptions.clean`."""
ACTIONS: Final = ("drop", "keep", "fatal")

Opening = Callable[[str, int, int, str], None]
"""Called while a source is opened: with what is done, how much of it is done, how much there is, and what was found."""


@dataclass(frozen=True)
class PackOptions:
    """How to pack.

    `codec`: one of `CODECS`, or "auto". `chunk_samples` None: the fewest samples whose largest field fills 1 MiB (in a
    small set a 64th of that field, but 64 KiB at least). `shard_mib`: about how many raw MiB a shard holds (at least
    one chunk; by the mean where rows differ in length). `threads` 0: all cores of the process. `store`: type of float
    fields; None: as they come. `keep_bits`: mantissa bits of float fields, after `store`; None: all.
    `storage_gb_per_s`: what the shared filesystem gives one core, for "auto".

    `clean`: kinds of bad samples to look for, and what to do with them: "drop", "keep" (only count) or "fatal" (an
    error). "undecodable": cannot be read (looked for in any case, and fatal); "nonfinite": NaN or infinite values in a
    float field; "duplicates": equal in all fields to a sample before; "empty_text": a text field is empty or white
    space; "labels": the field `label` is negative, or not below `num_classes` (None: the number of classes, where the
    source names them). Of what is not mentioned nothing is looked for, and all is kept.
    """

    codec: str = DEFAULT_CODEC
    chunk_samples: int | None = None
    shard_mib: float = 256.0
    threads: int = 0
    store: Literal["float16", "float32"] | None = None
    overwrite: bool = False
    keep_bits: int | None = None
    storage_gb_per_s: float = DEFAULT_STORAGE_GB_PER_S
    clean: Mapping[str, str] = field(default_factory=dict)
    num_classes: int | None = None

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
        if not 0 < self.storage_gb_per_s < float("inf"):
            raise UsageError(f"storage-gb-per-s is {self.storage_gb_per_s}, but must be above 0 and finite")
        _check_clean(self.clean)
        if self.num_classes is not None and self.num_classes < 1:
            raise UsageError(f"num-classes is {self.num_classes}, but must be at least 1")
        if self.num_classes is not None and "labels" not in self.clean:
            raise UsageError("num-classes is for --clean labels=ACTION; give that, too")


def _check_clean(clean: Mapping[str, str]) -> None:
    for kind, action in clean.items():
        if kind not in KINDS:
            raise UsageError(f"clean: {kind!r} is unknown; choose one of: {', '.join(KINDS)}")
        if action not in ACTIONS:
            raise UsageError(f"clean: {kind}={action!r}, but must be one of: {', '.join(ACTIONS)}")
    if clean.get("undecodable") == "keep":
        raise UsageError("clean: what is undecodable cannot be kept; choose drop or fatal")


def parse_clean(texts: Sequence[str]) -> dict[str, str]:
    """`KIND=ACTION` as `PackOptions.clean` has it; raises `UsageError` for anything else, or a kind given twice."""
    clean: dict[str, str] = {}
    for text in texts:
        kind, equals, action = text.partition("=")
        if not equals or kind in clean:
            why = "is given twice" if equals else "is not KIND=ACTION"
            raise UsageError(f"clean: {text!r} {why}; write for example --clean nonfinite=drop")
        clean[kind] = action
    _check_clean(clean)
    return clean


def _nobody(activity: str, done: int, total: int, found: str) -> None:
    pass


@dataclass(frozen=True)
class SourceOptions:
    """How to take what lies at a path.

    For pictures: `size` (pixels) scales them to size x size; `gray` makes one channel; `keep_encoded` keeps the bytes
    of the files (`size` is then what they must have). For HDF5 files: `fields` are `NAME=/path/in/file`, or only the
    path, whose last part is the name then; none: those that fit together.

    Bounds on what is believed: `max_pixels` of one picture; `max_entries` of one archive, and `max_archive_gib` that
    its entries may hold together once unpacked. What goes beyond is refused with `DataError`.

    `opening` is told how far the source is opened, which takes a while for millions of files.
    """

    size: int | None = None
    gray: bool = False
    keep_encoded: bool = False
    fields: tuple[str, ...] = ()
    max_pixels: int = 89_478_485  # what Pillow warns from: 256 MiB of RGB
    max_entries: int = 2_000_000
    max_archive_gib: float = 1024.0
    opening: Opening = field(default=_nobody, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("max_pixels", "max_entries", "max_archive_gib"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise UsageError(f"{name.replace('_', '-')} is {value}, but must be above 0 and finite")


@dataclass(frozen=True)
class PackReport:
    """What was packed; sizes in bytes, time in seconds.

    `keep_bits`: names of the fields that were rounded, and to how many mantissa bits. `choice`: with codec "auto".
    `cleaning`: what was found, where anything was looked for.
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
    cleaning: CleaningReport | None = None
