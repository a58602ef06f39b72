"""Writing shards: chunks come encoded and are stored as they are (`write_direct_chunk`), with a digest beside
each.

The files are ordinary HDF5 of the oldest format version, with registered filters only: h5py with hdf5plugin,
h5dump and MATLAB read them. They hold no time stamps, so equal input gives equal bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt

from hpctrain.errors import StorageError
from hpctrain.h5.encoding import padded
from hpctrain.h5.fields import Field, offsets_field
from hpctrain.h5.filters import DEFLATE, SHUFFLE, FilterPipeline
from hpctrain.h5.index import DIGESTS_GROUP, digest_of
from hpctrain.h5.layout import Layout, chunk_pipeline
from hpctrain.h5.ragged import Ragged
from hpctrain.h5.shardfile import ShardFile

_ENCODING_AHEAD: Final = 16
"""Chunks of values in the pool at most; not tied to its threads: the order of writes decides the bytes of a file."""


class DatasetWriter:
    """One dataset that grows along axis 0 by whole encoded chunks."""

    def __init__(self, file: h5py.File, field: Field, chunk_shape: tuple[int, ...]) -> None:
        self.name, self.dtype, self.chunk_shape = field.name, field.dtype, chunk_shape
        self.pipeline = chunk_pipeline(field, chunk_shape)
        self.rows = 0
        self.stored_bytes = 0
        self.digests: list[int] = []
        # Unlimited along axis 0: a fixed extent could not be smaller than a chunk.
        space = h5py.h5s.create_simple((0, *chunk_shape[1:]), (h5py.h5s.UNLIMITED, *chunk_shape[1:]))
        plist = _creation_plist(chunk_shape, self.pipeline)
        self._id = h5py.h5d.create(
            file.id, field.name.encode(), h5py.h5t.py_create(field.dtype), space, plist
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape so far."""
        return (self.rows, *self.chunk_shape[1:])

    def append(self, stored: bytes, rows: int) -> None:
        """Add one encoded chunk that holds `rows` rows; only the last may hold fewer than a chunk does."""
        start = (self.rows, *(0,) * (len(self.chunk_shape) - 1))
        self.rows += rows
        self._id.set_extent(self.shape)
        self._id.write_direct_chunk(start, stored, 0)
        self.digests.append(digest_of(stored))
        self.stored_bytes += len(stored)

    def encode(self, values: npt.NDArray[Any]) -> bytes:
        """Encode the values of one chunk, zeros after them where they are fewer; safe in any thread."""
        return self.pipeline.encode(padded(values, self.chunk_shape[0]))


def _creation_plist(chunk_shape: tuple[int, ...], pipeline: FilterPipeline) -> h5py.h5p.PropDCID:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk(chunk_shape)
    plist.set_obj_track_times(False)
    for item in pipeline.filters:
        if item.id == SHUFFLE:
            plist.set_shuffle()
        elif item.id == DEFLATE:
            plist.set_deflate(*item.cd_values)
        else:
            plist.set_filter(item.id, 0, item.cd_values)
    return plist


class _RaggedWriter:
    """Values and offsets of one ragged field.

    Chunks of values are cut here, in order, and encoded in the pool while further ones arrive.
    """

    def __init__(self, file: h5py.File, field: Field, layout: Layout, pool: Executor) -> None:
        self._flat = DatasetWriter(file, field, (layout.chunk_values[field.name],))
        self._table = DatasetWriter(file, offsets_field(field), (layout.offsets_chunk,))
        self._rest = np.empty(0, field.dtype)
        self._offsets = [np.zeros(1, np.int64)]
        self._pool = pool
        self._encoding: deque[tuple[Future[bytes], int]] = deque()

    def append(self, rows: Ragged) -> None:
        self._offsets.append(rows.offsets[1:] - rows.offsets[0] + self._offsets[-1][-1])
        values = np.concatenate([self._rest, rows.values[rows.offsets[0] : rows.offsets[-1]]])
        step = self._flat.chunk_shape[0]
        whole = len(values) // step * step
        for start in range(0, whole, step):
            self._encode(values[start : start + step])
        self._rest = values[whole:]

    def _encode(self, values: npt.NDArray[Any]) -> None:
        self._encoding.append((self._pool.submit(self._flat.encode, values), len(values)))
        if len(self._encoding) > _ENCODING_AHEAD:
            self._write_oldest()

    def _write_oldest(self) -> None:
        encoded, count = self._encoding.popleft()
        self._flat.append(encoded.result(), count)

    def finish(self) -> list[DatasetWriter]:
        if len(self._rest):
            self._encode(self._rest)
        while self._encoding:
            self._write_oldest()
        offsets = np.concatenate(self._offsets)
        step = self._table.chunk_shape[0]
        for start in range(0, len(offsets), step):
            part = offsets[start : start + step]
            self._table.append(self._table.encode(part), len(part))
        return [self._flat, self._table]


