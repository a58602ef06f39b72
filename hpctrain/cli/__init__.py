"""The command line: one thin module per verb, which imports what it needs when it is called.

Nothing here imports torch, mpi4py or Horovod: MPI_Init on a login node aborts on some systems, and help must come at
once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hpctrain import __version__
from hpctrain.cli.archive import archive
from hpctrain.cli.attempts import attempts
from hpctrain.cli.backup import backup
from hpctrain.cli.build_horovod import build_horovod
from hpctrain.cli.data import data
from hpctrain.cli.demo import demo
from hpctrain.cli.env_archive import env_archive
from hpctrain.cli.inspect import inspect
from hpctrain.cli.minicluster import minicluster
from hpctrain.cli.pack import pack
from hpctrain.cli.recall import recall
from hpctrain.cli.restore import restore
from hpctrain.cli.run import run
from hpctrain.cli.stage import stage
from hpctrain.cli.status import status
from hpctrain.cli.verify import verify
from hpctrain.errors import HpctrainError
from hpctrain.resilience import faults

app = typer.Typer(
    name="hpctrain",
    help="Pack data, train with Horovod over MPI, and end with the weights the run would have had.",
    epilog="Example: hpctrain run RUN.toml -n 2",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _verb in (
    pack,
    inspect,
    data,
    run,
    stage,
    status,
    attempts,
    demo,
    verify,
    backup,
    restore,
    archive,
    recall,
    build_horovod,
):
    app.command()(_verb)
for _name, _verbs in (("env-archive", env_archive), ("minicluster", minicluster)):
    app.add_typer(_verbs, name=_name)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hpctrain {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; an error becomes one message on standard error and the exit code of its class."""
    try:
        faults.configure(rank=0, attempt=0)
        app(arguments, prog_name="hpctrain")
    except HpctrainError as error:
        typer.echo(f"hpctrain: {error}", err=True)
        sys.exit(error.exit_code)
