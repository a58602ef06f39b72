"""Files of an environment that name the place where it was made, rewritten so that they work anywhere.

Three kinds matter at run time: the first line of console scripts, `.pth` files with absolute paths, and the library
search path inside ELF files (Horovod's library names the directories of MPI and torch that it was linked against, and
would load those from the old place, or, where that is gone, whatever MPI the system has).
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from hpctrain.errors import ConfigError

_EXEC = rb"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")/python"%s "$0" "$@"
' '''
"""
"""For the shell an exec of the python beside the script; for Python a string. It has no bound on the length of the
path as `#!` has, and takes spaces.
"""
_ELF64_LITTLE = b"\x7fELF\x02\x01"
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 0, 5, 15, 29
_MAX_SEARCH_PATH = 1 << 16


@dataclass(frozen=True)
class Mender:
    """Rewrites files of the environment at `prefix`; `sites` are its package directories, relative to it."""

    prefix: Path
    sites: tuple[str, ...]

    def content(self, name: str, file: BinaryIO) -> bytes | None:
        """What the member `name` is to hold instead of what `file` holds; None if it is fine as it is.

        Raises:
            ConfigError: an ELF file leaves no room for the new search path.
        """
        folder, _, base_name = name.rpartition("/")
        start = file.read(len(_ELF64_LITTLE))
        file.seek(0)
        changed: bytes | None = None
        if start == _ELF64_LITTLE:
            changed = self._elf(name, file)
        elif folder == "bin" and start.startswith(b"#!"):
            changed = self._script(file.read())
        elif folder in self.sites and base_name.endswith(".pth"):
            changed = self._pth(file.read(), self.prefix.resolve() / folder)
        file.seek(0)
        return changed

    def _spellings(self) -> list[str]:
        return sorted({str(self.prefix), str(self.prefix.resolve())}, key=len, reverse=True)

    def _script(self, content: bytes) -> bytes | None:
        """The forms that pip and uv write: `#!PYTHON`, and `#!/bin/sh` with an exec where that is too long."""
        places = b"|".join(re.escape(os.fsencode(each)) for each in self._spellings())
        python = rb"(?:%s)/bin/python[0-9.]*" % places
        plain = rb"#!%s((?: [^\n]*)?)\n" % python
        shell = rb"#!/bin/sh\n'''exec' [\"']?%s[\"']?((?: -[^\n]*?)?) \"\$0\" \"\$@\"\n' '''\n" % python
        match = re.match(plain, content) or re.match(shell, content)
        return None if match is None else _EXEC % match[1].rstrip() + content[match.end() :]

    def _pth(self, content: bytes, site: Path) -> bytes:
        """Without the lines that lead out of the package directory: what they led to is in the archive."""
        kept = []
        for line in content.splitlines(keepends=True):
            text = os.fsdecode(line.strip())
            code = line.startswith((b"#", b"import ", b"import\t"))
            if code or not text:
                kept.append(line)
            elif (target := (site / text).resolve()).is_relative_to(site):
                kept.append(os.fsencode(target.relative_to(site)) + b"\n")
        return b"".join(kept)

    def _elf(self, name: str, file: BinaryIO) -> bytes | None:
        try:
            found = list(_search_paths(file))
        except struct.error:
            return None  # truncated, or no library at all: nothing that could be loaded
        patches = []
        for offset, old in found:
            new = ":".join(self._beside(name, entry) for entry in os.fsdecode(old).split(":"))
            if len(os.fsencode(new)) > len(old):
                raise ConfigError(
                    f"{name} looks for libraries in {os.fsdecode(old)}, and {new} does not fit in its place; make the "
                    "environment in a directory with a longer name"
                )
            if os.fsencode(new) != old:
                patches.append((offset, os.fsencode(new).ljust(len(old), b"\0")))
        if not patches:
            return None
        file.seek(0)
        content = bytearray(file.read())
        for offset, text in patches:
            content[offset : offset + len(text)] = text
        return bytes(content)

    def _beside(self, name: str, entry: str) -> str:
        """A search directory inside the prefix, relative to the library that names it."""
        for place in self._spellings():
            if PurePosixPath(entry).is_relative_to(place):
                return f"$ORIGIN/{os.path.relpath(entry, PurePosixPath(place, name).parent)}"
        return entry


def _search_paths(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """File offset and text of each DT_RPATH and DT_RUNPATH of a 64-bit little-endian ELF file (System V gABI, 5)."""
    segments = _segments(file)
    dynamic = next(
        (_read(file, offset, size) for kind, offset, _, size in segments if kind == _PT_DYNAMIC), b""
    )
    values: list[int] = []
    strings: int | None = None
    for tag, value in struct.iter_unpack("<qQ", dynamic[: len(dynamic) // 16 * 16]):
        if tag == _DT_NULL:
            break
        if tag == _DT_STRTAB:
            strings = _file_offset(segments, value)
        elif tag in (_DT_RPATH, _DT_RUNPATH):
            values.append(value)
    if strings is not None:
        for value in values:
            yield strings + value, _read(file, strings + value, _MAX_SEARCH_PATH).split(b"\0")[0]


def _segments(file: BinaryIO) -> list[tuple[int, int, int, int]]:
    """Kind, file offset, virtual address and size in the file of each program header."""
    header = _read(file, 0, 64)
    (start,), (size, count) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<HH", header, 54)
    found = []
    for number in range(count):
        kind, _, offset, address, _, length = struct.unpack_from(
            "<IIQQQQ", _read(file, start + number * size, size)
        )
        found.append((kind, offset, address, length))
    return found


def _file_offset(segments: list[tuple[int, int, int, int]], address: int) -> int | None:
    for kind, offset, start, size in segments:
        if kind == _PT_LOAD and start <= address < start + size:
            return offset + address - start
    return None


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)
