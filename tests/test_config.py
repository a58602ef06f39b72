"""The run description: what is accepted, what is refused and in which words."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config import RunConfig, dump_run, load_run, parse_run, weight_differences
from hpctrain.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "name": "x",
    "task": {"name": "module:Class"},
    "data": {"train": "packed/train"},
    "lanes": {"num_lanes": 4, "lane_batch": 8},
    "train": {"epochs": 2},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    raw = copy.deepcopy(MINIMAL)
    *parents, key = path.split(".")
    section = raw
    for parent in parents:
        section = section.setdefault(parent, {})
    section[key] = value
    return raw


def test_toml_round_trip() -> None:
    config = parse_run(changed("task.options", {"width": 3, "name": "a"}))
    assert parse_run(tomllib.loads(dump_run(config))) == config


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("trian", {}, "unknown key 'trian'; did you mean 'train'"),
        ("train.epoch", 3, "unknown key 'train.epoch'; did you mean 'epochs'"),
        ("lanes.zzz", 3, "known keys here: lane_batch, num_lanes"),
        ("lanes.num_lanes", 0, r"lanes.num_lanes = 0: .*greater than or equal to 1"),
        ("lanes.lane_batch", "many", "lanes.lane_batch = 'many'"),
        ("train.seed", -1, "train.seed = -1"),
        ("train.learning_rate", 0, "greater than 0"),
        ("train.min_lr_fraction", 1.5, "less than or equal to 1"),
        ("data.order", "random", "data.order = 'random': .*'global'"),
        ("precision.compute", "fp8", "'fp32' or 'bf16'"),
        ("task.name", "nocolon", "task.name = 'nocolon'"),
        ("name", "a/b", "name = 'a/b'"),
        ("checkpoint", {"interval_steps": 0, "interval_s": 0}, "nothing would ever be saved"),
        ("resilience.hang_timeout_s", 0, "greater than 0"),
        ("resilience.leave_margin_s", 0.5, "greater than or equal to 1"),
        ("cluster.launcher", "srun", "cluster.launcher = 'srun': .*'srun-pmix'"),
        ("cluster.spare_nodes", -1, "greater than or equal to 0"),
        ("cluster.container", "image.sif", "cluster.container = 'image.sif': .*list"),
    ],
)
def test_refusals_name_key_value_and_mend(path: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_run(changed(path, value))


def test_everything_wrong_is_said_at_once() -> None:
    raw = changed("lanes.num_lanes", 0)
    del raw["train"]
    with pytest.raises(
        ConfigError, match=r"'train' is missing.*lanes\.num_lanes|lanes\.num_lanes.*'train' is missing"
    ):
        parse_run(raw)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the run description"):
        load_run(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = \n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_run(tmp_path / "bad.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_run(tmp_path / "bytes.toml")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(dump_run(parse_run(MINIMAL)))
    assert load_run(tmp_path / "run.toml").data.train == tmp_path / "packed" / "train"


def test_what_changes_the_weights_is_known() -> None:
    base = parse_run(MINIMAL)
    assert weight_differences(base, base) == []
    assert weight_differences(base, parse_run(changed("train.seed", 5))) == ["train.seed: 1 -> 5"]
    for path, value in (
        ("lanes.num_lanes", 5), ("lanes.lane_batch", 9), ("data.window_chunks", 3), ("precision.compute", "bf16"),
        ("precision.wire", "fp16"), ("precision.compute_threads", 2), ("task.name", "m:D"), ("task.options", {"a": 1}),
        ("train.clip_norm", 1.0), ("train.warmup_steps", 3), ("comm.bucket_mib", 1.0), ("comm.allreduce", "ring"),
    ):  # fmt: skip
        assert len(weight_differences(base, parse_run(changed(path, value)))) == 1, path
    for path, value in (
        ("checkpoint.keep", 9),
        ("data.train", "moved"),
        ("data.io_threads", 3),
        ("staging.dir", "/ssd"),
        ("name", "y"),
        ("cluster.launcher", "mpirun"),
        ("cluster.min_ranks", 1),
        ("resilience.leave_margin_s", 60),
    ):
        assert weight_differences(base, parse_run(changed(path, value))) == [], path


def sections(model: type) -> list[type]:
    nested = [
        f.annotation
        for f in model.model_fields.values()
        if isinstance(f.annotation, type) and hasattr(f.annotation, "model_fields")
    ]
    return [model, *[found for section in nested for found in sections(section)]]


def test_every_field_is_documented() -> None:
    for section in sections(RunConfig):
        assert section.__doc__
        for name, field in section.model_fields.items():
            nested = isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields")
            assert nested or field.description, f"{section.__name__}.{name}"
