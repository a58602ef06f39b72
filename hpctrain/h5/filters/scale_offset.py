"""Scale-offset (6): values as the difference to the smallest one, in as few bits as needed (libhdf5, H5Zscaleoffset).

Client data: scale type (0: decimal scaling of floats, 2: integers), scale factor, number of values, class, bytes,
signedness and byte order (1: big-endian) of a value, whether there is a fill value, and from number 8 on that value,
four bytes a number. Stored: u32 bits of a code, u8 size of the next, the smallest value, all little-endian; zeros up
to byte 21; then the codes, most significant bit first. Codes as wide as the type are the values themselves. Where
there is a fill value, a code of ones stands for it. Integers with a scale factor of all their bits are not encoded.

A float is code / 10^factor + smallest, in the type's own arithmetic: that gives libhdf5's bits where the power of ten
is exact, so other factors are refused. There is no library for it: eight codes fill as many bytes as a code has bits,
so each of the eight lies at fixed places, and NumPy puts all of them together at once, without the GIL.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpctrain.h5.filters.base import Buffer, Bytes, copy_into

_DECIMAL_FLOAT: Final = 0
_INTEGER: Final = 2
_HEADER_BYTES: Final = 21
_MIN_NUMBERS: Final = 8
_FILL_AT: Final = 8
# Factors whose power of ten is exact, by the bytes of a value.
_EXACT_FACTORS: Final = {4: 10, 8: 22}


def why_not(cd_values: tuple[int, ...]) -> str | None:
    """Client data that cannot be decoded with, in words."""
    if len(cd_values) < _MIN_NUMBERS:
        return f"the scale-offset filter comes with {len(cd_values)} of its {_MIN_NUMBERS} numbers"
    scale_type, factor, _, kind, size, _, _, has_fill = cd_values[:_MIN_NUMBERS]
    if has_fill and len(cd_values) < _FILL_AT + -(-size // 4):
        return "the scale-offset filter comes without its fill value"
    if scale_type == _INTEGER and kind == 0 and size in (1, 2, 4, 8):
        return None
    if scale_type == _DECIMAL_FLOAT and kind == 1 and size in _EXACT_FACTORS:
        if factor <= _EXACT_FACTORS[size]:  # negative ones are large here
            return None
        return f"scale-offset of floats by 10^{np.uint32(factor).astype(np.int32)} is left to libhdf5, as it rounds"
    return (
        f"scale-offset of type {scale_type} for values of {size} bytes is not decoded here; libhdf5 reads it"
    )


def decode_into(data: Buffer, cd_values: tuple[int, ...], out: Bytes) -> int:
    """Decode into the beginning of `out`; returns the number of bytes."""
    scale_type, factor, count, _, size, _, order, has_fill = cd_values[:_MIN_NUMBERS]
    if scale_type == _INTEGER and factor == 8 * size:
        return copy_into(data, out)
    if count * size > len(out):
        raise ValueError(f"scale-offset has {count} values of {size} bytes, more than {len(out)} bytes")
    bits, smallest = _header(data, size)
    stored = np.frombuffer(data, np.uint8)[_HEADER_BYTES:]
    if len(stored) < -(-count * bits // 8):
        raise ValueError(f"{len(stored)} bytes are too few for {count} codes of {bits} bits")
    values = out[: count * size]
    if bits == 8 * size:
        values[:] = stored[: count * size]
    else:
        codes = _codes(stored, count, bits, size)
        _scale(codes, smallest, factor if scale_type == _DECIMAL_FLOAT else None, values)
        if has_fill:
            fill = np.array(cd_values[_FILL_AT:], "<u4").view(np.uint8)[:size].view(codes.dtype)
            values.view(codes.dtype)[codes == (1 << bits) - 1] = fill[0]
    if order == 1:
        values.view(f"<u{size}").byteswap(inplace=True)
    return count * size


def _header(data: Buffer, size: int) -> tuple[int, bytes]:
    """Bits of a code, and the bytes of the smallest value."""
    bits, length = struct.unpack_from("<IB", data)
    if bits > 8 * size or length > 8:
        raise ValueError(f"scale-offset codes of {bits} bits are too wide for {size} bytes")
    return bits, bytes(memoryview(data)[5 : 5 + length]).ljust(8, b"\0")[:size]


def _codes(stored: Bytes, count: int, bits: int, size: int) -> npt.NDArray[Any]:
    """The codes, unsigned, shape (count,), in the size of the values."""
    codes = np.zeros(-(-count // 8) * 8, f"<u{size}")
    groups = np.zeros((len(codes) // 8, bits), np.uint8)
    used = stored[: -(-count * bits // 8)]
    groups.reshape(-1)[: len(used)] = used
    for number in range(8):
        target = codes[number::8]
        for column in range(number * bits // 8, -(-(number + 1) * bits // 8)):
            shift = (number + 1) * bits - (column + 1) * 8  # of this byte's lowest bit in the code
            part = groups[:, column].astype(codes.dtype)
            target |= part << shift if shift >= 0 else part >> -shift
        target &= codes.dtype.type((1 << bits) - 1)
    return codes[:count]


def _scale(codes: npt.NDArray[Any], smallest: bytes, factor: int | None, out: Bytes) -> None:
    """`out` becomes codes + smallest; with a factor, the float codes / 10^factor + smallest."""
    if factor is None:
        np.add(codes, np.frombuffer(smallest, codes.dtype)[0], out=out.view(codes.dtype))
        return
    kind = np.dtype(f"<f{codes.dtype.itemsize}")
    values = codes.view(f"<i{kind.itemsize}").astype(kind)
    with np.errstate(all="ignore"):  # infinities and NaNs become what they become in libhdf5
        np.divide(values, kind.type(10**factor), out=values)
        np.add(values, np.frombuffer(smallest, kind)[0], out=out.view(kind))
