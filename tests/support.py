"""What several tests share: mpirun, small packed sets, and runs of the real command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.h5.packed import PackedSet, open_packed
from hpctrain.h5.ragged import Ragged

ROOT = Path(__file__).parents[1]


def mpirun(ranks: int) -> list[str]:
    """The mpirun of this environment, oversubscribed; root is allowed in a container."""
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
        os.environ[name] = os.environ[f"{name}_CONFIRM"] = "1"
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else "mpirun"
    return [launcher, "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]


def small_arrays(num_samples: int, seed: int = 0) -> dict[str, Any]:
    """Fields of every kind, whose values tell the sample id: image (6, 5), label, and ragged text."""
    numbers = np.arange(num_samples)
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 200, (num_samples, 6, 5), dtype=np.uint8)
    text = Ragged.from_text(f"sample {i} " + "x" * (i % 7) for i in numbers)
    return {"image": image, "label": numbers % 3, "number": numbers.astype(np.int64), "text": text}


def small_set(folder: Path, num_samples: int, chunk_samples: int, seed: int = 0, **options: Any) -> PackedSet:
    """A packed set of `small_arrays`; several shards for more than about 400 samples."""
    options = {"shard_mib": 0.02, **options}
    pack_arrays(
        small_arrays(num_samples, seed),
        folder,
        PackOptions(chunk_samples=chunk_samples, **options),
        ("a", "b", "c"),
    )
    return open_packed(folder)


def hpctrain(
    arguments: Sequence[str | Path], timeout_s: float = 120, **extra: Any
) -> subprocess.CompletedProcess[str]:
    """The real command line, as its own process."""
    command = [sys.executable, "-m", "hpctrain.cli", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **extra.pop("env", {})}
    return subprocess.run(
        command, timeout=timeout_s, capture_output=True, text=True, env=env, check=False, **extra
    )


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
