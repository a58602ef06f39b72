"""Indexes kept beside the run, so that a restart need not walk a million chunks again, nor compare any.

One file per dataset: digest (xxh3_128 of the rest, 16 bytes), u32 length of the header, the header in JSON, then the
three columns of the chunk table; all little-endian. The header says of which file (size, time of the last change,
inode) and for which arguments it was made. What does not match, or is damaged, is made anew and replaced. Nothing is
unpickled. Datasets that go by libhdf5 have no index and are opened each time.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from hpctrain.durable import replace_file
from hpctrain.errors import DataError
from hpctrain.h5.dataset import Dataset, open_dataset
from hpctrain.h5.filters import Filter, FilterPipeline
from hpctrain.h5.index import ChunkIndex, check_extent, file_key_of
from hpctrain.h5.roads import Bounds

_VERSION: Final = 1
_DIGEST_BYTES: Final = 16
_COLUMNS: Final = (("offsets", "<i8"), ("sizes", "<i8"), ("masks", "<u4"))
# What a header that is not ours leads to.
_NOT_OURS: Final = (
    DataError,
    OSError,
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    struct.error,
)


def cached_dataset(cache_dir: Path | None, path: Path, name: str, **arguments: Any) -> Dataset:
    """`open_dataset` with these arguments, or what it gave before for the same file and arguments.

    `cache_dir` is made if need be; None: nothing is kept. A cache that cannot be written is done without. Errors as
    for `open_dataset`.
    """
    path = Path(path).absolute()
    if cache_dir is None:
        return open_dataset(path, name, **arguments)
    place = Path(cache_dir) / f"{xxhash.xxh3_128_hexdigest(json.dumps([str(path), name]).encode())}.index"
    wanted = {"version": _VERSION, "path": str(path), "dataset": name, "arguments": arguments}
    dataset = _load(place, wanted)
    if dataset is None:
        dataset = open_dataset(path, name, **arguments)
        if dataset.index is not None:
            _save(place, wanted, path, dataset, dataset.index)
    return dataset


def _save(place: Path, wanted: dict[str, Any], path: Path, dataset: Dataset, index: ChunkIndex) -> None:
    header = {
        "wanted": wanted,
        # Of the file that was opened: its name may lead to another one by now.
        "key": dataset.file_key if index.path == path else file_key_of(path),
        "home": str(index.path),
        "home_key": dataset.file_key,
        "name": dataset.name,
        "shape": index.shape,
        "dtype": np.lib.format.dtype_to_descr(index.dtype),
        "chunk_shape": index.chunk_shape,
        "filters": [[item.id, item.cd_values] for item in index.pipeline.filters],
        "num_chunks": index.num_chunks,
        "fill": index.fill.hex(),
        "raw_edges": index.raw_edges,
        "contiguous": index.contiguous,
        "string_ends": dataset.string_ends,
        "compared": dataset.compared,
        "bounds": astuple(dataset.bounds),
    }
    text = json.dumps(header).encode()
    columns = [np.asarray(getattr(index, name), kind).tobytes() for name, kind in _COLUMNS]
    body = b"".join([struct.pack("<I", len(text)), text, *columns])
    with contextlib.suppress(OSError):  # the index is at hand; the next start will make it again
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, xxhash.xxh3_128_digest(body) + body)


def _load(place: Path, wanted: dict[str, Any]) -> Dataset | None:
    """What is kept, when it is whole and still that of the file."""
    try:
        content = memoryview(place.read_bytes())
        if xxhash.xxh3_128_digest(content[_DIGEST_BYTES:]) != content[:_DIGEST_BYTES]:
            return None
        (length,) = struct.unpack_from("<I", content, _DIGEST_BYTES)
        start = _DIGEST_BYTES + 4
        header = json.loads(bytes(content[start : start + length]))
        if header["wanted"] != wanted or tuple(header["key"]) != file_key_of(Path(wanted["path"])):
            return None
        return _dataset_from(header, _columns_from(content[start + length :], header["num_chunks"]))
    except _NOT_OURS:
        return None


def _columns_from(content: memoryview, count: int) -> dict[str, npt.NDArray[Any]]:
    columns, start = {}, 0
    for name, kind in _COLUMNS:
        columns[name] = np.frombuffer(content, kind, count, start)
        start += columns[name].nbytes
    return columns


def _dataset_from(header: dict[str, Any], columns: dict[str, npt.NDArray[Any]]) -> Dataset | None:
    home, key = Path(header["home"]), tuple(header["home_key"])
    if file_key_of(home) != key:
        return None
    shape, dtype = tuple(header["shape"]), np.lib.format.descr_to_dtype(_as_tuples(header["dtype"]))
    filters = tuple(Filter(number, tuple(values)) for number, values in header["filters"])
    index = ChunkIndex(
        home,
        header["name"],
        shape,
        dtype,
        tuple(header["chunk_shape"]),
        FilterPipeline(filters),
        **columns,
        fill=bytes.fromhex(header["fill"]),
        raw_edges=header["raw_edges"],
        contiguous=header["contiguous"],
        file_key=key,
    )
    if dtype.hasobject or math.prod(index.grid) != index.num_chunks:
        return None  # bytes of the file must never become pointers, whoever wrote this header
    holes = bool(np.any(index.offsets < 0))
    if len(index.fill) % dtype.itemsize or holes > bool(index.fill):
        return None
    check_extent(index, key[0])
    ends = tuple((tuple(path), spaces) for path, spaces in header["string_ends"])
    bounds = Bounds(*header["bounds"])
    return Dataset(
        home, header["name"], shape, dtype, "parallel", "", index, key, ends, header["compared"], bounds
    )


def _as_tuples(descr: Any, is_field: bool = False) -> Any:
    """A type description as NumPy made it: JSON has no tuples, which fields and shapes are."""
    if not isinstance(descr, list):
        return descr
    items = [_as_tuples(item, not is_field) for item in descr]
    return tuple(items) if is_field else items
