"""Names of HDF5 filters, and which package has them: for messages about those that are not decoded here.

Numbers below 256 are libhdf5's own; the others are those registered with The HDF Group (its list of registered filter
plugins). Numbers from 32768 on are for private use.
"""

from __future__ import annotations

from typing import Final

_NAMES: Final = {
    1: "deflate",
    2: "shuffle",
    3: "fletcher32",
    4: "szip",
    5: "n-bit",
    6: "scale-offset",
    305: "LZO",
    307: "bzip2",
    32000: "LZF",
    32001: "Blosc",
    32002: "MAFISC",
    32003: "Snappy",
    32004: "LZ4",
    32005: "APAX",
    32006: "CBF",
    32007: "JPEG-XR",
    32008: "bitshuffle",
    32009: "SPDP",
    32010: "LPC-Rice",
    32011: "CCSDS-123",
    32012: "JPEG-LS",
    32013: "ZFP",
    32014: "fpzip",
    32015: "Zstandard",
    32016: "B3D",
    32017: "SZ",
    32018: "FCIDECOMP",
    32019: "JPEG",
    32020: "VBZ",
    32021: "FAPEC",
    32022: "BitGroom",
    32023: "Granular BitRound",
    32024: "SZ3",
    32025: "Delta-Rice",
    32026: "Blosc2",
    32027: "FLAC",
    32028: "SPERR",
    32029: "TERSE/PROLIX",
    32030: "FFMPEG",
    32033: "HTJ2K",
}
_IN_HDF5PLUGIN: Final = {307, 32001, 32004, 32008, 32013, 32015, 32017, 32018, 32024, 32026, 32028, 32033}
_ELSEWHERE: Final = {305: "PyTables built with LZO", 32000: "h5py", 32020: "the package vbz-h5py-plugin"}
_LIBRARY_ONLY: Final = range(256)
_PRIVATE_FROM: Final = 32768


def filter_name(number: int) -> str:
    """The name of a filter, as in "bzip2"; "unregistered" for numbers that the registry does not have."""
    return _NAMES.get(number, "private" if number >= _PRIVATE_FROM else "unregistered")


def who_reads(number: int) -> str:
    """What reads a filter that is not decoded here, as half a sentence."""
    if number in _IN_HDF5PLUGIN:
        return "hdf5plugin reads it through libhdf5"
    if number in _NAMES and number in _LIBRARY_ONLY:
        return "libhdf5 reads it itself"
    if number in _ELSEWHERE:
        return f"{_ELSEWHERE[number]} reads it"
    if number in _NAMES:
        return "libhdf5 reads it with the plugin of that name, which HDF5_PLUGIN_PATH must lead to"
    return "ask whoever wrote the file for the plugin"
