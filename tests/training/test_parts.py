"""The loop's parts: schedule, seeds, digests, the Task's errors."""

from __future__ import annotations

import itertools
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpctrain.comm.guard import StepReport, combine
from hpctrain.comm.reducer import GradientReducer
from hpctrain.comm.world import _explain_size, lane_efficiency
from hpctrain.config import TrainSection, parse_run
from hpctrain.data.loader import LaneBatch
from hpctrain.errors import ConfigError
from hpctrain.h5.chunks import allow_many_files
from hpctrain.h5.ragged import Ragged
from hpctrain.resilience.watchdog import Watchdog
from hpctrain.staging.directories import staging_directory
from hpctrain.training.batches import chain_samples, hash_samples, to_torch
from hpctrain.training.evaluation import combine_metrics
from hpctrain.training.model import _refuse_batch_statistics, build_optimizer, refusing_local_statistics
from hpctrain.training.numerics import compare_with_run, differences, fingerprint
from hpctrain.training.phases import Phases
from hpctrain.training.randomness import seed_evaluation, seed_lane, seed_model
from hpctrain.training.schedule import Schedule, lr_factor
from hpctrain.training.task import Task, has_evaluate, load_task
from tests.support import ROOT


def train_section(**fields: object) -> TrainSection:
    return TrainSection(epochs=1, **fields)


def test_warm_up_then_cosine() -> None:
    train = train_section(warmup_steps=4, min_lr_fraction=0.1)
    factors = [lr_factor(step, 104, train) for step in range(105)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[54] == pytest.approx(0.55)
    assert factors[104] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(factors[4:]))


@given(st.integers(0, 300), st.integers(1, 200), st.integers(0, 50), st.floats(0, 1))
def test_the_factor_stays_in_its_bounds(step: int, total: int, warmup: int, floor: float) -> None:
    factor = lr_factor(step, total, train_section(warmup_steps=warmup, min_lr_fraction=floor))
    assert 0 <= factor <= 1
    if step >= warmup:
        assert factor >= floor - 1e-12


def test_the_schedule_keeps_the_ratio_of_groups() -> None:
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(
        [{"params": a.parameters(), "lr": 1.0}, {"params": b.parameters(), "lr": 0.1}]
    )
    schedule = Schedule(optimizer, train_section(warmup_steps=10), 100)
    assert schedule.apply(4) == 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]


def numbers() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_random_numbers_are_a_function_of_seed_step_and_lane() -> None:
    seed_lane(1, 2, 3)
    first = numbers()
    torch.rand(5)
    seed_lane(1, 2, 3)
    assert numbers() == first
    others = []
    for seed in ((1, 2, 4), (1, 3, 3), (2, 2, 3), (1, 3, 2)):
        seed_lane(*seed)
        others.append(numbers())
    seed_evaluation(1, 2, 3)
    others.append(numbers())
    seed_model(1)
    others.append(numbers())
    assert len({first, *others}) == 7


def test_the_samples_digest_does_not_depend_on_the_dealing_but_on_the_order() -> None:
    a, b = np.array([1, 2], np.int64), np.array([3], np.int64)
    assert hash_samples(0, 0, a) + hash_samples(0, 1, b) != hash_samples(0, 1, a) + hash_samples(0, 0, b)
    assert hash_samples(0, 0, a) != hash_samples(1, 0, a)
    assert hash_samples(0, 0, a) != hash_samples(0, 0, a[::-1])
    one = chain_samples(chain_samples("00" * 16, 0, 5), 1, 6)
    assert one != chain_samples(chain_samples("00" * 16, 0, 6), 1, 5)


