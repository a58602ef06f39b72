"""Whether the bytes of a dataset are, as they lie in the file, those of a NumPy type.

libhdf5 converts what it reads to the type that h5py asks for. Outside it the bytes are taken as they are, so the two
types must agree in size, byte order, offsets and meaning: what does not is left to libhdf5, with the reason.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from h5py import h5t

_FLOATS: Final = {
    "<f2": h5t.IEEE_F16LE,
    ">f2": h5t.IEEE_F16BE,
    "<f4": h5t.IEEE_F32LE,
    ">f4": h5t.IEEE_F32BE,
    "<f8": h5t.IEEE_F64LE,
    ">f8": h5t.IEEE_F64BE,
}
_BIT_FIELDS: Final = {
    "|u1": h5t.STD_B8LE,
    "<u2": h5t.STD_B16LE,
    ">u2": h5t.STD_B16BE,
    "<u4": h5t.STD_B32LE,
    ">u4": h5t.STD_B32BE,
    "<u8": h5t.STD_B64LE,
    ">u8": h5t.STD_B64BE,
}
_COMPLEX: Final[int] = getattr(h5t, "COMPLEX", -1)  # the class came with HDF5 2.0
_REASONS: Final = {
    h5t.VLEN: "variable-length values lie in heaps of the file",
    h5t.REFERENCE: "references mean something to libhdf5 only",
    h5t.TIME: "H5T_TIME has no NumPy type",
}


def why_inexact(kind: h5t.TypeID, dtype: np.dtype[Any]) -> str:
    """Why bytes of the HDF5 type `kind` are not bytes of `dtype` (as h5py gives it), in words; "" when they are."""
    found = int(kind.get_class())
    if found in _REASONS:
        return _REASONS[found]
    if found == h5t.ARRAY:
        return (
            why_inexact(kind.get_super(), dtype.base) if dtype.subdtype else "an array type without its shape"
        )
    if found == h5t.STRING and kind.is_variable_str():
        return _REASONS[h5t.VLEN]
    if kind.get_size() != dtype.itemsize:
        return f"elements of {kind.get_size()} bytes become {dtype.itemsize} ({dtype})"
    if found == h5t.COMPOUND:
        return _compound(kind, dtype)
    if found == _COMPLEX:
        return why_inexact(kind.get_super(), _half(dtype))
    if found == h5t.ENUM:
        return _number(kind.get_super(), dtype)
    if found == h5t.STRING:
        return ""  # see `string_ends`
    if found == h5t.OPAQUE:
        return "" if dtype.kind in "VmM" else f"opaque values become {dtype}"
    return _number(kind, dtype)


def _compound(kind: h5t.TypeID, dtype: np.dtype[Any]) -> str:
    members = [kind.get_member_type(i) for i in range(kind.get_nmembers())]
    offsets = [int(kind.get_member_offset(i)) for i in range(kind.get_nmembers())]
    if dtype.kind == "c":
        formats, places = [_half(dtype)] * 2, [0, dtype.itemsize // 2]
    elif dtype.names is not None and dtype.fields is not None:
        formats = [dtype.fields[name][0] for name in dtype.names]
        places = [int(dtype.fields[name][1]) for name in dtype.names]
    else:
        return f"a compound becomes {dtype}"
    if offsets != places:
        return f"members at bytes {offsets} become ones at {places}"
    reasons = (why_inexact(member, item) for member, item in zip(members, formats, strict=True))
    return next((reason for reason in reasons if reason), "")


def _half(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of the two parts of a complex one."""
    return np.dtype(f"{dtype.byteorder}f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def _number(kind: h5t.TypeID, dtype: np.dtype[Any]) -> str:
    """Integers, bit fields and floats: every bit of them must be used, and used in the same way."""
    if kind.get_class() == h5t.FLOAT:
        standard = _FLOATS.get(dtype.str)
        return (
            "" if standard is not None and kind.equal(standard) else "floats of another format than IEEE 754"
        )
    if kind.get_class() == h5t.BITFIELD:
        standard = _BIT_FIELDS.get(dtype.str)
        return "" if standard is not None and kind.equal(standard) else "bit fields of part of their bytes"
    if kind.get_class() != h5t.INTEGER:
        return f"the HDF5 type class {kind.get_class()} is not known here"
    bits = 8 * kind.get_size()
    if kind.get_precision() != bits or kind.get_offset() != 0:
        return f"integers use {kind.get_precision()} of {bits} bits"
    if dtype.kind != ("i" if kind.get_sign() == h5t.SGN_2 else "u") and not (dtype.kind == "b" and bits == 8):
        return f"integers become {dtype}"
    big = bits > 8 and kind.get_order() != h5t.ORDER_LE
    return "" if bits == 8 or (dtype.str[0] == ">") == big else "byte orders differ"


def without_metadata(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same type without what h5py notes on it (enumerations, character sets), which does not outlive a file."""
    if dtype.subdtype is not None:
        return np.dtype((without_metadata(dtype.base), dtype.shape))
    if dtype.names is None or dtype.fields is None:
        return np.dtype(dtype.str)
    return np.dtype(
        {
            "names": list(dtype.names),
            "formats": [without_metadata(dtype.fields[name][0]) for name in dtype.names],
            "offsets": [dtype.fields[name][1] for name in dtype.names],
            "itemsize": dtype.itemsize,
        }
    )


StringEnds = tuple[tuple[tuple[str, ...], bool], ...]
"""For fixed strings not padded with NUL: names of the members that lead there, and whether a space is the padding."""


def string_ends(kind: h5t.TypeID, dtype: np.dtype[Any]) -> StringEnds:
    """Where a type has strings that end at their first NUL, or are padded with spaces.

    NumPy's strings are padded with NUL; libhdf5 converts the others to that form, and so does `end_strings`.
    """
    found = int(kind.get_class())
    if found == h5t.STRING:
        padding = kind.get_strpad()
        return () if padding == h5t.STR_NULLPAD else (((), padding == h5t.STR_SPACEPAD),)
    if found == h5t.ARRAY:
        return string_ends(kind.get_super(), dtype.base)
    if found != h5t.COMPOUND or dtype.names is None or dtype.fields is None:
        return ()
    members = ((i, name, dtype.fields[name][0]) for i, name in enumerate(dtype.names))
    return tuple(
        ((name, *path), spaces)
        for i, name, item in members
        for path, spaces in string_ends(kind.get_member_type(i), item)
    )


def end_strings(values: npt.NDArray[Any], ends: StringEnds) -> None:
    """Bring the fixed strings of an array, as they are in the file, into NumPy's form, in place."""
    for path, spaces in ends:
        strings = values
        for name in path:
            strings = strings[name]
        characters = strings.copy(order="C").reshape(-1).view(np.uint8).reshape(strings.size, -1)
        if spaces:
            padding = np.logical_and.accumulate(characters[:, ::-1] == ord(" "), axis=1)[:, ::-1]
        else:
            padding = np.logical_or.accumulate(characters == 0, axis=1)
        characters[padding] = 0
        strings[...] = characters.reshape(-1).view(strings.dtype).reshape(strings.shape)
