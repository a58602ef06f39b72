"""The compile run: pip, CMake and make over Horovod's source, followed through its log."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.comm.builder.causes import likely_cause
from hpctrain.comm.builder.plan import Plan
from hpctrain.errors import BuildError
from hpctrain.resilience.signals import parent_death_request

POLL_S = 0.5
LAST_LINES = 15
# A make that prints nothing for so long is not compiling: one unit takes a minute on a slow node.
SILENCE_LIMIT_S = 1800.0
# Waits for the end of the pipe whose other end only hpctrain has, then kills the process group $1 until none of it is
# left. The tries are counted because the dead stay where nobody collects them (a container without an init).
_GUARD = """read -r _; tries=0
while [ $tries -lt 50 ] && kill -s KILL -- "-$1" 2>/dev/null; do tries=$((tries + 1)); sleep 0.1; done"""
_PROGRESS = re.compile(
    rb"\[ *(\d+)%\] (?:Building|Linking) \w+ (?:CUDA )?(?:object|shared library|library)? ?(\S+)"
)


@dataclass(frozen=True)
class Progress:
    """How far a build is: seconds since its start, percent done, and what is compiled now."""

    elapsed_s: float
    percent: int
    unit: str


def find_cmake(prefix: Path, env: Mapping[str, str]) -> str:
    """CMake of the environment (pinned below 4), else of PATH. Raises `BuildError` without any."""
    search = f"{prefix / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
    cmake = shutil.which("cmake", path=search)
    if cmake is None:
        raise BuildError(
            f"no cmake in {prefix}/bin or on PATH: {sys.executable} -m pip install 'cmake>=3.13,<4'"
        )
    return cmake


def compile_wheel(
    plan: Plan,
    source: Path,
    scratch: Path,
    log: Path,
    env: Mapping[str, str],
    report: Callable[[Progress], None],
    lock: int | None = None,
) -> Path:
    """Build the wheel of a patched source tree into `scratch`, everything said going to `log`.

    `report` is called about twice a second. If this process is killed, the compilers are ended, and until then the
    lock (its descriptor) stays held. Raises `BuildError` with the log's last lines and the likely cause.
    """
    prefix = Path(sys.prefix)
    wheels = scratch / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--verbose", "--no-deps"]
    command += ["--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(wheels), str(source)]
    environment = build_environment(plan, scratch, prefix, env)
    with log.open("wb") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.writelines(f"  {name}={value}\n".encode() for name, value in sorted(plan.environment.items()))
        file.flush()
        # A session of its own, so that an interruption ends make and the compilers with it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
            preexec_fn=parent_death_request(),  # for the moment in which there is no guard yet
        )
    with _guarded(process, lock):
        code = _follow(process, log, report)
    built = sorted(wheels.glob("horovod-*.whl"))
    if code != 0 or len(built) != 1:
        raise BuildError(failure_message(log, code))
    return built[0]


def build_environment(plan: Plan, scratch: Path, prefix: Path, env: Mapping[str, str]) -> dict[str, str]:
    """The variables of the compile run: the user's, less what would disturb it, with the plan's."""
    # make's own variables come along when this runs below `make`; a foreign HOROVOD_* would beat the plan
    # unseen.
    dropped = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "GNUMAKEFLAGS", "HOROVOD_CMAKE"}
    kept = {
        name: value for name, value in env.items() if name not in dropped and not name.startswith("HOROVOD_")
    }
    environment = kept | plan.environment
    environment["PATH"] = f"{prefix / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
    environment["HOROVOD_CMAKE"] = str(_cmake_wrapper(plan, scratch, find_cmake(prefix, env)))
    if plan.nccl:
        environment["HOROVOD_NCCL_LIB"] = str(_nccl_folder(plan.nccl.library, scratch))
    return environment


def _cmake_wrapper(plan: Plan, scratch: Path, cmake: str) -> Path:
    """A script in CMake's place that adds what Horovod's setup.py has no option for.

    It names the MPI compiler (CMake's search would take any it finds first), and without CUDA it keeps CMake
    from looking for nvcc, which costs time and, with a broken toolkit, the build.
    """
    extra = []
    if plan.mpi and plan.mpi.kind != "Cray MPICH":  # there the compiler itself is the wrapper
        extra.append(f"-DMPI_CXX_COMPILER={plan.mpi.wrapper}")
    if plan.cuda is None:
        extra += ["-DCMAKE_CUDA_COMPILER=NOTFOUND", "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON"]
    path = scratch / "cmake"
    run = shlex.quote(cmake)
    path.write_text(
        f'#!/bin/sh\ncase "$1" in --*) exec {run} "$@" ;; esac\nexec {run} "$@" {shlex.join(extra)}\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


def _nccl_folder(library: Path, scratch: Path) -> Path:
    """A folder where the linker finds `libnccl.so`: torch brings its copy as libnccl.so.2 only."""
    if library.name == "libnccl.so":
        return library.parent
    folder = scratch / "nccl"
    folder.mkdir()
    (folder / "libnccl.so").symlink_to(library)
    return folder


def _follow(process: subprocess.Popen[bytes], log: Path, report: Callable[[Progress], None]) -> int:
    start_s = heard_s = time.monotonic()
    percent, unit = 0, "configuring"
    with log.open("rb") as file:
        while True:
            code = process.poll()
            text = file.read()
            if text:
                heard_s = time.monotonic()
            for match in _PROGRESS.finditer(text):
                percent, unit = int(match[1]), Path(match[2].decode(errors="replace")).name.removesuffix(".o")
            report(Progress(time.monotonic() - start_s, percent, unit))
            if code is not None:
                return code
            if time.monotonic() - heard_s > SILENCE_LIMIT_S:
                raise BuildError(
                    f"the build has said nothing for {SILENCE_LIMIT_S:.0f} s and was ended; log: {log}; "
                    "is a filesystem hanging? Run again, or with TMPDIR on a local disk"
                )
            time.sleep(POLL_S)


@contextlib.contextmanager
def _guarded(process: subprocess.Popen[bytes], lock: int | None) -> Iterator[None]:
    """End the session of `process` on the way out, or, if this process is killed, from a guard in a session of its own.

    The guard, and not the compilers, inherits the lock: pip and setuptools hand no descriptors on.
    """
    command = ["/bin/sh", "-c", _GUARD, "hpctrain-guard", str(process.pid)]
    quiet = subprocess.DEVNULL
    kept = () if lock is None else (lock,)
    with contextlib.ExitStack() as ending:
        ending.callback(_end_session, process)
        guard = ending.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=quiet,
                stderr=quiet,
                start_new_session=True,
                pass_fds=kept,
            )
        )
        ending.callback(guard.kill)  # first: once the session has ended, its number may be another's
        yield


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End pip and all that it started. Its process group is its session's: nobody else is in it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failure_message(log: Path, code: int) -> str:
    """What the user is told of a failed build: the log, its last lines, the likely cause, the mend."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    # pip wraps a failure into many lines of its own: where the log has errors, the first ones tell more than
    # its end.
    errors = [line for line in lines if re.search(r"\berror\b|Killed|No space", line, re.IGNORECASE)]
    shown = errors[:LAST_LINES] or lines[-LAST_LINES:]
    tail = "\n".join(f"  | {line.strip()[:200]}" for line in shown)
    cause = likely_cause(text)
    said = (
        f"likely cause: {cause.cause}\nwhat to do: {cause.mend}"
        if cause
        else "the cause is not a known one: see the log"
    )
    return f"Horovod was not built (pip ended with {code})\nlog: {log}\n{tail}\n{said}"
