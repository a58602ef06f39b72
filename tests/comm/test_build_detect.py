"""Looking at a machine. Shell scripts stand in for compilers and toolkits that are not installed here."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from hpctrain.comm.builder import detect
from hpctrain.comm.builder import mpi as build_mpi
from hpctrain.errors import BuildError

SYSTEM_PATH = "/usr/bin:/bin"

OPEN_MPI = """
case "$1" in
  --showme:version) echo "mpicxx: Open MPI 4.1.4 (Language: C++)" ;;
  -show) echo "g++ -I/opt/ompi/include -pthread -L/opt/ompi/lib -lmpi_cxx -lmpi" ;;
  *) exit 1 ;;
esac
"""
MPICH = """
case "$1" in
  -v) echo "mpicxx for MPICH version 4.0.2" ;;
  -show) echo "g++ -I/opt/mpich/include -L/opt/mpich/lib -lmpichcxx -lmpich" ;;
  *) exit 1 ;;
esac
"""
INTEL = """
case "$1" in
  -v) echo "mpiicpc for the Intel(R) MPI Library 2021.10 for Linux*" ;;
  -show) echo "icpc -I/opt/intel/mpi/include -L/opt/intel/mpi/lib/release -lmpicxx -lmpi" ;;
  *) exit 1 ;;
esac
"""
MVAPICH = """
case "$1" in
  -v) echo "mpicxx for MVAPICH2 version 2.3.7" ;;
  -show) echo "g++ -L/opt/mvapich/lib -lmpicxx -lmpi" ;;
  *) exit 1 ;;
esac
"""
CRAY = """
case "$1" in
  --cray-print-opts=all) echo "-I/opt/cray/pe/mpich/8.1.27/ofi/gnu/9.1/include -lmpi_gnu_91" ;;
  *) exit 1 ;;
