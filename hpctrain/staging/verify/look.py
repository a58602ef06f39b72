"""What is to be checked in a file: its datasets and their chunk tables. Runs in a child process."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, StorageError
from hpctrain.h5.chunks import FileSource, read_flat
from hpctrain.h5.dataset import open_dataset
from hpctrain.h5.fields import OFFSETS_SUFFIX, Field
from hpctrain.h5.index import RECOPY, REPACK, ChunkIndex, index_dataset, open_h5
from hpctrain.h5.packed import open_shard
from hpctrain.h5.roads import Bounds
from hpctrain.staging.verify.check import FileWork
from hpctrain.staging.verify.findings import Finding, Kind, Part

_BLOCK_BYTES: Final = 64 << 20
_BLOCK_ROWS: Final = 4096  # of values of any length


def look_at_shard(
    root: Path, entry: Mapping[str, Any], fields: Mapping[str, Field], chunk_samples: int, first_sample: int
) -> FileWork:
    """A shard of a packed set, compared with its entry in the manifest."""
    path, rows = root / Path(str(entry["file"])).name, int(entry["num_samples"])
    work = FileWork(path, file_bytes=int(entry["bytes"]), is_packed=True)
    try:
        with FileSource() as source:
            shard = open_shard(root, entry, fields, chunk_samples, source)
    except (DataError, StorageError) as error:
        work.parts, work.findings = _salvage(path, fields, first_sample, rows)
        explained = work.findings or any(
            part.holds == "values" and part.offsets is None for part in work.parts
        )
        work.findings += [] if explained else [of_error(path, error)]
        return work
    work.parts = [Part(index, "rows", first_sample, rows) for index in shard.dense.values()]
    for name, offsets in shard.offsets.items():
        work.parts.append(Part(shard.flat[name], "values", first_sample, rows, offsets))
        work.parts.append(Part(shard.tables[name], "offsets", first_sample, rows))
    return work


def _salvage(
    path: Path, fields: Mapping[str, Field], first_sample: int, rows: int
) -> tuple[list[Part], list[Finding]]:
    """The datasets of a shard that can be found, although something is wrong with it; and what cannot be.

    Where the offsets of values cannot be read, the chunk that is to blame is found when it is checked.
    """
    parts: list[Part] = []
    found: list[Finding] = []
    try:
        with open_h5(path) as file, FileSource() as source:
            for field in fields.values():
                index = _find(file, path, field.name, found)
                if field.kind == "dense":
                    parts += [Part(index, "rows", first_sample, rows)] if index else []
                    continue
                table = _find(file, path, field.name + OFFSETS_SUFFIX, found)
                offsets = None if table is None else _offsets(table, source)
                parts += [Part(table, "offsets", first_sample, rows)] if table else []
                parts += [Part(index, "values", first_sample, rows, offsets)] if index else []
    except (DataError, StorageError) as error:
        found.append(of_error(path, error))
    return parts, found


def _find(file: h5py.File, path: Path, name: str, found: list[Finding]) -> ChunkIndex | None:
    try:
        index = index_dataset(file, path, name)
        chunk_bytes = math.prod(index.chunk_shape) * index.dtype.itemsize
        Bounds().check(
            f"{path}: dataset {name!r}: the bytes of one chunk are", chunk_bytes, "max_chunk_bytes"
        )
    except (DataError, StorageError) as error:
        found.append(of_error(path, error, name))
        return None
    return index


def _offsets(table: ChunkIndex, source: FileSource) -> npt.NDArray[np.int64] | None:
    try:
        offsets = read_flat(table, source, 0, table.shape[0])
    except (DataError, StorageError):
        return None
    return np.asarray(offsets, np.int64) if np.all(np.diff(offsets) >= 0) else None


def look_at_file(path: Path, names: Sequence[str], digested: Sequence[str]) -> FileWork:
    """A file of any origin: its datasets that are read in parallel; those `digested` have digests in the file."""
    work = FileWork(path, file_bytes=path.stat().st_size, is_packed=bool(digested))
    for name in names:
        try:
            index = _open(path, name, name in digested)
        except (DataError, StorageError) as error:
            work.findings.append(of_error(path, error, name))
            continue
        if index is not None:
            work.parts.append(_part(index, name, names))
    return work


def _part(index: ChunkIndex, name: str, names: Sequence[str]) -> Part:
    """What a dataset seems to hold, by the names of the others: NAME and NAME_offsets are a ragged field."""
    if name + OFFSETS_SUFFIX in names:
        return Part(index, "values", 0, 0)
    if name.endswith(OFFSETS_SUFFIX) and name.removesuffix(OFFSETS_SUFFIX) in names:
        return Part(index, "offsets", 0, index.shape[0] - 1)
    return Part(index, "rows", 0, index.shape[0])


def _open(path: Path, name: str, digested: bool) -> ChunkIndex | None:
    if not digested:
        return open_dataset(path, name, verify_chunks=0).index
    with open_h5(path) as file:
        return index_dataset(file, path, name.lstrip("/"))


def read_by_library(path: Path, name: str, block: int) -> tuple[int, int, str]:
    """Read a block of rows of a dataset that only libhdf5 can read.

    Gives the first row behind it, the number of rows, and what is wrong, "" where nothing is.
    """
    dataset = open_dataset(path, name, verify_chunks=0)
    row_bytes = math.prod(dataset.shape[1:]) * dataset.dtype.itemsize
    step = _BLOCK_ROWS if dataset.dtype.hasobject else max(_BLOCK_BYTES // max(row_bytes, 1), 1)
    start, stop = block * step, min((block + 1) * step, dataset.num_rows)
    try:
        dataset.read_rows(min(start, stop), stop)
    except (DataError, StorageError) as error:
        return stop, dataset.num_rows, words_of(path, error, name)
    return stop, dataset.num_rows, ""


def of_error(path: Path, error: DataError | StorageError, dataset: str = "") -> Finding:
    """The finding that an error of a whole file or dataset is."""
    kind: Kind = "unreadable" if isinstance(error, StorageError) else "structure"
    if not os.path.lexists(path):
        kind = "missing"
    return Finding(path, kind, words_of(path, error, dataset), dataset)


def words_of(path: Path, error: Exception | str, dataset: str = "") -> str:
    """What an error says, without the place and the mend, which are said elsewhere."""
    words = str(error).removesuffix(f"; {REPACK}").removesuffix(f"; {RECOPY}")
    return words.removeprefix(f"{path}: ").removeprefix(f"dataset {dataset!r}: ")