def test_batches_for_the_task() -> None:
    ragged = Ragged(np.array([1, 2, 3], np.int32), np.array([0, 1, 3], np.int64))
    big_endian = np.array([[1.5], [2.5]], dtype=">f4")
    lane = LaneBatch(
        0, np.array([7, 9], np.int64), {"x": big_endian, "y": np.zeros((2, 3), np.float16), "t": ragged}
    )
    batch = to_torch(lane.samples, lane.fields, torch.device("cpu"))
    assert batch["id"].tolist() == [7, 9]
    assert batch["x"].tolist() == [[1.5], [2.5]]
    assert batch["y"].dtype == torch.float16
    assert batch["t"]["values"].tolist() == [1, 2, 3]
    assert batch["t"]["offsets"].tolist() == [0, 1, 3]


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 100)), min_size=1, max_size=10))
def test_metrics_are_means_over_all_samples(parts: list[tuple[float, int]]) -> None:
    samples = [mean for mean, weight in parts for _ in range(weight)]
    combined = combine_metrics([{"m": (mean, float(weight))} for mean, weight in parts])
    assert combined["m"] == pytest.approx(np.mean(samples), rel=1e-9, abs=1e-9)


def test_a_metric_may_be_missing_from_some_batches() -> None:
    assert combine_metrics([{"a": (1.0, 1.0)}, {"a": (3.0, 1.0), "b": (5.0, 2.0)}]) == {"a": 2.0, "b": 5.0}


TASK_FILE = """
import torch
from hpctrain.training.task import Task

class Good(Task):
    def __init__(self, width=3):
        self.width = width

class Plain(Task):
    pass

NotATask = 5
"""


@pytest.fixture
def task_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> tuple[Path, str]:
    name = f"task_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(TASK_FILE)
    (tmp_path / f"{name}_broken.py").write_text("import no_such_package\n")
    monkeypatch.setattr("sys.path", list(__import__("sys").path))  # load_task puts the folder on it
    return tmp_path, name


def test_a_task_beside_the_run_description(task_dir: tuple[Path, str]) -> None:
    folder, name = task_dir
    assert load_task(f"{name}:Good", {"width": 9}, folder).width == 9
    assert not has_evaluate(load_task(f"{name}:Plain", {}, folder))


@pytest.mark.parametrize(
    ("suffix", "options", "said"),
    [
        ("_broken:Good", {}, "no_such_package"),
        ("_nowhere:Good", {}, "importing"),
        (":Bad", {}, "it has .*Good"),
        (":NotATask", {}, "no Task of that name"),
        (":Good", {"wdith": 3}, "wdith"),
        (":Plain", {"x": 1}, "takes no options"),
    ],
)
def test_a_task_that_cannot_be_had(task_dir: tuple[Path, str], suffix: str, options: dict, said: str) -> None:
    folder, name = task_dir
    with pytest.raises(ConfigError, match=said):
        load_task(name + suffix, options, folder)


def test_missing_methods_say_so() -> None:
    for method, arguments in (("model", ()), ("loss", (None, {})), ("evaluate", (None, {}))):
        with pytest.raises(NotImplementedError, match="Task"):
            getattr(Task(), method)(*arguments)


def test_batch_statistics_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    with pytest.raises(ConfigError, match=r"'1\.0' is BatchNorm1d.*GroupNorm"):
        _refuse_batch_statistics(model)
    _refuse_batch_statistics(nn.Sequential(nn.GroupNorm(1, 2), nn.LayerNorm(2)))


def test_the_default_optimizer_and_the_one_that_cannot_be() -> None:
    config = parse_run(
        {
            "name": "x",
            "task": {"name": "a:B"},
            "data": {"train": "t"},
            "lanes": {"num_lanes": 1, "lane_batch": 1},
            "train": {"epochs": 1, "learning_rate": 0.5, "weight_decay": 0.25},
        }
    )
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer = build_optimizer(Task(), model, config)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    assert optimizer.param_groups[0]["weight_decay"] == 0.25

    class Lbfgs(Task):
        def optimizer(self, params):
            return torch.optim.LBFGS(params)

    with pytest.raises(ConfigError, match="LBFGS"):
        build_optimizer(Lbfgs(), nn.Linear(1, 1), config)


