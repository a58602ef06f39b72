"""`python -m benchmarks NAME`: measure on this machine, print a Markdown report, and keep the JSON if asked to."""

from __future__ import annotations

import dataclasses
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import report as reports
from benchmarks.environment import describe
from benchmarks.harness import Ended, Say
from benchmarks.report import Report
from hpctrain.errors import HpctrainError, UsageError

INTERRUPTED_CODE = 130

Quick = Annotated[
    bool, typer.Option("--quick", help="Few settings and repetitions: ends within two minutes.")
]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write every figure there.", show_default=False)
]
Markdown = Annotated[
    Path | None,
    typer.Option("--markdown", metavar="FILE", help="Write the report there.", show_default=False),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir", help="Measure on this filesystem; default: the temporary directory.", show_default=False
    ),
]
Ranks = Annotated[int, typer.Option("-n", "--ranks", min=1, max=4, help="MPI ranks that train.")]

app = typer.Typer(
    name="benchmarks",
    help="Measure on this machine: storage and precision settings, the reader, recovery, and staging.",
    epilog="Example: python -m benchmarks storage --quick --json storage.json --markdown storage.md",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def storage(
    quick: Quick = False,
    json: Json = None,
    markdown: Markdown = None,
    folder: Folder = None,
    ranks: Ranks = 2,
) -> None:
    """Codecs and chunk sizes: stored size, packing, the reader alone, and training.

    Example: python -m benchmarks storage --quick --dir /scratch/me
    """
    from benchmarks.storage import QUICK, StorageConfig, run_storage

    config = QUICK if quick else StorageConfig()
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, ranks=ranks))
    _benchmark(
        "storage", lambda work, report, say: run_storage(config, work, report, say), folder, json, markdown
    )


@app.command()
def precision(
    quick: Quick = False,
    json: Json = None,
    markdown: Markdown = None,
    folder: Folder = None,
    ranks: Ranks = 2,
) -> None:
    """Formats of compute (fp32, bf16), wire (fp32, fp16) and storage (float32, float16): speed and quality.

    Example: python -m benchmarks precision --quick --json precision.json
    """
    from benchmarks.precision import QUICK, PrecisionConfig, run_precision

    config = QUICK if quick else PrecisionConfig()
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, ranks=ranks))
    _benchmark(
        "precision",
        lambda work, report, say: run_precision(config, work, report, say),
        folder,
        json,
        markdown,
    )


@app.command()
def recovery(
    quick: Annotated[
        bool, typer.Option("--quick", help="Two rounds, and no lost node: ends within three minutes.")
    ] = False,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Loss of a rank, loss of a node, and a warning under Slurm: seconds until the run goes on, and steps lost.

    It brings up a Slurm cluster of its own on this machine (see `hpctrain minicluster`), and takes it down again:
    that needs root and packages of Debian or Ubuntu.

    Example: python -m benchmarks recovery --quick --json recovery.json
    """
    from benchmarks.recovery import QUICK, RecoveryConfig, run_recovery

    config = QUICK if quick else RecoveryConfig()
    _benchmark(
        "recovery", lambda work, report, say: run_recovery(config, work, report, say), None, json, markdown
    )


@app.command()
def reader(
    quick: Annotated[
        bool, typer.Option("--quick", help="Less data, few repetitions: ends within two minutes.")
    ] = False,
    json: Json = None,
    markdown: Markdown = None,
    folder: Folder = None,
) -> None:
    """The loader against the codec alone, h5py and other loaders, on pictures and fields: is every bar met?

    Peers (hidefix, MosaicML Streaming, WebDataset, zarr) are measured where they are installed.

    Example: python -m benchmarks reader --quick --json reader.json
    """
    from benchmarks.reader import QUICK, ReaderConfig, run_reader

    config = QUICK if quick else ReaderConfig()
    _benchmark(
        "reader", lambda work, report, say: run_reader(config, work, report, say), folder, json, markdown
    )


@app.command()
def staging(
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sets, few rounds and kills: ends within three minutes.")
    ] = False,
    kills: Annotated[
        int | None,
        typer.Option(
            min=0, help="Kills at random writes, of all programs together.", show_default="200, or 12"
        ),
    ] = None,
    json: Json = None,
    markdown: Markdown = None,
    folder: Folder = None,
) -> None:
    """Staging, backups and all that is to survive kills: rates, what is read from the shared directory, first batches.

    Jobs run on a Slurm cluster of its own on this machine (see `hpctrain minicluster`), over loop devices that are
    counted and slowed down: that needs root. Without it those parts are left out.

    Example: python -m benchmarks staging --quick --json staging.json
    """
    from benchmarks.staging import StagingConfig, quick_config, run_staging

    config = quick_config() if quick else StagingConfig()
    if kills is not None:
        config = dataclasses.replace(config, kills=kills)
    _benchmark(
        "staging", lambda work, report, say: run_staging(config, work, report, say), folder, json, markdown
    )


def _benchmark(
    name: str,
    run: Callable[[Path, Report, Say], None],
    folder: Path | None,
    json: Path | None,
    markdown: Path | None,
) -> None:
    """Run one benchmark in a folder that is removed afterwards, and hand its report out."""
    for target in (json, markdown):
        reports.check_target(target)
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--dir {folder}: there is no such folder; make it, or choose another")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: report what there is, and clean up
    with tempfile.TemporaryDirectory(prefix="hpctrain-benchmark-", dir=folder) as scratch:
        work = Path(scratch)
        report = Report(name, describe(work, ["python", "-m", "benchmarks", *sys.argv[1:]]), {})
        run(work, report, lambda text: typer.echo(text, err=True))
    typer.echo(report.markdown())
    if json is not None:
        reports.write(reports.as_json(report), json)
    if markdown is not None:
        reports.write(report.markdown(), markdown)
    if report.failure is not None:
        raise report.failure
    if report.ended is Ended.INTERRUPTED:
        raise typer.Exit(INTERRUPTED_CODE)


def main() -> None:
    """The command line; an error becomes one message on standard error and the exit code of its class."""
    try:
        app(prog_name="python -m benchmarks")
    except HpctrainError as error:
        typer.echo(f"benchmarks: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
