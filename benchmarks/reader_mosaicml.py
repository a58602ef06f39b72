"""MosaicML Streaming: MDS shards of one Blosc frame per sample, decoded in the workers, in its own shuffled order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reader_base import Side
from benchmarks.reader_data import DataSet
from benchmarks.reader_frames import decoded, frames
from benchmarks.reader_torch import LoaderSide, files_below


def sides(data: DataSet) -> dict[str, Callable[[], Side]]:
    """One for each set."""
    return {f"MosaicML Streaming, {data.name}": lambda: MosaicSide(data)}


class MosaicSide(LoaderSide):
    """Written when it is opened; the shards are local, so that nothing is copied."""

    def __init__(self, data: DataSet) -> None:
        from streaming import MDSWriter

        super().__init__(data)
        self._folder = data.folder / "mds"
        with MDSWriter(out=str(self._folder), columns={"id": "int", "values": "bytes"}) as writer:
            for number, frame in enumerate(frames(data)):
                writer.write({"id": number, "values": frame})

    def files(self) -> list[Path]:
        """The shards."""
        return files_below(self._folder)

    def make_loader(self, workers: dict[str, Any]) -> Any:
        """Its dataset behind a `DataLoader`."""
        import torch
        from streaming import StreamingDataset
        from torch.utils.data import DataLoader

        data = self.data

        class Decoded(StreamingDataset):  # type: ignore[misc, unused-ignore]
            """Samples as tensors."""

            def __getitem__(self, at: int) -> tuple[int, torch.Tensor]:
                found = super().__getitem__(at)
                return found["id"], torch.from_numpy(decoded(data, found["values"]))

        dataset = Decoded(local=str(self._folder), shuffle=True, batch_size=data.batch)
        return DataLoader(dataset, data.batch, **workers)