def test_parameters_that_are_not_float32_are_refused_by_name() -> None:
    import mpi4py

    mpi4py.rc.initialize = False  # only its library is needed: Horovod's own does not know where libmpi lies
    from mpi4py import MPI  # noqa: F401

    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"weight is torch\.bfloat16"):
        GradientReducer(model.named_parameters(), 100)


def test_singletons_are_explained() -> None:
    assert "every process is alone" in _explain_size(1, 3)
    assert "mpi" in _explain_size(1, 3)
    assert "2 rank(s), 3 were asked for" in _explain_size(2, 3)


def test_efficiency_of_uneven_lanes() -> None:
    assert lane_efficiency(8, 4) == 1
    assert lane_efficiency(8, 3) == pytest.approx(8 / 9)


def test_the_loss_of_a_step_is_weighted() -> None:
    reports = [StepReport(0, False, False, 4, 1, 0, 8.0, 4.0), StepReport(0, False, False, 1, 2, 0, 7.0, 1.0)]
    assert combine(reports).loss == 3.0


def test_the_fingerprint_of_a_run_is_kept_and_compared(tmp_path: Path) -> None:
    mine = fingerprint(1, "auto", "0123")
    assert mine["torch"] == torch.__version__
    assert compare_with_run(tmp_path, mine) == []
    assert compare_with_run(tmp_path, mine) == []
    assert compare_with_run(tmp_path, {**mine, "compute_threads": 2}) == ["compute_threads: 1 -> 2"]
    assert differences({"a": 1}, {"b": 2}) == ["a: 1 -> None", "b: None -> 2"]


def power_iterating() -> nn.Module:
    """Spectral normalisation of a matrix whose singular values are close: its iteration takes hundreds of steps."""
    linear = nn.Linear(3, 3)
    with torch.no_grad():
        linear.weight.copy_(torch.diag(torch.tensor([1.0, 0.99, 0.98])))
    return nn.utils.parametrizations.spectral_norm(linear)


@pytest.mark.parametrize(
    "make",
    [lambda: nn.InstanceNorm1d(2, track_running_stats=True), power_iterating],
    ids=["running statistics", "power iterations"],
)
def test_buffers_that_a_forward_pass_changes_are_refused_by_name(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(make())
    with pytest.raises(ConfigError, match=r"buffer '0\..*' changed"), refusing_local_statistics(model):
        model(torch.randn(4, 2, 3))
    with refusing_local_statistics(nn.LayerNorm(3)) as _:
        nn.LayerNorm(3)(torch.randn(2, 3))


def test_staging_dir_is_expanded_on_the_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NODE_SSD", str(tmp_path))
    monkeypatch.delenv("NOT_SET", raising=False)
    assert staging_directory(Path("$NODE_SSD/x")) == tmp_path / "x"
    assert staging_directory(Path("~/x")).is_absolute()
    for bad in ("$NOT_SET/x", "${NOT_SET}/x", "relative/x"):
        with pytest.raises(ConfigError, match="variable is not set"):
            staging_directory(Path(bad))


class Beats(Watchdog):
    """Keeps the deadlines it is given."""

    def beat(self, phase: str, step: int, timeout_s: float | None = None) -> None:
        self.given = getattr(self, "given", {}) | {phase: timeout_s}


def test_slow_phases_have_their_own_deadline(tmp_path: Path) -> None:
    watchdog = Beats(tmp_path, 0, 5.0, 60.0)
    phases = Phases(watchdog, frozenset({"restore"}), 60.0)
    for name in ("restore", "compute"):
        with phases(name, 3):
            pass
    assert watchdog.given == {"restore": 60.0, "compute": None}
    assert set(phases.seconds) == {"restore", "compute"}


def test_a_rank_is_watched_before_torch_is_loaded() -> None:
    script = (
        "import sys, hpctrain.training.__main__; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'mpi4py', 'horovod')))"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


def test_as_many_files_may_be_open_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
