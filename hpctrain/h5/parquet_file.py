"""One Parquet file: what its footer says, and its row groups as Arrow tables; what is damaged is bad data."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from hpctrain.errors import DataError, StorageError, UsageError
from hpctrain.h5.each import SourceChangedError
from hpctrain.h5.optional import needed

_MEND: Final = "write the file again"
T = TypeVar("T")


class ParquetFile:
    """Raises `DataError`, naming the file, for one that is damaged; `StorageError` when reading fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._key = _reading(path, lambda: _key_of(path))
        with _reading(path, self._open) as file:
            self.schema, self._metadata = file.schema_arrow, file.metadata

    @property
    def group_rows(self) -> list[int]:
        """Rows of each row group."""
        return [self._metadata.row_group(i).num_rows for i in range(self._metadata.num_row_groups)]

    def group_bytes(self, group: int) -> int:
        """Of all columns, uncompressed."""
        return int(self._metadata.row_group(group).total_byte_size)

    def read(self, group: int, columns: Sequence[str] | None = None) -> Any:
        """A row group as an Arrow table; a file is opened for each, for one is not safe to share between threads."""
        if _reading(self.path, lambda: _key_of(self.path)) != self._key:
            raise SourceChangedError(f"{self.path}: changed since this run looked at it; run again")
        with _reading(self.path, self._open) as file:
            return _reading(self.path, lambda: file.read_row_group(group, columns=columns, use_threads=False))

    def _open(self) -> Any:
        parquet = needed("pyarrow.parquet", self.path)
        metadata = getattr(self, "_metadata", None)
        return parquet.ParquetFile(self.path, metadata=metadata, page_checksum_verification=True)


def _key_of(path: Path) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ino


def _reading(path: Path, read: Callable[[], T]) -> T:
    """What `read` gives; raises `DataError` for what is damaged, `StorageError` when the filesystem fails."""
    try:
        return read()
    except (ValueError, NotImplementedError, LookupError, MemoryError, TypeError) as error:  # of Arrow
        if isinstance(error, (DataError, UsageError)):
            raise
        raise DataError(f"{path}: cannot be read as Parquet: {error}; {_MEND}") from error
    except OSError as error:
        if error.errno is None:  # a damaged page
            raise DataError(f"{path}: cannot be read as Parquet: {error}; {_MEND}") from error
        raise StorageError(
            f"{path}: cannot be read: {error.strerror or error}; check the filesystem"
        ) from error
