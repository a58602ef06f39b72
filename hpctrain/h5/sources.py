"""What can be packed: `Source`, arrays and `.npy` files, and which kind of source a path is.

A source knows its fields and how many samples it has, and reads any range of them; it is read from several
threads. Pictures are in `images`, tables of pictures and text in `tables`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, UsageError
from hpctrain.h5.packed import OFFSETS_SUFFIX, Field
from hpctrain.h5.ragged import Ragged

Columns = dict[str, npt.NDArray[Any] | Ragged]

_FIELD_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_RESERVED: Final = "id"  # batches carry the global sample ids under this name


class Source(Protocol):
    """Samples to pack, in a fixed order."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The fields, in the order in which they are stored."""
        ...

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes that `label` numbers; None where it numbers none."""
        ...

    @property
    def num_samples(self) -> int:
        """How many samples there are."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know, such as files that were left out."""
        ...

    def read(self, start: int, stop: int) -> Columns:
        """Samples [start, stop) of every field; called from several threads at once."""
        ...

    def num_values(self, name: str) -> int:
        """Values of a ragged field over all samples."""
        ...


class ArraySource:
    """Arrays, in memory or memory-mapped: dense ones of equal first dimension, and `Ragged` ones.

    Raises `DataError` for lengths that differ and for types that cannot be packed, `UsageError` for names
    that cannot be fields.
    """

    def __init__(
        self,
        arrays: Mapping[str, npt.NDArray[Any] | Ragged],
        classes: Sequence[str] | None = None,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self._arrays = dict(arrays)
        self.classes = None if classes is None else tuple(classes)
        self.warnings = warnings
        self.fields = {name: _field_of(name, array) for name, array in arrays.items()}
        self.num_samples = _common_length({name: len(array) for name, array in arrays.items()})

    def read(self, start: int, stop: int) -> Columns:
        """Samples [start, stop); dense ones as little-endian copies."""
        return {
            name: array.take(slice(start, stop))
            if isinstance(array, Ragged)
            else np.ascontiguousarray(array[start:stop], self.fields[name].dtype)
            for name, array in self._arrays.items()
        }

    def num_values(self, name: str) -> int:
        """Values of a ragged field over all samples."""
        array = self._arrays[name]
        return len(array.values) if isinstance(array, Ragged) else 0


def open_source(path: Path, size: int | None = None, gray: bool = False) -> Source:
    """The source that a path is: a `.npy` file or a folder of them, a table, or a folder of class
    sub-folders.

    `size` (pixels) and `gray` apply to pictures. Raises `UsageError` for a path that is none of these, and
    `DataError` for one that is but cannot be packed (empty, files missing, lengths that differ).
    """
    from hpctrain.h5.images import check_size, open_image_folder  # here: Pillow is not needed for arrays
    from hpctrain.h5.tables import TABLE_SUFFIXES, open_table

    if size is not None:
        check_size(size)
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or folder")
    if path.is_dir():
        entries = sorted(item for item in path.iterdir() if not item.name.startswith("."))
        tables = [item for item in entries if item.suffix.lower() in TABLE_SUFFIXES]
        arrays = [item for item in entries if item.suffix.lower() == ".npy"]
        if len(tables) > 1:
            raise UsageError(
                f"{path} holds several tables ({', '.join(t.name for t in tables)}); name one as SRC"
            )
        if tables:
            return open_table(tables[0], size, gray)
        if arrays:
            _refuse_picture_options(size, gray, path)
            return open_arrays(arrays, [item.name for item in entries if item not in arrays])
        return open_image_folder(path, size, gray)
    if path.suffix.lower() in TABLE_SUFFIXES:
        return open_table(path, size, gray)
    if path.suffix.lower() == ".npy":
        _refuse_picture_options(size, gray, path)
        return ArraySource({"data": load_array(path)})
    raise UsageError(
        f"{path} cannot be packed; SRC is a folder with a sub-folder of images per class, a table (.csv or .tsv) with "
        "a column `file`, a .npy file, or a folder of .npy files"
    )


def open_arrays(paths: Sequence[Path], others: Sequence[str] = ()) -> ArraySource:
    """`.npy` files of equal first dimension, memory-mapped; the fields are named after the files.

    `others`: names of files beside them that are left out. Errors as for `ArraySource` and `load_array`.
    """
    left_out = f"{len(others)} other files are left out (first: {others[0]})" if others else ""
    return ArraySource(
        {path.stem: load_array(path) for path in paths}, warnings=(left_out,) if left_out else ()
    )


def load_array(path: Path) -> npt.NDArray[Any]:
    """Map a `.npy` file; nothing in it is unpickled. Raises `DataError` for what is not a whole array of numbers."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path}: cannot be read as an array of numbers: {error}; "
            "save it again with numpy.save, without objects in it"
        ) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise DataError(f"{path}: holds several arrays (.npz); save each as a .npy file of its own")
    return array


def check_field_name(name: str) -> None:
    """Raise `UsageError` for a name that cannot be a field."""
    if not _FIELD_NAME.fullmatch(name) or name.endswith(OFFSETS_SUFFIX) or name == _RESERVED:
        raise UsageError(
            f"{name!r} cannot name a field: a letter, then up to 63 letters, digits, '_', '.' or '-'; "
            f"not ending in {OFFSETS_SUFFIX!r}, and not {_RESERVED!r}, which numbers the samples; rename it"
        )


def _field_of(name: str, array: npt.NDArray[Any] | Ragged) -> Field:
    check_field_name(name)
    if isinstance(array, Ragged):
        if array.values.dtype not in (np.uint8, np.int32):
            raise DataError(f"ragged field {name!r} has type {array.values.dtype}; it can be uint8 or int32")
        return Field(name, "ragged", array.values.dtype.newbyteorder("<"), ())
    dtype = np.dtype(np.uint8) if array.dtype == np.bool_ else array.dtype.newbyteorder("<")
    if dtype.kind not in "uif" or dtype.itemsize > 8:
        raise DataError(
            f"field {name!r} has type {array.dtype}; "
            "only booleans, integers and floats of at most 64 bits can be packed"
        )
    if array.ndim == 0 or 0 in array.shape[1:]:
        raise DataError(
            f"field {name!r} has shape {array.shape}; it needs a first dimension of samples, and none of 0"
        )
    return Field(name, "dense", dtype, array.shape[1:])


def _common_length(lengths: Mapping[str, int]) -> int:
    first = next(iter(lengths), "")
    for name, length in lengths.items():
        if length != lengths[first]:
            raise DataError(
                f"{first!r} has {lengths[first]} samples but {name!r} has {length}; "
                "all fields need the same first dimension"
            )
    return lengths.get(first, 0)


def _refuse_picture_options(size: int | None, gray: bool, path: Path) -> None:
    if size is not None or gray:
        raise UsageError(f"--size and --gray are for pictures, but {path} is arrays; leave them out")
