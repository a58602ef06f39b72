"""What a plan comes to: the environment variables of the compile run, and what the key of a build is made of."""

from __future__ import annotations

import json
import platform
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from hpctrain.comm.builder import detect
from hpctrain.comm.builder.mpi import Mpi
from hpctrain.comm.builder.source import HOROVOD_SHA256, HOROVOD_VERSION, PATCH_VERSION

# Not part of the key: the versions behind these paths are.
_PATHS_AND_SPEED = {"MAKEFLAGS", "CXX", "HOROVOD_CUDA_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB"}


def build_flags(
    env: Mapping[str, str],
    torch: detect.Torch,
    compiler: detect.Compiler | None,
    cuda: detect.Cuda | None,
    nccl: detect.Nccl | None,
) -> dict[str, str]:
    """Environment variables of the compile run. Horovod's setup.py takes all its options from there."""
    flags = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITHOUT_GLOO": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HPCTRAIN_WITH_CUDA": "0" if cuda is None else "1",  # read by the patched source
    }
    flags |= {name: env[name] for name in ("CXXFLAGS", "LDFLAGS") if env.get(name)}  # CMake takes them up
    if compiler:
        flags["CXX"] = compiler.command
    if arch := env.get("HOROVOD_BUILD_ARCH_FLAGS") or _arch_flags():
        flags["HOROVOD_BUILD_ARCH_FLAGS"] = arch
    if cuda is None:
        return flags | {"HOROVOD_WITHOUT_NVTX": "1"}
    flags["HOROVOD_CUDA_HOME"] = str(cuda.nvcc.parent.parent)
    archs = sorted({int(name.split("_")[1]) for name in torch.cuda_archs if name.split("_")[1].isdigit()})
    if listed := env.get("HOROVOD_BUILD_CUDA_CC_LIST") or ",".join(str(arch) for arch in archs):
        flags["HOROVOD_BUILD_CUDA_CC_LIST"] = listed
    if nccl:
        flags |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED"}
        flags |= {"HOROVOD_NCCL_INCLUDE": str(nccl.include), "HOROVOD_NCCL_LIB": str(nccl.library.parent)}
    elif asked := env.get("HOROVOD_GPU_OPERATIONS"):
        flags["HOROVOD_GPU_OPERATIONS"] = asked
    return flags


def _arch_flags() -> str:
    """The three instruction sets Horovod has code for, where this CPU has them.

    Horovod would ask gcc for the machine's; saying it here puts it into the key, so that a wheel built on a
    newer node of a mixed cluster is never installed on an older one.
    """
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return ""
    return " ".join(f"-m{name}" for name in ("f16c", "avx", "fma") if name in cpu)


def build_ingredients(
    torch: detect.Torch,
    mpi: Mpi | None,
    compiler: detect.Compiler | None,
    cuda: detect.Cuda | None,
    nccl: detect.Nccl | None,
    standard: int,
    environment: dict[str, str],
) -> dict[str, str]:
    """All that decides what the wheel holds; the parallelism and the place of this environment do not."""
    flags = {name: value for name, value in environment.items() if name not in _PATHS_AND_SPEED}
    return {
        "horovod": f"{HOROVOD_VERSION} {HOROVOD_SHA256} patch {PATCH_VERSION}",
        "torch": f"{torch.version} cuda={torch.cuda} hip={torch.hip} abi={int(torch.cxx11_abi)}",
        "python": f"{sys.implementation.cache_tag} {sysconfig.get_config_var('EXT_SUFFIX')}",
        "mpi": "none" if mpi is None else f"{mpi.kind} {mpi.version} {_place_of(mpi)}",
        "cuda": "none" if cuda is None else cuda.version,
        "nccl": "none" if nccl is None else f"{nccl.version} {nccl.library.name}",
        "compiler": "none" if compiler is None else compiler.version,
        "standard": f"c++{standard}",
        "machine": f"{platform.machine()} {' '.join(platform.libc_ver())}",
        "flags": json.dumps(flags, sort_keys=True),
    }


def _place_of(mpi: Mpi) -> str:
    """A site's MPI is told apart from another by where it lies; the wheel is the same everywhere."""
    return "wheel" if mpi.in_environment else str(mpi.wrapper.resolve())
