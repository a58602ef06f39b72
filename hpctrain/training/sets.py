"""The sets of a run: opened by one rank, checked against what the run began with, and the plan over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hpctrain.comm.world import World
from hpctrain.config import RunConfig
from hpctrain.data.plan import Plan
from hpctrain.data.preprocess import FieldSteps, Preprocessor, SampleFunction
from hpctrain.errors import ConfigError, HpctrainError
from hpctrain.h5.chunks import FileSource
from hpctrain.h5.packed import PackedSet, open_packed
from hpctrain.h5.reader import read_field, read_sample
from hpctrain.h5.userset import open_files
from hpctrain.h5.vetting import hdf5_files

LABEL_FIELD = "label"
_GIB = 1 << 30
_MIB = 1 << 20

Result = TypeVar("Result")


def on_root(world: World, action: Callable[[], Result]) -> Result:
    """Run `action` on rank 0 and give its result, or its error, to every rank: one rank loads the file system."""
    outcome: tuple[Result | None, HpctrainError | None] = (None, None)
    if world.is_root:
        try:
            outcome = (action(), None)
        except HpctrainError as error:
            outcome = (None, error)
    result, failure = world.comm.bcast(outcome, root=0)
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class PackedSets:
    """The sets of a run, and what the plan needs to know of every sample.

    Attributes:
        labels: with `data.balance = "label"`: class of each sample, integers, shape (num_samples,).
        weights: with `data.sampling = "weighted"`: sampling weights, floats, shape (num_samples,).
    """

    train: PackedSet
    evaluate: PackedSet | None
    labels: npt.NDArray[np.integer[Any]] | None = None
    weights: npt.NDArray[np.floating[Any]] | None = None

    @property
    def identity(self) -> dict[str, str | None]:
        """What a restart compares."""
        return {
            "train": self.train.identity,
            "evaluate": None if self.evaluate is None else self.evaluate.identity,
        }


def open_sets(config: RunConfig, index_dir: Path | None) -> PackedSets:
    """Open and check both sets (on one rank); chunk indexes are kept in `index_dir`, if one is given.

    Raises `DataError` or `ConfigError`.
    """
    data = config.data
    train = _open(config, data.train, index_dir)
    evaluate = None if data.evaluate is None else _open(config, data.evaluate, index_dir)
    if evaluate is not None and (missing := sorted(set(train.fields) - set(evaluate.fields))):
        raise ConfigError(
            f"data.evaluate = {data.evaluate}: fields {', '.join(missing)} of the training set are missing there"
        )
    labels = _column(train, LABEL_FIELD, "iu", "data.balance") if data.balance == "label" else None
    weights = (
        _column(train, data.weights_field, "iuf", "data.sampling") if data.sampling == "weighted" else None
    )
    return PackedSets(train, evaluate, labels, None if weights is None else np.asarray(weights, np.float64))


def _open(config: RunConfig, path: Path, index_dir: Path | None) -> PackedSet:
    data = config.data
    if not data.fields:
        return open_packed(path)
    return open_files(
        hdf5_files(path),
        data.fields,
        cache_dir=index_dir,
        verify_chunks=data.verify_chunks,
        max_bytes=int(data.max_gib * _GIB),
        max_chunk_bytes=int(data.max_chunk_mib * _MIB),
    )


def _column(packed: PackedSet, name: str, kinds: str, key: str) -> npt.NDArray[Any]:
    """One number per sample. Raises `ConfigError` naming the key that asks for it."""
    field = packed.fields.get(name)
    if field is None or field.kind != "dense" or field.sample_shape != () or field.dtype.kind not in kinds:
        found = "there is none" if field is None else f"it is {field.kind} {field.dtype} {field.sample_shape}"
        raise ConfigError(
            f"{key} needs a field {name!r} with one number per sample, and {found}; fields: {', '.join(packed.fields)}"
        )
    with FileSource() as source:
        return read_field(packed, source, name)


def make_plan(config: RunConfig, sets: PackedSets) -> Plan:
    """The plan of a run. Raises `DataError` for labels or weights that cannot be used."""
    lanes, data = config.lanes, config.data
    return Plan(
        sets.train.chunk_sizes,
        lanes.num_lanes,
        lanes.lane_batch,
        config.train.seed,
        data.window_chunks,
        order=data.order,
        exchange=data.exchange,
        labels=sets.labels,
        weights=sets.weights,
    )


def make_preprocessor(
    config: RunConfig,
    sets: PackedSets,
    functions: dict[str, SampleFunction],
    *,
    training: bool,
) -> Preprocessor:
    """The preprocessing of the training or the evaluation set; statistics are the training set's in both.

    Raises `ConfigError` and `DataError` as `Preprocessor` does.
    """
    packed = sets.train if training or sets.evaluate is None else sets.evaluate
    fields = {
        name: dataclasses.replace(field, mean=sets.train.fields[name].mean, std=sets.train.fields[name].std)
        if name in sets.train.fields
        else field
        for name, field in packed.fields.items()
    }
    steps = {name: FieldSteps(**section.model_dump()) for name, section in config.data.preprocess.items()}

    def first(name: str) -> npt.NDArray[Any]:
        with FileSource() as source:
            return read_sample(packed, source, name, 0)

    return Preprocessor(
        fields,
        steps,
        config.train.seed,
        first=first,
        functions=functions,
        source=str(packed.root),
        training=training,
    )


def check_identity(recorded: dict[str, Any] | None, found: dict[str, str | None], run_dir: Path) -> None:
    """Raise `ConfigError` where the run began on other data."""
    if recorded is not None and recorded["train"] != found["train"]:
        raise ConfigError(
            f"{run_dir}: the run began on the set {recorded['train']}, data.train is now {found['train']}; the "
            "weights would differ: put the old set back, or begin a new run in another --dir"
        )
