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


class PreprocessSection(_Section):
    """What is done to one field while it is loaded, in this order; all of it changes the weights."""

    decode: Annotated[
        Literal["image"] | None,
        Field(
            description="`image`: the bytes of a picture in each row (JPEG, PNG) become uint8 (height, width, 3). "
            "Needs `size` or `function` unless all pictures have one size.",
            json_schema_extra=WEIGHTS,
        ),
    ] = None
    size: Annotated[
        tuple[int, int] | None,
        Field(description="Height and width that decoded pictures are scaled to.", json_schema_extra=WEIGHTS),
    ] = None
    function: Annotated[
        str | None,
        Field(
            pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
            description="A function of (sample, rng), as `module:function`; the module is looked up as the Task's is. "
            "`rng` is a NumPy generator of (seed, epoch, sample), None in evaluation.",
            json_schema_extra=WEIGHTS,
        ),
    ] = None
    pad_to: Annotated[
        int | None,
        Field(
            ge=1,
            description="A ragged field becomes dense with so many values per sample: longer rows are cut, shorter "
            "filled up. The field `NAME_length` says how many are real.",
            json_schema_extra=WEIGHTS,
        ),
    ] = None
    pad_value: Annotated[
        int, Field(description="What rows are filled up with.", json_schema_extra=WEIGHTS)
    ] = 0
    augment: Annotated[
        tuple[str, ...],
        Field(
            description="In training only: `flip` (left and right, one in two), `rotate90` (quarter turns), `crop:4` "
            "(zeros around, 4 wide, then the old size cut out anywhere), `noise:0.1` (normal, of this standard "
            "deviation, after normalising). For samples (H, W), (H, W, C) or (C, H, W).",
            json_schema_extra=WEIGHTS,
        ),
    ] = ()
    normalize: Annotated[
        Literal["stored"] | None,
        Field(
            description="`stored`: (x - mean) / std with the statistics of the packed training set.",
            json_schema_extra=WEIGHTS,
        ),
    ] = None
    mean: Annotated[
        tuple[float, ...] | None,
        Field(
            description="The same with given numbers, together with `std`: one, or one per channel.",
            json_schema_extra=WEIGHTS,
        ),
    ] = None
    std: Annotated[
        tuple[float, ...] | None, Field(description="Goes with `mean`.", json_schema_extra=WEIGHTS)
    ] = None
    dtype: Annotated[
        str | None,
        Field(
            description="Type of the result; a value that does not fit is an error. None: float32 after normalising, "
            "else as it is.",
            json_schema_extra=WEIGHTS,
        ),
    ] = None


class DataSection(_Section):
    """Which samples are read, and in which order."""

    train: Annotated[
        Path,
        Field(
            description="What to train on: a folder made by `hpctrain pack`; or with `fields` an HDF5 file, or a "
            "folder of them."
        ),
    ]
    evaluate: Annotated[Path | None, Field(description="The same for evaluation; none: no evaluation.")] = (
        None
    )
    fields: Annotated[
        dict[str, str],
        Field(
            description="For HDF5 files that were not packed: field name = path of its dataset in the file; samples "
            "lie along the first axis.",
            json_schema_extra=WEIGHTS,
        ),
    ] = {}
    verify_chunks: Annotated[
        int,
        Field(
            ge=0,
            description="For such files: so many chunks of each dataset are compared with what libhdf5 reads.",
        ),
    ] = 4
    max_gib: Annotated[
        float,
        Field(gt=0, description="For such files: a dataset that claims to hold more is refused, in GiB."),
    ] = 4096.0
    max_chunk_mib: Annotated[
        float,
        Field(gt=0, description="For such files: a chunk that would take more memory is refused, in MiB."),
    ] = 1024.0
    order: Annotated[
        Literal["global", "node_local"],
        Field(
            description="`global`: every epoch's permuted samples are cut into lanes anew. `node_local`: each lane "
            "keeps its chunks and exchanges some between epochs.",
            json_schema_extra=WEIGHTS,
        ),
    ] = "global"
    exchange: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="With `node_local`: share of a lane's chunks that change places in each epoch.",
            json_schema_extra=WEIGHTS,
        ),
    ] = 0.1
    balance: Annotated[
        Literal["none", "label"],
        Field(
            description="`label`: every lane gets its share of each class (field `label`) within one sample.",
            json_schema_extra=WEIGHTS,
        ),
    ] = "none"
    sampling: Annotated[
        Literal["once", "weighted"],
        Field(
            description="`once`: every sample exactly once an epoch. `weighted`: as many draws with replacement, by "
            "the weights in `weights_field`.",
            json_schema_extra=WEIGHTS,
        ),
    ] = "once"
    weights_field: Annotated[
        str, Field(description="Field with the sampling weights.", json_schema_extra=WEIGHTS)
    ] = "weight"
    preprocess: Annotated[
        dict[str, PreprocessSection],
        Field(description="What is done to a field while it is loaded.", json_schema_extra=WEIGHTS),
    ] = {}
    memory_budget_mib: Annotated[
        float,
        Field(
            gt=0,
            description="Memory for chunks and batches, per rank. Chunks stay in it from epoch to epoch; what does not "
            "fit is read again. Evaluation has as much for itself.",
        ),
    ] = 1024.0
    page_cache: Annotated[
        Literal["keep", "drop", "bypass"],
        Field(
            description="Files are read through the kernel's page cache; `drop`: pages are given back at once; "
            "`bypass`: past it (O_DIRECT), where the filesystem can."
        ),
    ] = "keep"
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
        int,
        Field(
            ge=0,
            le=1024,
            description="Steps whose batches are prepared ahead, at most: fewer where they would take more than a "
            "quarter of the memory budget. 0: as many as take 16 MiB, 4 to 64.",
        ),
    ] = 0
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


