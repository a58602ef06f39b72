"""The run description: one TOML file, checked against these models.

Every field has a unit (in its name or text), a bound and a default. Unknown keys are refused with the nearest right
name. Fields marked `WEIGHTS` change the weights a run ends with: a restart that differs in one of them is refused
(`weight_differences`).
"""

from __future__ import annotations

import difflib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hpctrain.errors import ConfigError

WEIGHTS = {"changes_weights": True}

Launcher = Literal["auto", "mpirun", "srun-pmix", "srun-pmi2", "cray_shasta"]
LAUNCHERS: tuple[str, ...] = get_args(Launcher)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskSection(_Section):
    """What is trained: a class the user writes (see `hpctrain.training.task.Task`)."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
            description="The Task, as `module:Class`; the module is looked up beside the run description first.",
            json_schema_extra=WEIGHTS,
        ),
    ]
    options: Annotated[
        dict[str, Any],
        Field(description="Keyword arguments of the Task's constructor.", json_schema_extra=WEIGHTS),
    ] = {}


class DataSection(_Section):
    """Which packed sets are read, and in which order."""

    train: Annotated[Path, Field(description="Packed set to train on (a folder made by `hpctrain pack`).")]
    evaluate: Annotated[Path | None, Field(description="Packed set for evaluation; none: no evaluation.")] = (
        None
    )
    order: Annotated[
        Literal["global"],
        Field(
            description="`global`: every epoch's permuted samples are cut into lanes anew.",
            json_schema_extra=WEIGHTS,
        ),
    ] = "global"
    window_chunks: Annotated[
        int,
        Field(
            ge=1,
            description="Shuffle window of a lane, in chunks: wider mixes better and holds more chunks in memory.",
            json_schema_extra=WEIGHTS,
        ),
    ] = 64
    io_threads: Annotated[
        int,
        Field(
            ge=0,
            le=256,
            description="Threads that read and decode, per rank; 0: the rank's share of cores less `compute_threads`.",
        ),
    ] = 0
    prefetch_steps: Annotated[
        int, Field(ge=1, le=1024, description="Steps whose batches are prepared ahead.")
    ] = 4
    evaluate_batch: Annotated[
        int,
        Field(ge=1, description="Samples per evaluation batch; metrics are combined by weight."),
    ] = 512


class LanesSection(_Section):
    """The logical workers: fixed for the life of a run, whatever the number of ranks."""

    num_lanes: Annotated[
        int, Field(ge=1, le=65536, description="Logical workers.", json_schema_extra=WEIGHTS)
    ]
    lane_batch: Annotated[
        int,
        Field(ge=1, description="Samples per lane and step (the micro-batch).", json_schema_extra=WEIGHTS),
    ]


class TrainSection(_Section):
    """The optimisation."""

    epochs: Annotated[
        int, Field(ge=1, description="Passes over the training set.", json_schema_extra=WEIGHTS)
    ]
    seed: Annotated[
        int,
        Field(
            ge=0,
            lt=2**63,
            description="Seed of the order, of the initial weights and of every random number.",
            json_schema_extra=WEIGHTS,
        ),
    ] = 1
    learning_rate: Annotated[
        float, Field(gt=0, description="Peak learning rate.", json_schema_extra=WEIGHTS)
    ] = 1e-3
    weight_decay: Annotated[
        float,
        Field(
            ge=0,
            description="AdamW's weight decay, where the Task makes no optimizer.",
            json_schema_extra=WEIGHTS,
        ),
    ] = 0.01
    warmup_steps: Annotated[
        int, Field(ge=0, description="Steps of linear warm-up.", json_schema_extra=WEIGHTS)
    ] = 0
    min_lr_fraction: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="The cosine ends at this fraction of the peak; 1: constant after the warm-up.",
            json_schema_extra=WEIGHTS,
        ),
    ] = 0.0
    clip_norm: Annotated[
        float | None,
        Field(
            gt=0,
            description="Gradients are scaled to this global norm at most; none: not clipped.",
            json_schema_extra=WEIGHTS,
        ),
    ] = None
    on_nonfinite: Annotated[
        Literal["stop", "skip"],
        Field(
            description="A loss or gradient that is not finite: stop the run, or skip that update on all ranks.",
            json_schema_extra=WEIGHTS,
        ),
    ] = "stop"
    evaluate_every_epochs: Annotated[
        int, Field(ge=0, description="Evaluate every so many epochs; 0: only at the end.")
    ] = 0


class PrecisionSection(_Section):
    """Number formats. The storage format is chosen when packing (`hpctrain pack --store`)."""

    compute: Annotated[
        Literal["fp32", "bf16"],
        Field(description="Format of forward and backward (`bf16`: autocast).", json_schema_extra=WEIGHTS),
    ] = "fp32"
    wire: Annotated[
        Literal["fp32", "fp16"],
        Field(
            description="Format of gradients on the network; `fp16` rounds means below 6e-8 to 0.",
            json_schema_extra=WEIGHTS,
        ),
    ] = "fp32"
    compute_threads: Annotated[
        int,
        Field(
            ge=1,
            le=1024,
            description="torch threads per rank; part of what decides the bits.",
            json_schema_extra=WEIGHTS,
        ),
    ] = 1


class CommSection(_Section):
    """Gradient reduction by Horovod over MPI."""

    bucket_mib: Annotated[
        float,
        Field(
            gt=0,
            le=1024,
            description="Size of a gradient bucket: one allreduce each, in MiB.",
            json_schema_extra=WEIGHTS,
        ),
    ] = 4.0
    allreduce: Annotated[
        Literal["auto", "ring"],
        Field(
            description="MPI's algorithm: its own choice (recorded), or the ring, forced.",
            json_schema_extra=WEIGHTS,
        ),
    ] = "auto"
    digest_every_steps: Annotated[
        int,
        Field(ge=1, description="Every so many steps the ranks compare a digest of their weights."),
    ] = 50


class StagingSection(_Section):
    """The node-local copy of the packed sets."""

    dir: Annotated[
        Path | None,
        Field(
            description="Directory on the node's SSD; a private sub-directory is made there. None: read the shared "
            "files. Environment variables and `~` are expanded on the node."
        ),
    ] = None


class CheckpointSection(_Section):
    """When the training state is saved, and how many copies stay."""

    interval_steps: Annotated[int, Field(ge=0, description="Save every so many steps; 0: not by steps.")] = 0
    interval_s: Annotated[float, Field(ge=0, description="Save every so many seconds; 0: not by time.")] = (
        600.0
    )
    keep: Annotated[int, Field(ge=1, description="Committed checkpoints that stay.")] = 3


class ResilienceSection(_Section):
    """Deadlines and budgets of the supervisor."""

    hang_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            description="A phase without a sign of life for this long is a hang: stacks, end records, relaunch.",
        ),
    ] = 300.0
    start_timeout_s: Annotated[
        float, Field(gt=0, description="The same for start-up, restore and saving, in seconds.")
    ] = 600.0
    max_attempts: Annotated[int, Field(ge=1, description="Launches of one `hpctrain run`, at most.")] = 100
    max_no_progress: Annotated[
        int,
        Field(ge=1, description="Stop after so many attempts in a row that committed no newer step."),
    ] = 3
    backoff_s: Annotated[
        float,
        Field(
            ge=0,
            description="First wait before a relaunch after a failure of storage or launcher; doubles up to 60 s.",
        ),
    ] = 1.0
    leave_margin_s: Annotated[
        float,
        Field(
            ge=1,
            description="Under Slurm: seconds before the end of the job that stay free for ending the ranks and for "
            "requeueing. The state is saved so long before them as two saves and two steps have taken.",
        ),
    ] = 30.0


class ClusterSection(_Section):
    """How ranks are placed inside a Slurm job; without one, only `launcher` matters."""

    launcher: Annotated[
        Launcher,
        Field(
            description="What starts the ranks. `auto`: `srun-pmix` in a Slurm job, else `mpirun`. Also "
            "`$HPCTRAIN_LAUNCHER`."
        ),
    ] = "auto"
    spare_nodes: Annotated[
        int,
        Field(
            ge=0, description="Nodes of the job that stay idle until one fails; ask sbatch for so many more."
        ),
    ] = 0
    min_ranks: Annotated[
        int,
        Field(
            ge=0,
            description="After a node failure go on with so many ranks at least, other lanes per rank (last bits of "
            "the weights may differ); 0: only with all.",
        ),
    ] = 0
    container: Annotated[
        list[str],
        Field(
            description='Command in front of every rank, such as `["apptainer", "exec", "--nv", "image.sif"]`. Also '
            "`$HPCTRAIN_CONTAINER`, its words separated by blanks."
        ),
    ] = []
    srun_options: Annotated[list[str], Field(description="Further options for srun.")] = []
    walltime_s: Annotated[
        float,
        Field(ge=0, description="Time limit of the job where Slurm cannot be asked for it; 0: not known."),
    ] = 0.0


class RunConfig(_Section):
    """One run."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[\w.-]{1,64}$",
            description="Name of the run; the run directory is `runs/NAME` unless `--dir` says otherwise.",
        ),
    ]
    task: TaskSection
    data: DataSection
    lanes: LanesSection
    train: TrainSection
    precision: PrecisionSection = PrecisionSection()
    comm: CommSection = CommSection()
    staging: StagingSection = StagingSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resilience: ResilienceSection = ResilienceSection()
    cluster: ClusterSection = ClusterSection()

    @model_validator(mode="after")
    def _checks_across_fields(self) -> RunConfig:
        if self.checkpoint.interval_steps == 0 and self.checkpoint.interval_s == 0:
            raise ValueError(
                "checkpoint.interval_steps and checkpoint.interval_s are both 0: nothing would ever be saved; set one"
            )
        return self

    def resolved(self, base: Path) -> RunConfig:
        """The same description with data paths made absolute, relative ones taken from `base`."""
        evaluate = self.data.evaluate
        data = self.data.model_copy(
            update={
                "train": (base / self.data.train).resolve(),
                "evaluate": None if evaluate is None else (base / evaluate).resolve(),
            }
        )
        staging = self.staging
        if staging.dir is not None and not str(staging.dir).startswith(("$", "~")):
            staging = staging.model_copy(update={"dir": (base / staging.dir).resolve()})
        return self.model_copy(update={"data": data, "staging": staging})


