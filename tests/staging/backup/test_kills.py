"""Whatever is done in whatever order, and killed wherever: each generation that is kept is restored byte for byte."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.errors import UsageError
from hpctrain.staging.backup import back_up, check_store, list_generations, prune, restore
from hpctrain.staging.backup import prune as prune_function
from hpctrain.staging.backup.store import open_store
from tests.staging.backup.sets import content_of, make_set, was_killed

NAMES = ("x", "y")
NUM_VERSIONS = 4


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sets")
    return [make_set(folder / f"v{version}", version) for version in range(NUM_VERSIONS)]


class Model:
    """What a store should hold: the version in each generation; and what a killed command leaves open."""

    def __init__(self, store: Path, sets: list[Path], target: Path) -> None:
        self.store, self.sets, self.target = store, sets, target
        self.kept: dict[tuple[str, int], int] = {}

    def found(self) -> set[tuple[str, int]]:
        try:
            generations, problems = list_generations(open_store(self.store))
        except UsageError:  # not made yet
            return set()
        assert problems == []
        return {(item.name, item.number) for item in generations}

    def back_up(self, name: str, version: int, kill_nth: int) -> None:
        def action() -> None:
            back_up(self.sets[version], self.store, name)

        number = 1 + max((n for known, n in self.kept if known == name), default=0)
        killed = was_killed(action, f"kill@backup.write:nth={kill_nth}") if kill_nth else action()
        may = self.kept | {(name, number): version}
        found = self.found()
        assert found == set(may) or (killed and found == set(self.kept))
        self.kept = {key: may[key] for key in found}

    def prune(self, keep: int, kill_nth: int) -> None:
        if not self.kept:
            return

        def action() -> None:
            prune(self.store, keep)

        killed = was_killed(action, f"kill@backup.write:nth={kill_nth}") if kill_nth else action()
        newest = {key for name in NAMES for key in sorted(key for key in self.kept if key[0] == name)[-keep:]}
        found = self.found()
        assert newest <= found <= set(self.kept)
        assert killed or found == newest
        self.kept = {key: self.kept[key] for key in found}

    def check(self) -> None:
        if not self.kept:
            return
        assert check_store(self.store).problems == ()
        for (name, number), version in self.kept.items():
            restore(self.store, f"{name}@{number}", self.target, overwrite=True)
            assert content_of(self.target) == content_of(self.sets[version])


kills = st.one_of(st.just(0), st.integers(1, 12), st.integers(1, 400))
backups = st.tuples(st.just("backup"), st.sampled_from(NAMES), st.integers(0, NUM_VERSIONS - 1), kills)
prunes = st.tuples(st.just("prune"), st.integers(1, 2), st.one_of(st.just(0), st.integers(1, 20)))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.one_of(backups, prunes), min_size=3, max_size=7))
def test_any_sequence(
    sets: list[Path], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, steps: list[tuple]
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("any")
    monkeypatch.setitem(prune_function.__globals__, "_MANY_SMALL", 2)  # a prune moves much
    model = Model(folder / "store", sets, folder / "again")
    for kind, *arguments in steps:
        (model.back_up if kind == "backup" else model.prune)(*arguments)
    model.check()
    shutil.rmtree(folder)


@pytest.mark.parametrize("nth", [3, 30, 260])
def test_a_killed_backup_leaves_nothing_wrong_and_the_next_uses_what_is_there(
    sets: list[Path], tmp_path: Path, nth: int
) -> None:
    model = Model(tmp_path / "store", sets, tmp_path / "again")
    model.back_up("x", 0, nth)
    model.back_up("x", 0, 0)
    assert not list((tmp_path / "store" / "segments").glob(".*"))
    model.check()


@pytest.mark.parametrize("nth", [60, 1000])
def test_a_killed_restore_leaves_nothing_and_is_run_again(sets: list[Path], tmp_path: Path, nth: int) -> None:
    back_up(sets[0], tmp_path / "store", "x")
    target = tmp_path / "folder" / "again"

    def action() -> None:
        restore(tmp_path / "store", "x", target)

    assert was_killed(action, f"kill@restore.write:nth={nth}") == (nth < 1000)
    if nth < 1000:
        assert not target.exists()
        action()
    assert content_of(target) == content_of(sets[0])
    assert [path.name for path in target.parent.iterdir()] == ["again"]