class ShardWriter:
    """Writes one shard, sample chunk by sample chunk, in order; `pool` encodes the values of ragged fields."""

    def __init__(self, path: Path, layout: Layout, pool: Executor) -> None:
        import hdf5plugin  # noqa: F401  (registers the filters: HDF5 makes no dataset with one it does not have)

        self.path = path
        self.num_samples = 0
        self._dense: dict[str, DatasetWriter] = {}
        self._ragged: dict[str, _RaggedWriter] = {}
        self._below = ShardFile(path)
        try:
            self._file = h5py.File(self._below, "w", libver="earliest")
            self._make_datasets(layout, pool)
        except BaseException:
            self.abandon()
            raise

    def _make_datasets(self, layout: Layout, pool: Executor) -> None:
        for name, field in layout.fields.items():
            if field.kind == "ragged":
                self._ragged[name] = _RaggedWriter(self._file, field, layout, pool)
            else:
                shape = (layout.chunk_samples, *field.sample_shape)
                self._dense[name] = DatasetWriter(self._file, field, shape)

    def append(self, rows: int, dense: Mapping[str, bytes], ragged: Mapping[str, Ragged]) -> None:
        """Add one sample chunk of `rows` samples: encoded chunks of dense fields, rows of ragged ones."""
        for name, stored in dense.items():
            self._dense[name].append(stored, rows)
        for name, values in ragged.items():
            self._ragged[name].append(values)
        self.num_samples += rows
        self._below.check()

    def finish(self) -> list[DatasetWriter]:
        """Write offsets and digests and close the file; gives its datasets, sorted by name."""
        datasets = list(self._dense.values())
        for item in self._ragged.values():
            datasets += item.finish()
        group = self._file.create_group(DIGESTS_GROUP)
        for dataset in datasets:
            group.create_dataset(dataset.name, data=np.array(dataset.digests, np.uint64), track_times=False)
        self._file.close()
        self._below.check()
        self._below.close()
        return sorted(datasets, key=lambda item: item.name)

    def abandon(self) -> None:
        """Close after a failure; the file is of no use."""
        with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
            self._file.close()  # no attribute: h5py did not come to make it
        with contextlib.suppress(OSError):
            self._below.close()


@contextlib.contextmanager
def writing(directory: Path, needed_bytes: Callable[[], int]) -> Iterator[None]:
    """Turn a failed write in `directory` into a `StorageError` that says what is needed and what is free."""
    try:
        yield
    except StorageError:
        raise
    # h5py raises RuntimeError where libhdf5 gives no errno, for example when the last flush fails.
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"{directory.parent}: writing failed ({error}); the whole set needs about {needed_bytes()} bytes, "
            f"{_free_bytes(directory)} were free; nothing was left behind; make room, choose another place, "
            "or a stronger --codec"
        ) from error


def _free_bytes(directory: Path) -> int | str:
    """Bytes free before anything was written to `directory`; in words where the filesystem does not say."""
    try:
        stat = os.statvfs(directory)
        written_bytes = sum(path.stat().st_blocks * 512 for path in directory.iterdir())
        return stat.f_bavail * stat.f_frsize + written_bytes
    except OSError:  # the directory is gone, too; what failed first is the message
        return "an unknown number"