class StagingPlace(_Section):
    """A directory of the node for copies of the data."""

    path: Annotated[
        Path,
        Field(
            description="Directory on the node's SSD; a private sub-directory is made there. Environment variables and "
            "`~` are expanded on the node. A tmpfs such as `/dev/shm` is memory, and counted so."
        ),
    ]
    quota_gib: Annotated[
        float | None,
        Field(
            gt=0,
            description="So much may be kept there, in GiB. None: what the disk has; of a tmpfs half of what is free.",
        ),
    ] = None


class StagingSection(_Section):
    """The copy of the training data on the nodes. `dir = "PATH"` is short for `dirs = [{ path = "PATH" }]`."""

    dirs: Annotated[
        tuple[StagingPlace, ...],
        Field(
            description="Where it is kept, the fastest first: where room is short, chunks that are used later go down. "
            "None: the shared files are read as they are."
        ),
    ] = ()
    replicas: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="Nodes that keep each chunk: with more than one, a copy of a lost or damaged chunk comes from "
            "another node.",
        ),
    ] = 1
    interface: Annotated[
        str | None,
        Field(
            description="Network interface over which nodes give each other chunks, such as `ib0`. None: that of the "
            "host's name."
        ),
    ] = None
    on_changed_source: Annotated[
        Literal["restage", "stop"],
        Field(
            description="User files without digests that were changed since they were staged: stage them again, or "
            "stop. While a run goes on, a changed file always ends it."
        ),
    ] = "restage"

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "dir" not in raw:
            return raw
        if "dirs" in raw:
            raise ValueError("dir and dirs say the same: keep one of them")
        rest = {key: value for key, value in raw.items() if key != "dir"}
        return {**rest, "dirs": [{"path": raw["dir"]}]}


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
        if self.data.sampling == "weighted" and (self.data.balance, self.data.order) != ("none", "global"):
            raise ValueError(
                'data.sampling = "weighted" draws from the whole set: it goes with data.order = "global" and '
                'data.balance = "none" only'
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
        places = tuple(
            place
            if str(place.path).startswith(("$", "~"))
            else place.model_copy(update={"path": (base / place.path).resolve()})
            for place in self.staging.dirs
        )
        staging = self.staging.model_copy(update={"dirs": places})
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
        if (entry := _section_of_entries(field.annotation)) is not None:
            name = "FIELD." if field.default == {} else "N."
            rows += _reference_rows(entry, f"{prefix}{key}.{name}")
            continue
        mark = "*" if isinstance(field.json_schema_extra, dict) else ""
        default = (
            "required" if field.is_required() else f"`{json.dumps(field.default)}`".replace("`null`", "none")
        )
        rows.append(f"| `{prefix}{key}`{mark} | {default} | {field.description} |")
    return rows


def _section_of_entries(annotation: Any) -> type[BaseModel] | None:
    """The model of the values, where a field is a dictionary or a list of sections."""
    values = (item for item in get_args(annotation) if isinstance(item, type) and issubclass(item, BaseModel))
    return next(values, None)


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
    model: type[BaseModel] | None = RunConfig
    entries: type[BaseModel] | None = None  # of the dictionary that the part before named
    for part in location:
        if entries is not None:
            model, entries = entries, None
            continue
        if model is None:
            return []
        annotation = model.model_fields[str(part)].annotation
        entries = _section_of_entries(annotation)
        model = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    return [] if model is None else list(model.model_fields)
