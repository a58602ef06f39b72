"""The first member of an environment archive: what it is, and what it may hold.

An archive is an ordinary `.tar.gz`. Its first gzip member holds one tar member, `hpctrain-env.json`, stored and padded
to a fixed size, so that it can be read without reading the rest, and written last, when the digest is known. What
follows (one gzip member, all of it under the digest) is the environment.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpctrain.errors import DataError, StorageError

_NAME = "hpctrain-env.json"
_JSON_BYTES = 8192
_BLOCK_BYTES = tarfile.BLOCKSIZE + _JSON_BYTES


class Header(BaseModel):
    """What an archive says about itself. `members` and `total_bytes` (of files) are exact, and bound what is unpacked.

    `digest` is the XXH3-128 of the tar stream after this member.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    python_version: str
    soabi: str
    base_executable: Path
    interpreter_links: list[Annotated[str, Field(pattern=r"^bin/[^/]+$")]]
    prefix: Path
    host: str
    created_unix_s: int
    hpctrain: str
    members: Annotated[int, Field(ge=0)] = 0
    total_bytes: Annotated[int, Field(ge=0)] = 0
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] = "0" * 32


def encode_header(header: Header) -> bytes:
    """The first gzip member; of the same length for every header.

    Raises:
        ValueError: the header is too long.
    """
    content = header.model_dump_json().encode()
    if len(content) > _JSON_BYTES:
        raise ValueError(f"a header of {len(content)} bytes; the bound is {_JSON_BYTES}")
    info = tarfile.TarInfo(_NAME)
    info.size, info.mode, info.mtime = _JSON_BYTES, 0o600, header.created_unix_s
    # Level 0 stores the bytes as they are: the length cannot depend on them.
    return gzip.compress(info.tobuf() + content.ljust(_JSON_BYTES), compresslevel=0, mtime=0)


def read_header(file: BinaryIO) -> Header:
    """Read the first gzip member, and leave the file at the next one.

    Raises:
        DataError: this is not an archive made by `hpctrain env-archive create`, or not of a known format.
        StorageError: it cannot be read.
    """
    decoder = zlib.decompressobj(wbits=31)
    try:
        start = file.read(2 * _BLOCK_BYTES)
        block = decoder.decompress(start, _BLOCK_BYTES)
        decoder.decompress(decoder.unconsumed_tail)  # the trailer
        if not decoder.eof or tarfile.TarInfo.frombuf(block[:512], "utf-8", "strict").name != _NAME:
            raise ValueError(f"its first member is not {_NAME}")
        header = Header.model_validate_json(block[tarfile.BLOCKSIZE :].rstrip())
    except OSError as error:
        raise StorageError(f"{file.name}: cannot be read: {error.strerror}; check the filesystem") from error
    except (zlib.error, tarfile.TarError, ValidationError, ValueError) as error:
        raise DataError(
            f"{file.name}: not an archive that this version of `hpctrain env-archive create` makes ({error}); make it "
            "again"
        ) from error
    file.seek(len(start) - len(decoder.unused_data))
    return header
