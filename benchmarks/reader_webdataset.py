"""WebDataset: tar shards of one Blosc frame per sample, decoded in the workers, shuffled by shard and buffer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.reader_base import Side
from benchmarks.reader_data import DataSet
from benchmarks.reader_frames import decoded, frames
from benchmarks.reader_torch import LoaderSide, files_below

NUM_SHARDS: Final = 16
"""Divisible by every number of workers that is tried."""


def sides(data: DataSet) -> dict[str, Callable[[], Side]]:
    """One for each set."""
    return {f"WebDataset, {data.name}": lambda: WebSide(data)}


class WebSide(LoaderSide):
    """Written when it is opened."""

    def __init__(self, data: DataSet) -> None:
        super().__init__(data)
        self._folder = data.folder / "webdataset"
        self._urls = self._write()

    def files(self) -> list[Path]:
        """The tar files."""
        return files_below(self._folder)

    def make_loader(self, workers: dict[str, Any]) -> Any:
        """As its documentation has it: shards shuffled, samples in a buffer, batches made in the workers."""
        import webdataset

        window, data = self.data.window_samples, self.data

        def sample(found: dict[str, Any]) -> tuple[int, Any]:
            return int(found["__key__"]), decoded(data, found["blosc"])

        dataset = (
            webdataset.WebDataset(self._urls, shardshuffle=NUM_SHARDS, empty_check=False)
            .shuffle(window)
            .map(sample)
            .batched(data.batch)
        )
        return webdataset.WebLoader(dataset, batch_size=None, **workers)

    def _write(self) -> list[str]:
        import webdataset

        self._folder.mkdir()
        per_shard = -(-self.data.num_samples // NUM_SHARDS)
        urls = [
            str(self._folder / f"{number:03}.tar") for number in range(-(-self.data.num_samples // per_shard))
        ]
        writer: Any = None
        for number, frame in enumerate(frames(self.data)):
            if number % per_shard == 0:
                if writer is not None:
                    writer.close()
                writer = webdataset.TarWriter(urls[number // per_shard])
            writer.write({"__key__": f"{number:08}", "blosc": frame})
        writer.close()
        return urls
