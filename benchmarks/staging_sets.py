"""The sets that `staging` moves: bytes that no codec makes smaller, in stored chunks of a known size."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import h5py
import numpy as np
import numpy.typing as npt

from hpctrain.h5.pack import PackOptions, pack_arrays

KIB: Final = 1 << 10
MIB: Final = 1 << 20
FIELD: Final = "x"
SAMPLE_BYTES: Final = 16 * KIB
_SHARD_MIB: Final = 100.0

Samples = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class SetSpec:
    """A set: `num_chunks` stored chunks of `chunk_bytes`, of which `changed` are others than those of the same `seed`.

    `shard_mib`: about how large its files are.
    """

    num_chunks: int
    chunk_bytes: int
    changed: int = 0
    seed: int = 1
    shard_mib: float = _SHARD_MIB

    @property
    def chunk_samples(self) -> int:
        """Samples in a chunk."""
        return self.chunk_bytes // SAMPLE_BYTES

    @property
    def num_bytes(self) -> int:
        """Of all chunks."""
        return self.num_chunks * self.chunk_bytes

    def samples(self) -> Samples:
        """The samples; shape (samples, bytes of one). Changed chunks are spread evenly."""
        values = np.random.default_rng(self.seed).integers(
            0, 256, (self.num_chunks * self.chunk_samples, SAMPLE_BYTES), np.uint8
        )
        for number in range(self.changed):
            chunk = number * self.num_chunks // self.changed
            values[chunk * self.chunk_samples : (chunk + 1) * self.chunk_samples] ^= 0xA5
        return values

    def changed_by(self, changed: int) -> SetSpec:
        """The same set with so many other chunks."""
        return dataclasses.replace(self, changed=changed)


def write_set(spec: SetSpec, root: Path, *, overwrite: bool = False) -> Path:
    """Pack it as the folder `root`, uncompressed; returns `root`."""
    options = PackOptions(
        codec="none", chunk_samples=spec.chunk_samples, shard_mib=spec.shard_mib, overwrite=overwrite
    )
    pack_arrays({FIELD: spec.samples()}, root, options)
    return root


def write_user_file(spec: SetSpec, path: Path) -> Path:
    """The same samples as an HDF5 file of a user, which has no digests; returns `path`."""
    values = spec.samples()
    with h5py.File(path, "w") as file:
        file.create_dataset(FIELD, data=values, chunks=(spec.chunk_samples, SAMPLE_BYTES))
    return path


def files_of(root: Path) -> list[Path]:
    """All files of a set, in order."""
    return sorted(path for path in root.rglob("*") if path.is_file())


def size_of(root: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in files_of(root))
