"""From the loader's NumPy batches to the Task's torch batches, without copies on the CPU."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from hpctrain.data.loader import Fields
from hpctrain.h5.reader import Ragged
from hpctrain.training.task import Batch


def to_torch(samples: NDArray[np.int64], fields: Fields, device: torch.device) -> Batch:
    """The batch as a Task gets it: tensors that share memory with the arrays where the device is the CPU."""
    batch: Batch = {
        "id": torch.tensor(samples, device=device)
    }  # a copy: the loop hashes `samples` after the Task ran
    for name, value in fields.items():
        if isinstance(value, Ragged):
            batch[name] = {"values": _tensor(value.values, device), "offsets": _tensor(value.offsets, device)}
        else:
            batch[name] = _tensor(value, device)
    return batch


def _tensor(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(array).to(device)


def hash_samples(step: int, lane: int, samples: NDArray[np.int64]) -> int:
    """64-bit hash of what a lane saw in a step. Summed over lanes, it does not depend on who computed which lane."""
    prefix = step.to_bytes(8, "little") + lane.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(prefix + samples.astype("<i8").tobytes())


def chain_samples(digest: str, step: int, sample_hash: int) -> str:
    """The samples digest after one more step."""
    return xxhash.xxh3_128_hexdigest(
        bytes.fromhex(digest) + step.to_bytes(8, "little") + sample_hash.to_bytes(8, "little")
    )
