"""HDF5 files as users have them: what several tests of the reader write."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

UNFILTERED_EDGES = 2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS


def random_values(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int) -> npt.NDArray[Any]:
    """Values of any fixed-size type, of few different bytes, so that filters have something to do."""
    rng = np.random.default_rng(seed)
    values = np.zeros(shape, dtype)
    _fill(values, rng)
    return values


def _fill(values: npt.NDArray[Any], rng: np.random.Generator) -> None:
    if values.dtype.names is not None:
        for name in values.dtype.names:
            _fill(values[name], rng)
    elif values.dtype.kind == "S":
        words = np.array([b"", b"a", b"ab  ", b" abc", b"abcde"])
        values[...] = words[rng.integers(0, len(words), values.shape)]
    elif values.dtype.kind == "V":
        values[...] = rng.integers(0, 3, (*values.shape, values.dtype.itemsize), np.uint8).view(values.dtype)[
            ..., 0
        ]
    elif values.dtype.kind == "c":
        values[...] = rng.integers(-9, 9, values.shape) + 1j * rng.integers(-9, 9, values.shape)
    elif values.dtype.kind == "b":
        values[...] = rng.integers(0, 2, values.shape)
    else:
        low = 0 if values.dtype.kind == "u" else -100
        values[...] = rng.integers(low, 100, values.shape)


def bits(values: npt.NDArray[Any]) -> bytes:
    """The values alone as bytes: without padding between members, in native byte order."""
    if values.dtype.names is None:
        return values.astype(values.dtype.newbyteorder("=")).tobytes()
    return b"".join(bits(np.ascontiguousarray(values[name])) for name in values.dtype.names)


def create(
    file: h5py.File,
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    raw_edges: bool = False,
    **options: Any,
) -> h5py.Dataset:
    """A dataset made by h5py; with `raw_edges`, partial chunks are stored unfiltered, for which h5py has no option."""
    if not raw_edges:
        return file.create_dataset(name, shape, dtype, **options)
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk(options["chunks"])
    library = ctypes.CDLL(h5py.h5p.__file__)
    assert library.H5Pset_chunk_opts(ctypes.c_int64(plist.id), ctypes.c_uint(UNFILTERED_EDGES)) >= 0
    _set_filters(plist, **options)
    limits = tuple(h5py.h5s.UNLIMITED if extent is None else extent for extent in options["maxshape"])
    space, kind = h5py.h5s.create_simple(shape, limits), h5py.h5t.py_create(dtype, logical=True)
    return h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, space, plist))


def _set_filters(plist: Any, **options: Any) -> None:
    """The filters of `create_dataset`, in its order."""
    compression = options.get("compression")
    if options.get("shuffle"):
        plist.set_shuffle()
    if compression == "gzip":
        plist.set_deflate(4)
    elif compression == "lzf":
        plist.set_filter(h5py.h5z.FILTER_LZF, h5py.h5z.FLAG_OPTIONAL)
    elif compression is not None:
        plist.set_filter(compression, h5py.h5z.FLAG_OPTIONAL, options["compression_opts"])
    if options.get("fletcher32"):
        plist.set_fletcher32()
    if "fillvalue" in options:
        plist.set_fill_value(np.asarray(options["fillvalue"]))


def write(path: Path, **datasets: Any) -> Path:
    """A file of datasets: arrays, or (array, options of `create_dataset`)."""
    with h5py.File(path, "w") as file:
        for name, given in datasets.items():
            data, options = given if isinstance(given, tuple) else (given, {})
            file.create_dataset(name, data=data, **options)
    return path
