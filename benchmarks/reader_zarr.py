"""zarr 3: the chunks of our own set, read in the order that is kindest to it.

Random samples would decode a chunk for each; so whole chunks come in random order, and their samples are shuffled in a
window, as hpctrain does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.reader_base import Side
from benchmarks.reader_data import DataSet, random_order
from benchmarks.reader_frames import rows
from benchmarks.reader_torch import LoaderSide, files_below

LEVEL: Final = 5


def sides(data: DataSet) -> dict[str, Callable[[], Side]]:
    """One for each set."""
    return {f"zarr 3, {data.name}": lambda: ZarrSide(data)}


class Windows(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batches from shuffled windows; every worker has every n-th chunk of the epoch's order."""

    def __init__(self, path: Path, data: DataSet) -> None:
        self._path, self._data, self.epoch = path, data, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """One epoch; the array is opened in the process that reads it."""
        import zarr

        array: Any = zarr.open_array(str(self._path), mode="r")
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        size, window = self._data.chunk_samples, max(1, self._data.window_samples // self._data.chunk_samples)
        num_chunks = -(-self._data.num_samples // size)
        chunks = random_order(num_chunks, self.epoch)[first::step].tolist()
        self.epoch += 1
        for at in range(0, len(chunks), window):
            yield from self._shuffled(array, chunks[at : at + window])

    def _shuffled(self, array: Any, chunks: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        size = self._data.chunk_samples
        parts = [array[chunk * size : (chunk + 1) * size] for chunk in chunks]
        ids = np.concatenate(
            [np.arange(len(part)) + chunk * size for chunk, part in zip(chunks, parts, strict=True)]
        )
        values = np.concatenate(parts)
        order = random_order(len(ids), self.epoch)
        for at in range(0, len(ids), self._data.batch):
            taken = order[at : at + self._data.batch]
            yield torch.from_numpy(ids[taken]), torch.from_numpy(values[taken])


class ZarrSide(LoaderSide):
    """Written when it is opened."""

    def __init__(self, data: DataSet) -> None:
        import zarr
        from zarr.codecs import BloscCodec

        super().__init__(data)
        self._path = data.folder / "zarr"
        array: Any = zarr.create_array(
            str(self._path),
            shape=(data.num_samples, *data.sample_shape),
            chunks=(data.chunk_samples, *data.sample_shape),
            dtype=data.dtype,
            compressors=BloscCodec(cname="lz4", clevel=LEVEL, shuffle="shuffle"),
        )
        count = data.chunk_samples * max(1, 1024 // data.chunk_samples)
        for number, part in enumerate(rows(data, count)):
            array[number * count : number * count + len(part)] = part

    def files(self) -> list[Path]:
        """A file per chunk."""
        return files_below(self._path)

    def make_loader(self, workers: dict[str, Any]) -> Any:
        """The batches come made."""
        return DataLoader(Windows(self._path, self.data), batch_size=None, **workers)
