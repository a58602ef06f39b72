"""The run descriptions that ship: each loads, names a Task that takes its options, and fits its data."""

from pathlib import Path

import pytest

from hpctrain.config import load_run
from hpctrain.errors import UsageError
from hpctrain.recipes import RECIPES, recipe_path
from hpctrain.training.task import has_evaluate, load_task


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_loads_and_its_task_takes_the_options(name: str, tmp_path: Path) -> None:
    config = load_run(recipe_path(name))
    assert config.name == name
    task = load_task(config.task.name, config.task.options, tmp_path)
    assert has_evaluate(task)
    assert sum(parameter.numel() for parameter in task.model().parameters()) < 2_000_000


@pytest.mark.parametrize("name", RECIPES)
def test_a_copied_recipe_finds_its_data_beside_it(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "mine.toml"
    copy.write_text(recipe_path(name).read_text())
    data = load_run(copy).data
    assert (data.train, data.evaluate) == (tmp_path / "packed" / "train", tmp_path / "packed" / "test")


def test_emoji_is_evaluated_in_one_batch() -> None:
    assert load_run(recipe_path("emoji")).data.evaluate_batch >= 1911


def test_an_unknown_recipe_is_named() -> None:
    with pytest.raises(UsageError, match=r"no recipe 'cats'; choose one of: emoji, digits"):
        recipe_path("cats")
