"""A pipeline: the filters of one dataset in stored order; decoding runs it backwards.

The filters whose bit is set in a chunk's filter mask are left out: they were skipped when the chunk was written. The
first filter decodes into the chunk's own array, those after it into memory that each thread keeps for that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError
from hpctrain.h5.filters import (
    bitshuffle,
    blosc,
    blosc2,
    deflate,
    fletcher32,
    lz4,
    lzf,
    scale_offset,
    shuffle,
    szip,
    zstd,
)
from hpctrain.h5.filters.base import (
    BITSHUFFLE,
    BLOSC,
    BLOSC2,
    DECODE_ERRORS,
    DEFLATE,
    FLETCHER32,
    LZ4,
    LZF,
    SCALE_OFFSET,
    SCRATCH,
    SHUFFLE,
    SZIP,
    ZSTD,
    Buffer,
    Bytes,
    DecodeInto,
    Encode,
    Filter,
    copy_into,
)
from hpctrain.h5.filters.names import filter_name, who_reads

_DECODERS: Final[dict[int, DecodeInto]] = {
    DEFLATE: deflate.decode_into,
    SHUFFLE: shuffle.decode_into,
    FLETCHER32: fletcher32.decode_into,
    SZIP: szip.decode_into,
    SCALE_OFFSET: scale_offset.decode_into,
    LZF: lzf.decode_into,
    BLOSC: blosc.decode_into,
    LZ4: lz4.decode_into,
    BITSHUFFLE: bitshuffle.decode_into,
    ZSTD: zstd.decode_into,
    BLOSC2: blosc2.decode_into,
}
_ENCODERS: Final[dict[int, Encode]] = {
    DEFLATE: deflate.encode,
    SHUFFLE: shuffle.encode,
    FLETCHER32: fletcher32.encode,
    BLOSC: blosc.encode,
    LZ4: lz4.encode,
    ZSTD: zstd.encode,
}
_REASONS: Final = {
    SHUFFLE: shuffle.why_not,
    SZIP: szip.why_not,
    SCALE_OFFSET: scale_offset.why_not,
    BITSHUFFLE: bitshuffle.why_not,
}


def why_not(filters: tuple[Filter, ...]) -> str | None:
    """Why a pipeline of these filters is not decoded here, in words; None where it is."""
    for item in filters:
        if item.id not in _DECODERS:
            return f"filter {item.id} ({filter_name(item.id)}) is not decoded here; {who_reads(item.id)}"
        reason = _REASONS[item.id](item.cd_values) if item.id in _REASONS else None
        if reason:
            return reason
    return None


@dataclass(frozen=True)
class FilterPipeline:
    """The filters of one dataset in stored order; hashable and picklable.

    `block_bytes` only guides the Blosc encoder (0: the library chooses) and is no part of the format. Raises
    `DataError` for filters that are not decoded here: `why_not` in words.
    """

    filters: tuple[Filter, ...] = ()
    block_bytes: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        reason = why_not(self.filters)
        if reason:
            raise DataError(reason)

    def decode(self, stored: Buffer, filter_mask: int, out: npt.NDArray[Any]) -> None:
        """Decode one stored chunk into `out`, a writable C-contiguous array of the whole chunk.

        Bytes are taken as they are in the file: byte order is the caller's matter. Raises `DataError` when
        the bytes do not decode to exactly `out.nbytes`.
        """
        target = out.reshape(-1).view(np.uint8)
        active = [item for i, item in enumerate(self.filters) if not filter_mask >> i & 1]
        try:
            count = _decode(stored, active, target)
            if count != len(target):
                raise ValueError(f"they are {count} bytes")
        except DECODE_ERRORS as error:
            raise DataError(
                f"{len(stored)} stored bytes do not decode to {len(target)} bytes: {error}"
            ) from error

    def encode(self, raw: npt.NDArray[Any] | Buffer) -> bytes:
        """Encode the raw bytes of one whole chunk; the filter mask of the result is 0.

        Only what is written here is encoded: raises `DataError` for pipelines of other filters.
        """
        data: Buffer = np.frombuffer(raw, np.uint8).data
        for item in self.filters:
            if item.id not in _ENCODERS:
                raise DataError(f"filter {item.id} ({filter_name(item.id)}) is not written here")
            data = _ENCODERS[item.id](data, item.cd_values, self.block_bytes)
        return bytes(data)


def _decode(stored: Buffer, active: list[Filter], target: Bytes) -> int:
    """Run the filters backwards, the first one into `target`; returns the number of bytes."""
    while active and active[-1].id == FLETCHER32:
        stored = fletcher32.checked(stored)
        active = active[:-1]
    if not active:
        return copy_into(stored, target)
    data, framed = stored, None
    for position in range(len(active) - 1, 0, -1):
        most = _most_bytes(active[:position], len(target))
        stage = SCRATCH.bytes(f"stage {position % 2}", shuffle.ROOM_BYTES + most)
        count = _decode_one(active[position], data, framed, stage[shuffle.ROOM_BYTES :])
        framed = stage[: shuffle.ROOM_BYTES + count]
        data = framed[shuffle.ROOM_BYTES :].data
    return _decode_one(active[0], data, framed, target)


def _decode_one(item: Filter, data: Buffer, framed: Bytes | None, out: Bytes) -> int:
    if item.id == SHUFFLE and framed is not None:
        return shuffle.decode_framed(framed, item.cd_values, out)
    return _DECODERS[item.id](data, item.cd_values, out)


def _most_bytes(below: list[Filter], raw_bytes: int) -> int:
    """How many bytes the filters `below` may have made of `raw_bytes`."""
    most = raw_bytes
    for item in below:
        if item.id == FLETCHER32:
            most += fletcher32.SUM_BYTES
        elif item.id != SHUFFLE:
            most += most // 2 + 4096  # whatever they do to bytes that do not compress
    return most
