"""Types, filters and layouts of HDF5 in words, from what h5py's low level shows: its high level refuses some types."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import h5py
from h5py import h5t

from hpctrain.h5.filters import (
    BITSHUFFLE,
    BLOSC,
    BLOSC2,
    DEFLATE,
    LZ4,
    SHUFFLE,
    SZIP,
    ZSTD,
    filter_name,
)

_LAYOUTS: Final = {
    h5py.h5d.COMPACT: "compact",
    h5py.h5d.CONTIGUOUS: "contiguous",
    h5py.h5d.CHUNKED: "chunked",
    h5py.h5d.VIRTUAL: "virtual",
}
_BLOSC_CODECS: Final = ("BloscLZ", "LZ4", "LZ4HC", "Snappy", "zlib", "Zstd")
_BLOSC_SHUFFLES: Final = ("no shuffle", "byte shuffle", "bit shuffle")
_BITSHUFFLE_CODECS: Final = {2: "LZ4", 3: "Zstd"}
_MAX_MEMBERS: Final = 3
_MAX_DEPTH: Final = 8


def layout_of(plist: h5py.h5p.PropDCID) -> str:
    """contiguous, chunked, compact, virtual or external."""
    if plist.get_external_count():
        return "external"
    return _LAYOUTS.get(plist.get_layout(), "unknown")


def filters_of(plist: h5py.h5p.PropDCID) -> list[tuple[int, str]]:
    """Number and words of each filter, in the order they were applied."""
    found = [plist.get_filter(position) for position in range(plist.get_nfilters())]
    return [
        (int(item[0]), filter_words(int(item[0]), tuple(int(value) for value in item[2]))) for item in found
    ]


def filter_words(number: int, cd_values: tuple[int, ...]) -> str:
    """A filter by name, with those of its settings that decide speed and size."""
    name = filter_name(number)
    if name in ("private", "unregistered"):
        name = f"{name} filter {number}"
    settings = _settings(number, cd_values)
    return f"{name} ({settings})" if settings else name


def _settings(number: int, cd: tuple[int, ...]) -> str:
    def at(position: int, words: Callable[[int], str] = str) -> str:
        return words(cd[position]) if position < len(cd) else "?"

    if number in (DEFLATE, ZSTD):
        return f"level {at(0)}" if cd else ""
    if number == SHUFFLE:
        return f"{at(0)} bytes" if cd else ""
    if number == SZIP:
        return f"{at(1)} pixels a block"
    if number == LZ4:
        return f"blocks of {at(0)} bytes" if cd and cd[0] else ""
    if number == BITSHUFFLE:
        return _BITSHUFFLE_CODECS.get(cd[4] if len(cd) > 4 else 0, "no codec")
    if number == BLOSC:
        codec = at(6, lambda value: _named(_BLOSC_CODECS, value))
        return f"{codec}, level {at(4)}, {at(5, lambda value: _named(_BLOSC_SHUFFLES, value))}"
    if number == BLOSC2:
        return f"level {at(4)}"
    return ""


def _named(names: tuple[str, ...], value: int) -> str:
    return names[value] if value < len(names) else f"number {value}"


def dtype_words(kind: h5t.TypeID, depth: int = 0) -> str:
    """A type in words: `float32`, `int16 big-endian`, `vlen string`, `compound of 8 bytes {r: float32, 3 more}`."""
    if depth > _MAX_DEPTH:
        return "..."
    words = _WORDS.get(kind.get_class())
    return words(kind, depth) if words else f"type class {kind.get_class()}"


def _number(kind: h5t.TypeID, depth: int) -> str:
    del depth
    bits = 8 * kind.get_size()
    if kind.get_class() == h5t.FLOAT:
        name = f"float{bits}"
    else:
        name = f"int{bits}" if kind.get_sign() == h5t.SGN_2 else f"uint{bits}"
    odd = f", {kind.get_precision()} of its bits used" if kind.get_precision() != bits else ""
    big = " big-endian" if bits > 8 and kind.get_order() == h5t.ORDER_BE else ""
    return name + big + odd


def _bitfield(kind: h5t.TypeID, depth: int) -> str:
    del depth
    return f"bitfield{8 * kind.get_size()}"


def _string(kind: h5t.TypeID, depth: int) -> str:
    del depth
    return "vlen string" if kind.is_variable_str() else f"string of {kind.get_size()} bytes"


def _compound(kind: h5t.TypeID, depth: int) -> str:
    count = kind.get_nmembers()
    shown = [
        f"{os.fsdecode(kind.get_member_name(number))}: {dtype_words(kind.get_member_type(number), depth + 1)}"
        for number in range(min(count, _MAX_MEMBERS))
    ]
    more = [f"{count - _MAX_MEMBERS} more"] if count > _MAX_MEMBERS else []
    return f"compound of {kind.get_size()} bytes {{{', '.join(shown + more)}}}"


def _enum(kind: h5t.TypeID, depth: int) -> str:
    names = [kind.get_member_name(number) for number in range(kind.get_nmembers())]
    if sorted(names) == [b"FALSE", b"TRUE"] and kind.get_size() == 1:
        return "bool"
    return f"enum {dtype_words(kind.get_super(), depth + 1)} of {len(names)} names"


def _array(kind: h5t.TypeID, depth: int) -> str:
    return f"{tuple(kind.get_array_dims())} of {dtype_words(kind.get_super(), depth + 1)}"


def _vlen(kind: h5t.TypeID, depth: int) -> str:
    return f"vlen {dtype_words(kind.get_super(), depth + 1)}"


def _reference(kind: h5t.TypeID, depth: int) -> str:
    del depth
    return "object reference" if kind.equal(h5t.STD_REF_OBJ) else "region reference"


def _opaque(kind: h5t.TypeID, depth: int) -> str:
    del depth
    tag = os.fsdecode(kind.get_tag())
    return f"opaque of {kind.get_size()} bytes" + (f" ({tag})" if tag else "")


def _time(kind: h5t.TypeID, depth: int) -> str:
    del depth
    return f"time of {kind.get_size()} bytes (H5T_TIME)"


_WORDS: Final[dict[int, Callable[[h5t.TypeID, int], str]]] = {
    h5t.INTEGER: _number,
    h5t.FLOAT: _number,
    h5t.BITFIELD: _bitfield,
    h5t.STRING: _string,
    h5t.COMPOUND: _compound,
    h5t.ENUM: _enum,
    h5t.ARRAY: _array,
    h5t.VLEN: _vlen,
    h5t.REFERENCE: _reference,
    h5t.OPAQUE: _opaque,
    h5t.TIME: _time,
}
