"""Which kind of source a path is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, HpctrainError, StorageError, UsageError
from hpctrain.h5.manifest import MANIFEST
from hpctrain.h5.npz import ARRAY_ERRORS, load_npz
from hpctrain.h5.options import SourceOptions
from hpctrain.h5.sources import ArraySource, Source, paired
from hpctrain.h5.tar_members import SPLITS, is_tar

HDF5_SUFFIXES: Final = frozenset({".h5", ".hdf5", ".hdf", ".he5", ".nc", ".nc4"})
_ZARR_FILES: Final = ("zarr.json", ".zgroup", ".zarray")  # of version 3, and of version 2


def open_source(path: Path, how: SourceOptions | None = None) -> Source:
    """The source that a path is: a table, a folder of class sub-folders of pictures, `.npy` or `.npz` arrays, HDF5
    files, a Zarr store, Parquet files, tar archives (WebDataset shards, or of class folders; `x.tar/train` is the
    folder `train` in one), a packed set. Of most kinds a folder of several is one source.

    Raises `UsageError` for a path that is none of these or options that do not fit it, `DataError` for one that is but
    cannot be packed (empty, damaged, files missing, lengths that differ, beyond the bounds of `how`), and
    `StorageError` for what cannot be listed or read.
    """
    try:
        return _open(path, how or SourceOptions())
    except OSError as error:
        if isinstance(error, HpctrainError):
            raise
        where = error.filename or path
        raise StorageError(
            f"{where}: cannot be read: {error.strerror or error}; check permissions and filesystem"
        ) from error


def _open(path: Path, how: SourceOptions) -> Source:
    # Here: Pillow is not needed for arrays, nor h5py for pictures.
    from hpctrain.h5.image_folder import open_image_folder
    from hpctrain.h5.picture import check_size
    from hpctrain.h5.tables import TABLE_SUFFIXES, open_table

    if how.size is not None:
        check_size(how.size)
    if how.gray and how.keep_encoded:
        raise UsageError(
            "--gray makes other pixels, but --keep-encoded keeps the files as they are; leave out one"
        )
    if not path.exists():
        return _open_inside(path, how)
    if path.is_dir() and (path.suffix == ".zarr" or any((path / name).is_file() for name in _ZARR_FILES)):
        _refuse_picture_options(how, path)
        from hpctrain.h5.zarr_source import open_zarr

        return open_zarr(path, how)
    listed = (
        sorted(item for item in path.iterdir() if not item.name.startswith(".")) if path.is_dir() else [path]
    )
    tables = _with_suffix(listed, TABLE_SUFFIXES)
    if len(tables) > 1:
        raise UsageError(
            f"{path} holds several tables ({', '.join(t.name for t in tables)}); name one as SRC"
        )
    if tables:
        _refuse_fields(how, path)
        return open_table(tables[0], how)
    found = _open_data(path, listed, how) or _open_records(path, listed, how)
    if found is not None:
        return found
    if path.is_dir():
        _refuse_fields(how, path)
        return open_image_folder(path, how)
    raise UsageError(
        f"{path} cannot be packed; SRC is a folder with a sub-folder of images per class, a table (.csv or .tsv) with "
        "a column `file`, a .npy or .npz file, a folder of .npy files, an HDF5 or Parquet file, a tar archive (of "
        "WebDataset samples or of class folders; .tar, .tar.gz, .tar.bz2 or .tar.xz), a folder of those, a Zarr store, "
        "or a packed set"
    )


def _open_inside(path: Path, how: SourceOptions) -> Source:
    """A folder in a tar archive."""
    for archive in path.parents:
        if is_tar(archive) and archive.is_file():
            from hpctrain.h5.tar_source import open_tars

            _refuse_fields(how, path)
            return open_tars([archive], how, path.relative_to(archive).as_posix())
    raise UsageError(f"{path}: there is no such file or folder")


def _open_records(path: Path, listed: Sequence[Path], how: SourceOptions) -> Source | None:
    """The source, where a path is files of samples, pictures among them."""
    tables = _with_suffix(listed, {".parquet"})
    archives = [] if tables else [item for item in listed if is_tar(item)]
    files = tables or archives
    if not files:
        return None
    _refuse_fields(how, path)
    warnings = _left_out([item.name for item in listed if item not in files]) + _joined_splits(files)
    if archives:
        from hpctrain.h5.tar_source import open_tars

        return open_tars(archives, how, warnings=warnings)
    from hpctrain.h5.parquet_source import open_parquet

    return open_parquet(tables, how, warnings)


def _joined_splits(paths: Sequence[Path]) -> tuple[str, ...]:
    """A warning where the names of the files say that they are different parts of a data set."""
    splits = sorted({word for path in paths for word in path.name.lower().split("-")[:1] if word in SPLITS})
    if len(splits) < 2:
        return ()
    return (
        f"{paths[0].parent}: {' and '.join(splits)} are joined; to keep them apart, pack each from a folder of its own",
    )


def _open_data(path: Path, listed: Sequence[Path], how: SourceOptions) -> Source | None:
    """The source, where a path is data and not pictures."""
    packed = (path / MANIFEST).is_file()
    arrays, archives = _with_suffix(listed, {".npy"}), _with_suffix(listed, {".npz"})
    files = _with_suffix(listed, HDF5_SUFFIXES)
    if not (packed or arrays or files or archives == [path]):
        return None
    _refuse_picture_options(how, path)
    if packed or not files or arrays:
        _refuse_fields(how, path)
    if packed:
        from hpctrain.h5.packed_source import PackedSource

        return PackedSource(path)
    if arrays == [path]:
        return ArraySource({"data": load_array(path)})
    if arrays:
        return open_arrays(arrays, [item.name for item in listed if item not in arrays])
    if files:
        from hpctrain.h5.hdf5_fields import choose_fields
        from hpctrain.h5.hdf5_source import Hdf5Source

        wanted, warnings = choose_fields(files[0], how.fields)
        left_out = _left_out([item.name for item in listed if item not in files])
        return Hdf5Source(files, wanted, (*left_out, *warnings), lenient=not how.fields)
    return ArraySource(paired(load_npz(path)))


def _with_suffix(paths: Sequence[Path], suffixes: Collection[str]) -> list[Path]:
    return [item for item in paths if item.suffix.lower() in suffixes]


def _left_out(names: Sequence[str]) -> tuple[str, ...]:
    return (f"{len(names)} other files are left out (first: {names[0]})",) if names else ()


def open_arrays(paths: Sequence[Path], others: Sequence[str] = ()) -> ArraySource:
    """`.npy` files of equal first dimension, memory-mapped; the fields are named after the files.

    `others`: names of files beside them that are left out. Errors as for `ArraySource` and `load_array`.
    """
    arrays = {path.stem: load_array(path) for path in paths}
    return ArraySource(paired(arrays), warnings=_left_out(others))


def load_array(path: Path) -> npt.NDArray[Any]:
    """Map a `.npy` file; nothing in it is unpickled. Raises `DataError` for what is not a whole array of numbers."""
    try:
        with np.errstate(over="raise"):  # a product of extents
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, *ARRAY_ERRORS) as error:
        raise DataError(
            f"{path}: cannot be read as an array of numbers: {error}; "
            "save it again with numpy.save, without objects in it"
        ) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise DataError(f"{path}: holds several arrays (.npz); save each as a .npy file of its own")
    return array


def _refuse_picture_options(how: SourceOptions, path: Path) -> None:
    if how.size is not None or how.gray or how.keep_encoded:
        raise UsageError(
            f"--size, --gray and --keep-encoded are for pictures, but {path} is arrays; leave them out"
        )


def _refuse_fields(how: SourceOptions, path: Path) -> None:
    if how.fields:
        raise UsageError(f"--field is for HDF5 files and Zarr stores, but {path} is neither; leave it out")