def load_run(path: Path) -> RunConfig:
    """Read and check a run description.

    Paths in it are relative to the file itself. Raises `ConfigError` with the file, the key, the value and the bound.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the run description: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return parse_run(raw, source=str(path)).resolved(path.parent)


def parse_run(raw: dict[str, Any], source: str = "run description") -> RunConfig:
    """Check a description that is already a dictionary; raises `ConfigError` naming every wrong key."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise ConfigError(f"{source}: " + "; ".join(lines)) from error


def dump_run(config: RunConfig) -> str:
    """The description as TOML text; `parse_run` of it gives the same description."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def reference_markdown() -> str:
    """Every field as a Markdown table: key, default, bounds, meaning; `*` marks those that change the weights."""
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    return "\n".join(rows + _reference_rows(RunConfig))


def _reference_rows(section: type[BaseModel], prefix: str = "") -> list[str]:
    rows: list[str] = []
    for key, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            rows += _reference_rows(field.annotation, f"{prefix}{key}.")
            continue
        mark = "*" if isinstance(field.json_schema_extra, dict) else ""
        default = (
            "required" if field.is_required() else f"`{json.dumps(field.default)}`".replace("`null`", "none")
        )
        rows.append(f"| `{prefix}{key}`{mark} | {default} | {field.description} |")
    return rows


def weight_differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Keys that differ between two descriptions and change the weights, as `key: old -> new`."""
    before, after = dict(_weight_fields(old)), dict(_weight_fields(new))
    return [f"{key}: {before[key]!r} -> {after[key]!r}" for key in before if before[key] != after[key]]


def _weight_fields(section: BaseModel, prefix: str = "") -> list[tuple[str, Any]]:
    fields: list[tuple[str, Any]] = []
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, BaseModel):
            fields += _weight_fields(value, f"{prefix}{key}.")
        elif isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("changes_weights"):
            fields.append((prefix + key, value))
    return fields


def _explain(item: Any) -> str:
    """One pydantic error as `key: what is wrong, and the mend`."""
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = _keys_of(item["loc"][:-1])
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(sorted(known))}"
        return f"unknown key {key!r}; {hint}"
    if item["type"] == "missing":
        return f"{key!r} is missing; add it"
    message = item["msg"].removeprefix("Value error, ")
    return f"{key} = {item['input']!r}: {message}" if key else message


def _keys_of(location: tuple[Any, ...]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
