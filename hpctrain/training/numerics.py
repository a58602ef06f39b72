"""The numerics fingerprint: what the bits of a run depend on besides its description."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from hpctrain.durable import replace_file

Fingerprint = dict[str, Any]


def fingerprint(compute_threads: int, allreduce: str, order_of_sums: str) -> Fingerprint:
    """CPU or GPU model and flags, threads, library versions, and how gradients are summed.

    Args:
        compute_threads: torch threads per rank.
        allreduce: what was asked of MPI, in words.
        order_of_sums: what it does, as `GradientReducer.order_of_sums` found it; differs with the number of ranks.
    """
    from mpi4py import MPI

    return {
        "cpu": _cpu_model(),
        "cpu_flags": _cpu_flags(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "compute_threads": compute_threads,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "horovod": metadata.version("horovod"),
        "mpi": MPI.Get_library_version().split(",")[0].strip().rstrip("\0"),
        "allreduce": allreduce,
        "order_of_sums": order_of_sums,
        "python": platform.python_version(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def differences(a: Fingerprint, b: Fingerprint) -> list[str]:
    """Entries that differ, as `key: a -> b`."""
    return [
        f"{key}: {a.get(key)!r} -> {b.get(key)!r}" for key in sorted({*a, *b}) if a.get(key) != b.get(key)
    ]


def compare_with_run(run_dir: Path, mine: Fingerprint) -> list[str]:
    """Differences from the fingerprint the run began with, which the first attempt writes to `numerics.json`."""
    path = run_dir / "numerics.json"
    if path.exists():
        return differences(json.loads(path.read_text(encoding="utf-8")), mine)
    replace_file(path, json.dumps(mine, indent=1).encode())
    return []


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpu_flags() -> str:
    """A digest of the CPU's flags: long lists that matter only by being equal."""
    return xxhash.xxh3_64_hexdigest(" ".join(sorted(_cpuinfo("flags").split())).encode())


def _cpuinfo(key: str) -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next((line.partition(":")[2].strip() for line in info if line.startswith(key)), "")
    except OSError:
        return ""
