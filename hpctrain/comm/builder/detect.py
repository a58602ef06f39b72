"""What the machine offers to build Horovod with: torch, CUDA, NCCL, a C++ compiler (MPI: `mpi`).

Every function takes the environment variables and the prefix it looks at, runs small commands with a
deadline and returns a frozen description; nothing is decided here (`hpctrain.comm.builder.plan` does). torch
is asked in a process of its own: whoever plans a build sits on a login node.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import BuildError

COMMAND_TIMEOUT_S = 60.0
TORCH_TIMEOUT_S = 300.0  # a cold import from a shared filesystem takes minutes
DEFAULT_CXX_STANDARD = 17

_TORCH_QUESTION = """
import json, pathlib, sys
import torch
try:
    import nvidia.nccl
    nccl = list(nvidia.nccl.__path__)[0]
except ImportError:
    nccl = None
flags = torch._C._cuda_getArchFlags() if torch.version.cuda else None
json.dump({
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
    "cxx11_abi": bool(torch._C._GLIBCXX_USE_CXX11_ABI), "cuda_archs": (flags or "").split(),
    "include": str(pathlib.Path(torch.__file__).parent / "include"), "nccl": nccl,
}, sys.stdout)
"""


@dataclass(frozen=True)
class Torch:
    """The installed torch: what Horovod is compiled against."""

    version: str
    cuda: str | None
    hip: str | None
    cxx11_abi: bool
    cuda_archs: tuple[str, ...]
    cxx_standard: int
    cxx_reason: str
    nccl_home: Path | None


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit, known by its nvcc."""

    nvcc: Path
    version: str


@dataclass(frozen=True)
class Nccl:
    """NCCL's header and library."""

    include: Path
    library: Path
    version: str


@dataclass(frozen=True)
class Compiler:
    """The C++ compiler: its command and the first line it says about itself."""

    command: str
    version: str


def output_of(command: Sequence[str | Path], timeout_s: float = COMMAND_TIMEOUT_S) -> str | None:
    """What a command prints (both streams), or None if it fails, is missing or does not answer in time."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def find_torch(python: str = sys.executable) -> Torch:
    """The torch that `python` imports. Raises `BuildError` when there is none."""
    try:
        done = subprocess.run(
            [python, "-c", _TORCH_QUESTION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TORCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"{python}: torch did not import within {TORCH_TIMEOUT_S:.0f} s; "
            "is the environment on a filesystem that hangs? Put it elsewhere (HPCTRAIN_VENV)"
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BuildError(
            f"{python}: torch cannot be imported ({last}); install it before Horovod: `make setup`"
        )
    answer = json.loads(done.stdout.splitlines()[-1])
    standard, reason = cxx_standard_of(Path(answer["include"]))
    return Torch(
        version=answer["version"],
        cuda=answer["cuda"],
        hip=answer["hip"],
        cxx11_abi=answer["cxx11_abi"],
        cuda_archs=tuple(answer["cuda_archs"]),
        cxx_standard=standard,
        cxx_reason=reason,
        nccl_home=Path(answer["nccl"]) if answer["nccl"] else None,
    )


def cxx_standard_of(include: Path) -> tuple[int, str]:
    """The C++ standard that torch's headers insist on, and where they say so.

    torch guards its two main headers with `#error C++NN or later compatible compiler is required`; the
    highest NN counts. Headers without a guard (none is known) get `DEFAULT_CXX_STANDARD`.
    """
    found: list[tuple[int, str]] = []
    for name in ("ATen/ATen.h", "torch/csrc/api/include/torch/all.h"):
        header = include / name
        if header.is_file():
            text = header.read_text(encoding="utf-8", errors="replace")
            found += [(int(number), name) for number in re.findall(r"#error.*\bC\+\+(\d\d)\b", text)]
    if not found:
        return DEFAULT_CXX_STANDARD, "torch's headers name none; this is the usual one"
    standard, name = max(found)
    return standard, f"torch's {name} refuses anything older"


def which(command: str, env: Mapping[str, str]) -> Path | None:
    """Where the first word of a command lies (CC may carry flags), or None."""
    words = command.split()
    found = shutil.which(words[0], path=env.get("PATH", os.defpath)) if words else None
    return Path(found) if found else None


def find_cuda(env: Mapping[str, str]) -> Cuda | None:
    """The CUDA toolkit of $HOROVOD_CUDA_HOME, $CUDA_HOME or $CUDA_PATH, else of PATH or /usr/local/cuda."""
    homes = [env[name] for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH") if env.get(name)]
    candidates = [Path(home, "bin", "nvcc") for home in homes]
    candidates += [path for path in [which("nvcc", env)] if path] + [Path("/usr/local/cuda/bin/nvcc")]
    for nvcc in candidates:
        if match := re.search(r"release ([\d.]+)", output_of([nvcc, "--version"]) or ""):
            return Cuda(nvcc=nvcc, version=match[1])
    return None


def find_nccl(homes: Sequence[Path]) -> Nccl | None:
    """NCCL in the first of `homes` that holds both `nccl.h` and a library."""
    for home in homes:
        header = home / "include" / "nccl.h"
        libraries = [
            path
            for folder in ("lib", "lib64", f"lib/{os.uname().machine}-linux-gnu")
            for path in sorted((home / folder).glob("libnccl.so*"))
        ]
        if header.is_file() and libraries:
            text = header.read_text(encoding="utf-8", errors="replace")
            numbers = [
                re.search(rf"#define\s+NCCL_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")
            ]
            version = ".".join(match[1] for match in numbers if match)
            return Nccl(include=header.parent, library=libraries[0], version=version or "unknown")
    return None


def find_compiler(env: Mapping[str, str]) -> Compiler | None:
    """The C++ compiler: $CXX, else the first of c++, g++, clang++ on PATH (CMake's own order)."""
    for command in [env["CXX"]] if env.get("CXX") else ["c++", "g++", "clang++"]:
        path = which(command, env)
        if path and (said := output_of([path, "--version"])):
            return Compiler(command=str(path), version=said.splitlines()[0])
    return None


def accepts_standard(compiler: Compiler, standard: int) -> bool:
    """Whether the compiler knows `-std=c++NN`."""
    command = [compiler.command, f"-std=c++{standard}", "-fsyntax-only", "-x", "c++", "/dev/null"]
    return output_of(command) is not None
