"""What `reader` reads: pictures and fields, packed by hpctrain, and as a user may have them; and what they must be.

The fields have a spectrum between those of turbulence in three dimensions and in two, and 10 bits of mantissa: more is
noise in most simulations, and codecs cannot store noise in less than its size.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt
import xxhash
from numcodecs.bitround import BitRound

from benchmarks import inputs
from hpctrain.h5.pack import PackOptions, pack_arrays

FIELD_SHAPE: Final = (4, 128, 128)
FIELD_SLOPE: Final = -5 / 3
"""Amplitudes fall as |f|^(-5/3), energy per wavenumber as k^(-7/3): between k^(-5/3) and k^-3 of turbulence."""
KEEP_BITS: Final = 10
GZIP_LEVEL: Final = 4
CODECS: Final = ("blosc-lz4", "blosc-zstd")
SHARD_MIB: Final = 1 << 20  # one shard: peers that read the same file need not care for several
_BLOCK_SAMPLES: Final = 32  # made at once

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DataSet:
    """One set of samples, in every form that a side needs it in, all in `folder`.

    Attributes:
        name: also the name of the field in HDF5.
        window_samples: shuffle window.
        workers: numbers of worker processes that are tried behind a `DataLoader`, from the most on: none is forked
            after the process itself has read, with the threads of some peers.
    """

    name: str
    folder: Path
    num_samples: int
    sample_shape: tuple[int, ...]
    dtype: str
    chunk_samples: int
    batch: int
    window_samples: int
    workers: tuple[int, ...]

    @classmethod
    def of(
        cls,
        name: str,
        root: Path,
        values: Array,
        chunk_samples: int,
        batch: int,
        window: int,
        workers: tuple[int, ...],
    ) -> DataSet:
        """Describe values that are to be written below `root`, for the processes of the sides too."""
        folder = root / name
        folder.mkdir()
        dtype, shape = values.dtype.str, values.shape[1:]
        data = cls(name, folder, len(values), shape, dtype, chunk_samples, batch, window, workers)
        text = json.dumps({**asdict(data), "folder": str(folder)})
        (folder / "set.json").write_text(text, encoding="utf-8")
        return data

    @classmethod
    def load(cls, folder: Path) -> DataSet:
        """What `of` described."""
        found = json.loads((folder / "set.json").read_text(encoding="utf-8"))
        tuples = {key: tuple(found[key]) for key in ("sample_shape", "workers")}
        return cls(**{**found, **tuples, "folder": folder})

    @property
    def sample_bytes(self) -> int:
        """Raw bytes of a sample."""
        return int(np.prod(self.sample_shape)) * np.dtype(self.dtype).itemsize

    @property
    def raw_bytes(self) -> int:
        """Raw bytes of all samples."""
        return self.num_samples * self.sample_bytes

    def packed(self, codec: str) -> Path:
        """The packed set of a codec."""
        return self.folder / codec

    def shard(self, codec: str) -> Path:
        """The one HDF5 file of that set."""
        (path,) = self.packed(codec).glob("*.h5")
        return path

    def user_file(self, shuffle: bool) -> Path:
        """The gzip file of a user."""
        return self.folder / ("gzip-shuffle.h5" if shuffle else "gzip.h5")


def random_order(num_samples: int, epoch: int) -> npt.NDArray[np.int64]:
    """The samples in random order; sides that read only part of an epoch take the first of it."""
    return np.random.default_rng((num_samples, epoch)).permutation(num_samples)


def digest(samples: Iterable[tuple[Any, Any]]) -> tuple[int, int]:
    """(sum of the samples' digests, number of samples) of batches (ids, values), in whatever order they come.

    Each digest is xxh3_64 of the sample's bytes, seeded with its id, so that a sample that is wrong, missing, repeated
    or under another id changes the sum.
    """
    total = count = 0
    for ids, values in samples:
        for number, row in zip(np.asarray(ids).tolist(), np.ascontiguousarray(values), strict=True):
            total += xxhash.xxh3_64_intdigest(row, seed=number)
            count += 1
    return total % 2**64, count


@dataclass(frozen=True)
class Reference:
    """The digest of every sample, uint64 of shape (num_samples,), and the type of their values."""

    digests: npt.NDArray[np.uint64]
    dtype: str

    @classmethod
    def of(cls, values: Array) -> Reference:
        """From the samples themselves."""
        return cls(
            np.array([xxhash.xxh3_64_intdigest(row, seed=i) for i, row in enumerate(values)], np.uint64),
            str(values.dtype),
        )

    def expected(self, count: int) -> int:
        """The digest of an epoch, or of the first `count` samples of `random_order` of epoch 0."""
        taken = (
            self.digests
            if count == len(self.digests)
            else self.digests[random_order(len(self.digests), 0)[:count]]
        )
        return int(np.sum(taken, dtype=np.uint64))


def rounded_fields(count: int) -> Array:
    """Fields (count, 4, 128, 128) float32 of `KEEP_BITS` mantissa bits."""
    values = np.empty((count, *FIELD_SHAPE), np.float32)

    def make(start: int) -> None:
        part = values[start : start + _BLOCK_SAMPLES]
        made = inputs.random_fields((len(part), FIELD_SHAPE[0]), FIELD_SHAPE[1], FIELD_SLOPE, seed=start)
        # the same bytes come back as integers
        part[:] = np.asarray(BitRound(KEEP_BITS).encode(made)).view(np.float32).reshape(part.shape)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(make, range(0, count, _BLOCK_SAMPLES)))
    return values


def write_packed(data: DataSet, values: Array) -> dict[str, int]:
    """Pack with every codec; returns the stored bytes of each."""
    stored = {}
    for codec in CODECS:
        options = PackOptions(codec=codec, chunk_samples=data.chunk_samples, shard_mib=SHARD_MIB)
        stored[codec] = pack_arrays({data.name: values}, data.packed(codec), options).stored_bytes
    return stored


def write_user_file(data: DataSet, values: Array, shuffle: bool) -> None:
    """What `create_dataset(..., compression="gzip", compression_opts=4)` of h5py writes, encoded on all cores."""
    options = {"compression": "gzip", "compression_opts": GZIP_LEVEL, "shuffle": shuffle}
    chunk = (data.chunk_samples, *data.sample_shape)

    def encoded(start: int) -> bytes:
        rows = np.zeros(chunk, values.dtype)
        part = values[start : start + data.chunk_samples]
        rows[: len(part)] = part
        raw = rows.view(np.uint8).reshape(-1)
        if shuffle:
            raw = np.ascontiguousarray(raw.reshape(-1, values.itemsize).T)
        return zlib.compress(raw.data, GZIP_LEVEL)

    starts = range(0, len(values), data.chunk_samples)
    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        h5py.File(data.user_file(shuffle), "w") as file,
    ):
        dataset = file.create_dataset(data.name, values.shape, values.dtype, chunks=chunk, **options)
        for start, stored in zip(starts, pool.map(encoded, starts), strict=True):
            dataset.id.write_direct_chunk((start, *(0 for _ in data.sample_shape)), stored)