esac
"""
UNNAMED = 'test "$1" = -show && echo "g++ -L/opt/x/lib -lmpi"'
PLAIN = 'test "$1" = --version && echo "g++ (GNU) 13.2.0"'


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("body", "kind", "version"),
    [
        (OPEN_MPI, "Open MPI", "4.1.4"),
        (MPICH, "MPICH", "4.0.2"),
        (INTEL, "Intel MPI", "2021.10"),
        (MVAPICH, "MVAPICH", "2.3.7"),
        (CRAY, "Cray MPICH", "8.1.27"),
        (UNNAMED, "an MPI that does not name itself", "unknown"),
    ],
)
def test_says_which_mpi_a_wrapper_belongs_to(tmp_path: Path, body: str, kind: str, version: str) -> None:
    wrapper = script(tmp_path / "site" / "mpicxx", body)
    mpi = build_mpi.find_mpi({"MPICXX": str(wrapper), "PATH": SYSTEM_PATH}, tmp_path / "env")
    assert mpi is not None
    assert (mpi.kind, mpi.version, mpi.wrapper, mpi.in_environment) == (kind, version, wrapper, False)


def test_library_folders_come_from_the_wrapper(tmp_path: Path) -> None:
    wrapper = script(tmp_path / "mpicxx", OPEN_MPI)
    mpi = build_mpi.find_mpi({"MPICXX": str(wrapper), "PATH": SYSTEM_PATH}, tmp_path / "env")
    assert mpi is not None
    assert mpi.library_dirs == ("/opt/ompi/lib",)


def test_a_named_wrapper_that_is_none_is_refused(tmp_path: Path) -> None:
    plain = script(tmp_path / "g++", PLAIN)
    script(tmp_path / "bin" / "mpicxx", OPEN_MPI)
    with pytest.raises(BuildError, match=rf"MPICXX={plain}.*name the site's mpicxx"):
        build_mpi.find_mpi({"MPICXX": str(plain), "PATH": f"{tmp_path}/bin:{SYSTEM_PATH}"}, tmp_path / "env")
    with pytest.raises(BuildError, match="MPICXX=/no/such/mpicxx"):
        build_mpi.find_mpi({"MPICXX": "/no/such/mpicxx", "PATH": SYSTEM_PATH}, tmp_path / "env")


def test_order_of_the_search(tmp_path: Path) -> None:
    named = script(tmp_path / "named" / "mpicxx", OPEN_MPI)
    script(tmp_path / "cc" / "mpicc", MPICH)
    by_cc = script(tmp_path / "cc" / "mpicxx", MPICH)
    own = script(tmp_path / "env" / "bin" / "mpicxx", OPEN_MPI)
    on_path = script(tmp_path / "path" / "mpicxx", INTEL)
    env = {"MPICXX": str(named), "CC": f"{tmp_path}/cc/mpicc -O2", "PATH": f"{on_path.parent}:{SYSTEM_PATH}"}
    found = []
    for gone in (None, "MPICXX", "CC"):
        env.pop(gone, None) if gone else None
        mpi = build_mpi.find_mpi(env, tmp_path / "env")
        found.append(mpi and mpi.wrapper)
    own_mpi = build_mpi.find_mpi(env, tmp_path / "env")
    own.unlink()
    last = build_mpi.find_mpi(env, tmp_path / "env")
    assert found == [named, by_cc, own]
    assert own_mpi is not None
    assert own_mpi.in_environment
    assert last is not None
    assert last.wrapper == on_path


def test_a_plain_cc_is_passed_over(tmp_path: Path) -> None:
    script(tmp_path / "gcc", PLAIN)
    assert build_mpi.find_mpi({"CC": f"{tmp_path}/gcc", "PATH": str(tmp_path)}, tmp_path / "env") is None


def test_cray_wrapper_is_found_by_its_environment(tmp_path: Path) -> None:
    script(tmp_path / "CC", CRAY)
    env = {"PATH": str(tmp_path), "CRAYPE_VERSION": "2.7.20"}
    mpi = build_mpi.find_mpi(env, tmp_path / "env")
    assert mpi is not None
    assert mpi.kind == "Cray MPICH"
    del env["CRAYPE_VERSION"]
    assert build_mpi.find_mpi(env, tmp_path / "env") is None


def test_cuda_home_comes_before_path(tmp_path: Path) -> None:
    for name, version in (("home", "12.8"), ("path", "13.0")):
        script(
            tmp_path / name / "bin" / "nvcc",
            f'echo "Cuda compilation tools, release {version}, V{version}.88"',
        )
    env = {"CUDA_HOME": str(tmp_path / "home"), "PATH": f"{tmp_path}/path/bin:{SYSTEM_PATH}"}
    cuda = detect.find_cuda(env)
    assert cuda is not None
    assert (cuda.version, cuda.nvcc) == ("12.8", tmp_path / "home" / "bin" / "nvcc")
    del env["CUDA_HOME"]
    cuda = detect.find_cuda(env)
    assert cuda is not None
    assert cuda.version == "13.0"


def test_nccl_needs_header_and_library(tmp_path: Path) -> None:
    half, whole = tmp_path / "half", tmp_path / "whole"
    for home in (half, whole):
        (home / "include").mkdir(parents=True)
        (home / "include" / "nccl.h").write_text(
            "#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 5\n"
        )
    (whole / "lib").mkdir()
    (whole / "lib" / "libnccl.so.2").touch()
    nccl = detect.find_nccl([half, whole])
    assert nccl is not None
    assert (nccl.version, nccl.library) == ("2.27.5", whole / "lib" / "libnccl.so.2")
    assert detect.find_nccl([half]) is None


@pytest.mark.parametrize(
    ("aten", "everything", "expected"),
    [("17", "17", 17), ("14", "17", 17), ("20", "17", 20), (None, None, 17)],
)
def test_cxx_standard_is_the_highest_that_torch_insists_on(
    tmp_path: Path, aten: str | None, everything: str | None, expected: int
) -> None:
    for name, number in (("ATen/ATen.h", aten), ("torch/csrc/api/include/torch/all.h", everything)):
        header = tmp_path / name
        header.parent.mkdir(parents=True, exist_ok=True)
        guard = (
            f"#error C++{number} or later compatible compiler is required to use PyTorch.\n" if number else ""
        )
        header.write_text(f"#pragma once\n{guard}")
    assert detect.cxx_standard_of(tmp_path)[0] == expected


def test_the_installed_torch() -> None:
    torch = detect.find_torch()
    assert torch.version.startswith("2.")
    assert torch.cxx_standard >= 17
    assert "refuses anything older" in torch.cxx_reason


def test_no_torch_says_what_to_do(tmp_path: Path) -> None:
    bare = script(tmp_path / "python", f'exec {sys.executable} -I -S "$@"')  # -S: without site-packages
    with pytest.raises(BuildError, match=r"No module named 'torch'.*make setup"):
        detect.find_torch(str(bare))


def test_a_command_that_does_not_answer_counts_as_missing(tmp_path: Path) -> None:
    slow = script(tmp_path / "mpicxx", "exec sleep 60")
    start_s = time.monotonic()
    assert detect.output_of([slow], timeout_s=0.3) is None
    assert time.monotonic() - start_s < 10


def test_compiler_knows_its_standards(tmp_path: Path) -> None:
    old = script(tmp_path / "g++", 'case "$*" in *c++20*) exit 1 ;; *) echo "g++ (GNU) 8.5.0" ;; esac')
    compiler = detect.find_compiler({"CXX": str(old), "PATH": SYSTEM_PATH})
    assert compiler is not None
    assert detect.accepts_standard(compiler, 17)
    assert not detect.accepts_standard(compiler, 20)
    assert detect.find_compiler({"PATH": str(tmp_path / "empty")}) is None


def mpi_at(folder: Path, **changes: str) -> build_mpi.Mpi:
    described = {"kind": "Open MPI", "version": "5.0.11", "found_by": "PATH"} | changes
    return build_mpi.Mpi(folder / "mpicxx", in_environment=False, library_dirs=("/opt/lib",), **described)


@pytest.mark.parametrize(
    ("kind", "version", "library"),
    [
        ("Open MPI", "5.0.11", "Open MPI v5.0.11, package: x"),
        ("MPICH", "4.0.2", "MPICH Version:      4.0.2"),
        ("Intel MPI", "2021.10", "Intel(R) MPI Library 2021.10 for Linux* OS"),
        ("Cray MPICH", "8.1.27", "MPI VERSION    : CRAY MPICH version 8.1.27.26 (ANL base 3.4a2)"),
    ],
)
def test_the_same_mpi_is_accepted(tmp_path: Path, kind: str, version: str, library: str) -> None:
    loaded = build_mpi.Loaded(library, ("/lib/libmpi.so",))
    assert build_mpi.mismatch(mpi_at(tmp_path, kind=kind, version=version), loaded) is None


@pytest.mark.parametrize(
    ("loaded", "said"),
    [
        (build_mpi.Loaded(error="RuntimeError: cannot load MPI library"), "export LD_LIBRARY_PATH=/opt/lib"),
        (build_mpi.Loaded(error="ImportError: libmpi.so.12: cannot open"), "--no-binary mpi4py mpi4py=="),
        (build_mpi.Loaded("Open MPI v4.1.4", ("/lib/libmpi.so.40",)), "mpi4py loads Open MPI v4.1.4"),
        (build_mpi.Loaded("MPICH Version: 5.0.11", ("/lib/libmpi.so.12",)), "mpi4py loads MPICH"),
        (
            build_mpi.Loaded("Open MPI v5.0.11", ("/a/libmpi.so.40", "/b/libmpi.so.40")),
            "exactly one is needed",
        ),
    ],
)
def test_another_mpi_is_explained(tmp_path: Path, loaded: build_mpi.Loaded, said: str) -> None:
    problem = build_mpi.mismatch(mpi_at(tmp_path), loaded)
    assert problem is not None
    assert said in problem


def test_what_mpi4py_loads_here() -> None:
    loaded = build_mpi.find_loaded()
    assert loaded.error == ""
    assert len(loaded.files) == 1
    assert Path(loaded.files[0]).exists()


def test_an_mpi4py_that_cannot_be_imported_is_reported(tmp_path: Path) -> None:
    bare = script(tmp_path / "python", f'exec {sys.executable} -I -S "$@"')
    assert "No module named 'mpi4py'" in build_mpi.find_loaded(str(bare)).error
