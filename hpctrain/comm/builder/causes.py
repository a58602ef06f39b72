"""Why a build failed: patterns of the log, most telling first, with the cause and the mend."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A known way to fail; `pattern` is searched in the log, `mend` is what the user does next."""

    pattern: str
    cause: str
    mend: str


CAUSES = (
    Cause(
        r"Killed signal terminated program cc1plus|signal 9|virtual memory exhausted|out of memory "
        r"allocating",
        "the compiler ran out of memory",
        "run again with -j 1, on a node with more memory if need be (login nodes often have limits)",
    ),
    Cause(
        r"No space left on device|Disk quota exceeded",
        "no space left where it is built or kept",
        "make room, or set TMPDIR (building) and XDG_CACHE_HOME (keeping) to larger filesystems",
    ),
    Cause(
        r"#error.*C\+\+(\d\d)|requires? (?:at least )?C\+\+(\d\d)|only available with .-std=c\+\+(\d\d)",
        "torch's headers need a newer C++ standard than was used",
        "run again with --cxx-standard 20 and a compiler that knows it (gcc 11 or newer)",
    ),
    Cause(
        r"fatal error: Python\.h: No such file|Python\.h: No such file or directory",
        "Python's headers are missing",
        "install them (Debian: python3-dev), or make the environment from another Python (PYTHON=...)",
    ),
    Cause(
        r"Could NOT find MPI|FindMPI\.cmake:\d+|mpicxx: (?:command )?not found|fatal error: mpi\.h: No such file",
        "CMake could not use the MPI compiler",
        "load the site's MPI module or set MPICXX to its mpicxx, and check that `mpicxx -show` works",
    ),
    Cause(
        r"undefined (?:reference to|symbol:?) [`']?(?:MPI|PMPI|ompi)_",
        "the MPI headers and the MPI library are not of one installation",
        "load one MPI module only, set MPICXX to its mpicxx, and run again",
    ),
    Cause(
        r"Could NOT find NCCL|fatal error: nccl\.h: No such file",
        "NCCL's header or library was not found",
        "set HOROVOD_NCCL_HOME to a folder with include/nccl.h and lib/libnccl.so, or use --cpu-only",
    ),
    Cause(
        r"nvcc fatal|unsupported GNU version|Unsupported gpu architecture",
        "nvcc does not go with this host compiler or with torch's GPU architectures",
        "load the CUDA toolkit that torch was built for (CUDA_HOME), or set HOROVOD_BUILD_CUDA_CC_LIST, or "
        "use --cpu-only",
    ),
    Cause(
        r"Compatibility with CMake < 3\.\d+ has been removed",
        "CMake is too new for Horovod 0.28.1",
        "install one below 4 into the environment: python -m pip install 'cmake<4'",
    ),
    Cause(
        r"CMake 3\.\d+(?:\.\d+)? or higher is required|Could not find a recent CMake",
        "CMake is too old",
        "install a newer one into the environment: python -m pip install 'cmake>=3.13,<4'",
    ),
    Cause(
        r"No CMAKE_CXX_COMPILER could be found|is not a full path to an existing compiler|is not able to "
        r"compile a simple test",
        "there is no working C++ compiler",
        "install g++ (Debian: build-essential) or load a compiler module; CXX names another",
    ),
    Cause(
        r"gmake: (?:command )?not found|CMAKE_MAKE_PROGRAM is not set|unable to find a build program",
        "make is missing",
        "install make (Debian: build-essential)",
    ),
    Cause(
        r"No module named '?(setuptools|wheel|packaging|cffi|cloudpickle|psutil|yaml)|invalid command "
        r"'bdist_wheel'",
        "a Python package that the build needs is missing",
        "python -m pip install setuptools wheel packaging cffi cloudpickle psutil PyYAML",
    ),
)


def likely_cause(log: str) -> Cause | None:
    """The first known cause that the log shows, or None."""
    return next((cause for cause in CAUSES if re.search(cause.pattern, log, re.IGNORECASE)), None)
