"""A head and arrays as bytes: what passes through the pipe between a rank and its agent. Nothing is ever unpickled."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]

_LENGTH_BYTES: Final = 8


def pack_message(head: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]] | None = None) -> bytes:
    """`head` (what JSON can hold) and named arrays, in one piece."""
    stream = io.BytesIO()
    content = json.dumps({"head": head, "arrays": list(arrays or {})}).encode()
    np.save(stream, np.frombuffer(content, np.uint8), allow_pickle=False)
    for array in (arrays or {}).values():
        np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def unpack_message(content: bytes) -> tuple[dict[str, Any], Arrays]:
    """What `pack_message` made. Raises `ValueError` for anything else."""
    stream = io.BytesIO(content)
    outer = json.loads(np.load(stream, allow_pickle=False).tobytes())
    return outer["head"], {name: np.load(stream, allow_pickle=False) for name in outer["arrays"]}


def send_message(
    stream: BinaryIO, head: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]] | None = None
) -> None:
    """Write one message to a pipe. Raises `OSError` where nobody reads it any more."""
    content = pack_message(head, arrays)
    stream.write(len(content).to_bytes(_LENGTH_BYTES, "little"))
    stream.write(content)
    stream.flush()


def receive_message(stream: BinaryIO) -> tuple[dict[str, Any], Arrays] | None:
    """The next message of a pipe; None where it ends, or ended within a message."""
    prefix = stream.read(_LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    content = stream.read(length) if len(prefix) == _LENGTH_BYTES else b""
    return unpack_message(content) if content and len(content) == length else None
