"""Chunk filters: encode and decode HDF5 chunk bytes outside libhdf5, in threads.

A pipeline is the list of filters of one dataset in stored order; decoding runs it backwards and leaves out
the filters whose bit is set in the chunk's filter mask. The byte formats are those of the registered filters:

* shuffle (2) and deflate (1): the HDF5 file format specification;
* Blosc (32001): a c-blosc 1 frame, its sizes in a 16-byte little-endian header;
* LZ4 (32004): u64 raw bytes, u32 block bytes, then per block u32 stored bytes and the data, all big-endian; a
  block whose stored size is its raw size was not compressed;
* Zstandard (32015): plain frames.

The work is done by libraries that release the GIL (isal, zlib, numcodecs) and by NumPy copies, which release
it too.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numcodecs.blosc
import numcodecs.lz4
import numcodecs.zstd
import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from hpctrain.errors import DataError, UsageError

Buffer = bytes | bytearray | memoryview
Bytes = npt.NDArray[np.uint8]

DEFLATE: Final = 1
SHUFFLE: Final = 2
BLOSC: Final = 32001
LZ4: Final = 32004
ZSTD: Final = 32015

CODECS: Final = ("none", "gzip", "blosc-lz4", "blosc-zstd", "lz4", "zstd")
"""Codecs that `pipeline_for` knows."""

_DEFLATE_LEVEL: Final = 4
_BLOSC_LEVEL: Final = 5
_ZSTD_LEVEL: Final = 3
# Codec numbers of the c-blosc 1 format, as the Blosc filter keeps them in cd_values[6].
_BLOSC_CODECS: Final = {0: b"blosclz", 1: b"lz4", 2: b"lz4hc", 4: b"zlib", 5: b"zstd"}
_BLOSC_HEADER_BYTES: Final = 16
_BLOSC_BLOCK_BYTES: Final = 64 << 10
_LZ4_BLOCK_BYTES: Final = 1 << 30
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
# What the libraries raise for bytes they cannot decode.
_DECODE_ERRORS: Final[tuple[type[Exception], ...]] = (
    RuntimeError,
    ValueError,
    TypeError,
    struct.error,
    cast("type[Exception]", isal_zlib.IsalError),
)


@dataclass(frozen=True)
class Filter:
    """One HDF5 filter: its registered number and its client data (`cd_values`)."""

    id: int
    cd_values: tuple[int, ...] = ()


@dataclass(frozen=True)
class FilterPipeline:
    """The filters of one dataset in stored order; hashable and picklable.

    `block_bytes` only guides the Blosc encoder (0: the library chooses) and is no part of the format.
    """

    filters: tuple[Filter, ...] = ()
    block_bytes: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        unknown = [item.id for item in self.filters if item.id not in _DECODERS]
        if unknown:
            raise DataError(
                f"HDF5 filter {unknown[0]} is not among those decoded here ({sorted(_DECODERS)}); "
                "read the file with h5py and pack it again"
            )
        if any(item.id == SHUFFLE and not item.cd_values for item in self.filters):
            raise DataError("the shuffle filter comes without its item size; pack the source again")

    def decode(self, stored: Buffer, filter_mask: int, out: npt.NDArray[Any]) -> None:
        """Decode one stored chunk into `out`, a writable C-contiguous array of the whole chunk.

        Bytes are taken as they are in the file: byte order is the caller's matter. Raises `DataError` when
        the bytes do not decode to exactly `out.nbytes`.
        """
        target = out.reshape(-1).view(np.uint8)
        active = [item for i, item in enumerate(self.filters) if not filter_mask >> i & 1]
        data: Buffer = stored
        try:
            for position in range(len(active) - 1, 0, -1):
                data = _DECODERS[active[position].id](data, active[position].cd_values, len(target))
            if active:
                _DECODERS_INTO[active[0].id](data, active[0].cd_values, target)
            else:
                _copy_exactly(data, target)
        except _DECODE_ERRORS as error:
            raise DataError(
                f"{len(stored)} stored bytes do not decode to {len(target)} bytes: {error}"
            ) from error

    def encode(self, raw: npt.NDArray[Any] | Buffer) -> bytes:
        """Encode the raw bytes of one whole chunk; the filter mask of the result is 0."""
        data: Buffer = np.frombuffer(raw, np.uint8).data
        for item in self.filters:
            data = _ENCODERS[item.id](data, item.cd_values, self.block_bytes)
        return bytes(data)


def pipeline_for(codec: str, dtype: npt.DTypeLike, chunk_bytes: int, sample_bytes: int = 0) -> FilterPipeline:
    """The pipeline of a codec, for chunks of `chunk_bytes` raw bytes of `dtype`.

    With `sample_bytes`, Blosc blocks hold whole samples, so that single samples could be decoded on their
    own. Raises `UsageError` for an unknown codec.
    """
    itemsize = np.dtype(dtype).itemsize
    shuffle = (Filter(SHUFFLE, (itemsize,)),) if itemsize > 1 else ()
    if codec == "none":
        return FilterPipeline()
    if codec == "gzip":
        return FilterPipeline((*shuffle, Filter(DEFLATE, (_DEFLATE_LEVEL,))))
    if codec == "lz4":
        return FilterPipeline((Filter(LZ4, (min(chunk_bytes, _LZ4_BLOCK_BYTES),)),))
    if codec == "zstd":
        return FilterPipeline((Filter(ZSTD, (_ZSTD_LEVEL,)),))
    if codec in ("blosc-lz4", "blosc-zstd"):
        number = 1 if codec == "blosc-lz4" else 5
        cd_values = (2, 2, itemsize if itemsize < 256 else 1, chunk_bytes, _BLOSC_LEVEL, 1, number)
        return FilterPipeline((Filter(BLOSC, cd_values),), _blosc_block(number, itemsize, sample_bytes))
    raise UsageError(f"codec {codec!r} is unknown; choose one of: {', '.join(CODECS)}")


def _blosc_block(number: int, itemsize: int, sample_bytes: int) -> int:
    """Block size to ask c-blosc for, so that blocks hold whole samples; 0 where that would make poor blocks.

    c-blosc splits the blocks of LZ4 by byte plane: it multiplies the size asked for by the item size, and makes none
    smaller than 64 KiB.
    """
    if not 0 < sample_bytes <= 4 * _BLOSC_BLOCK_BYTES:
        return 0
    block = sample_bytes * -(-_BLOSC_BLOCK_BYTES // sample_bytes)
    return block // itemsize if number == 1 else block


# Decoders. The first kind returns the decoded bytes (for filters below others in the pipeline), the second fills `out`.


def _copy_exactly(data: Buffer, out: Bytes) -> None:
    if len(data) != len(out):
        raise ValueError(f"{len(data)} bytes where {len(out)} were expected")
    out[:] = np.frombuffer(data, np.uint8)


def _unshuffle_into(data: Buffer, cd_values: tuple[int, ...], out: Bytes) -> None:
    size = cd_values[0]
    planes = np.frombuffer(data, np.uint8)
    count = len(out) // size if size > 0 else 0
    if len(planes) != len(out) or size <= 1 or count <= 1:
        return _copy_exactly(data, out)
    items = out[: count * size].reshape(count, size)
    # Plane by plane: one transposed copy took 4.6 times as long.
    for byte in range(size):
        items[:, byte] = planes[byte * count : (byte + 1) * count]
    out[count * size :] = planes[count * size :]  # the leftover bytes are stored as they are
    return None


def _inflate(data: Buffer, cd_values: tuple[int, ...], expected_bytes: int) -> bytes:
    stream = isal_zlib.decompressobj(zlib.MAX_WBITS)
    raw: bytes = stream.decompress(data, expected_bytes + 1)  # a longer stream does not come to its end then
    if not stream.eof:
        raise ValueError(f"after {len(raw)} bytes the deflate stream is not at its end")
    if stream.unused_data:
        raise ValueError(f"{len(stream.unused_data)} bytes follow the deflate stream")
    return raw


def _blosc_into(data: Buffer, cd_values: tuple[int, ...], out: Bytes) -> None:
    header = memoryview(data)[:_BLOSC_HEADER_BYTES]
    raw_bytes, _, frame_bytes = struct.unpack_from("<III", header, 4)
    if raw_bytes != len(out) or frame_bytes != len(data):
        raise ValueError(f"the Blosc header says {frame_bytes} stored and {raw_bytes} raw bytes")
    numcodecs.blosc.use_threads = False  # ranks share the node: the library's own pool would oversubscribe it
    numcodecs.blosc.decompress(data, out)


def _lz4_into(data: Buffer, cd_values: tuple[int, ...], out: Bytes) -> None:
    view = memoryview(data)
    raw_bytes, block_bytes = struct.unpack_from(">QI", view)
    if raw_bytes != len(out) or block_bytes == 0:
        raise ValueError(f"the LZ4 header says {raw_bytes} raw bytes in blocks of {block_bytes}")
    position = 12
    for start in range(0, raw_bytes, block_bytes):
        block = out[start : start + block_bytes]
        (length,) = struct.unpack_from(">I", view, position)
        part = view[position + 4 : position + 4 + length]
        position += 4 + length
        if len(part) != length:
            raise ValueError(f"an LZ4 block of {length} bytes runs past the end")
        if length == len(block):
            block[:] = np.frombuffer(part, np.uint8)
        else:
            numcodecs.lz4.decompress(struct.pack("<I", len(block)) + part, block)
    if position != len(view):
        raise ValueError(f"{len(view) - position} bytes follow the last LZ4 block")


def _zstd_into(data: Buffer, cd_values: tuple[int, ...], out: Bytes) -> None:
    numcodecs.zstd.decompress(data, out)  # fails where the frames hold, or claim to hold, more than fits
    # Several frames: the library does not tell how much of `out` it filled.
    if _zstd_content_bytes(data) != len(out):
        _copy_exactly(numcodecs.zstd.decompress(data), out)


def _zstd_content_bytes(data: Buffer) -> int | None:
    """Raw size that a Zstandard frame header states (RFC 8878, section 3.1.1.1); None where it states none."""
    head = bytes(memoryview(data)[:18])
    if head[:4] != _ZSTD_MAGIC or len(head) < 6:
        return None
    single_segment = head[4] >> 5 & 1
    start = 5 + (not single_segment) + (0, 1, 2, 4)[head[4] & 3]
    size = (single_segment, 2, 4, 8)[head[4] >> 6]
    if size == 0 or len(head) < start + size:
        return None
    return int.from_bytes(head[start : start + size], "little") + (256 if size == 2 else 0)


def _returning(into: Callable[[Buffer, tuple[int, ...], Bytes], None]) -> _Decoder:
    def decode(data: Buffer, cd_values: tuple[int, ...], expected_bytes: int) -> Buffer:
        out = np.empty(expected_bytes, np.uint8)
        into(data, cd_values, out)
        return out.data

    return decode


def _inflate_into(data: Buffer, cd_values: tuple[int, ...], out: Bytes) -> None:
    _copy_exactly(_inflate(data, cd_values, len(out)), out)


_Decoder = Callable[[Buffer, tuple[int, ...], int], Buffer]
_DECODERS_INTO: Final[dict[int, Callable[[Buffer, tuple[int, ...], Bytes], None]]] = {
    DEFLATE: _inflate_into,
    SHUFFLE: _unshuffle_into,
    BLOSC: _blosc_into,
    LZ4: _lz4_into,
    ZSTD: _zstd_into,
}
_DECODERS: Final[dict[int, _Decoder]] = {
    DEFLATE: _inflate,
    SHUFFLE: _returning(_unshuffle_into),
    BLOSC: _returning(_blosc_into),
    LZ4: _returning(_lz4_into),
    ZSTD: _returning(_zstd_into),
}


# Encoders.


def _shuffle(data: Buffer, cd_values: tuple[int, ...], block_bytes: int) -> Buffer:
    size = cd_values[0]
    items = np.frombuffer(data, np.uint8)
    count = len(data) // size if size > 0 else 0
    if size <= 1 or count <= 1:
        return data
    planes = np.empty_like(items)
    planes[: count * size].reshape(size, count)[:] = items[: count * size].reshape(count, size).T
    planes[count * size :] = items[count * size :]
    return planes.data


def _deflate(data: Buffer, cd_values: tuple[int, ...], block_bytes: int) -> bytes:
    return zlib.compress(data, cd_values[0])


def _blosc(data: Buffer, cd_values: tuple[int, ...], block_bytes: int) -> bytes:
    numcodecs.blosc.use_threads = False
    name = _BLOSC_CODECS[cd_values[6]]
    frame = numcodecs.blosc.compress(data, name, cd_values[4], cd_values[5], block_bytes, cd_values[2])
    return cast(bytes, frame)


def _lz4(data: Buffer, cd_values: tuple[int, ...], block_bytes: int) -> bytes:
    view = memoryview(data)
    block = min(cd_values[0] or _LZ4_BLOCK_BYTES, max(len(view), 1))
    parts = [struct.pack(">QI", len(view), block)]
    for start in range(0, len(view), block):
        raw = view[start : start + block]
        packed: bytes = numcodecs.lz4.compress(raw)[4:]  # without numcodecs' own length
        stored = packed if len(packed) < len(raw) else bytes(raw)
        parts += [struct.pack(">I", len(stored)), stored]
    return b"".join(parts)


def _zstd(data: Buffer, cd_values: tuple[int, ...], block_bytes: int) -> bytes:
    return cast(bytes, numcodecs.zstd.compress(data, cd_values[0]))


_ENCODERS: Final[dict[int, Callable[[Buffer, tuple[int, ...], int], Buffer]]] = {
    DEFLATE: _deflate,
    SHUFFLE: _shuffle,
    BLOSC: _blosc,
    LZ4: _lz4,
    ZSTD: _zstd,
}
