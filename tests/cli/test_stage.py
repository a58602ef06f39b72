"""`hpctrain stage`: fill the node before a run, look at the copies, remove them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import tomli_w

from hpctrain.h5.packed import PackedSet
from hpctrain.staging.stored import file_keys_of, stored_chunks
from tests.staging.nodes import Nodes
from tests.support import hpctrain, small_set
from tests.toy import toy_run


@pytest.fixture
def packed(tmp_path: Path) -> PackedSet:
    return small_set(tmp_path / "set", 300, 10)


def rewritten(description: Path, **sections: dict) -> Path:
    """The description with other sections in place of its own."""
    raw = tomllib.loads(description.read_text())
    description.write_text(tomli_w.dumps({**raw, **sections}))
    return description


def status(description: Path) -> list[dict]:
    done = hpctrain(["stage", description, "--status", "--json"])
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)["mirrors"]


def test_it_stages_shows_and_removes(tmp_path: Path, packed: PackedSet) -> None:
    description = toy_run(tmp_path, packed.root)
    done = hpctrain(["stage", description])
    assert done.returncode == 0, done.stderr
    num_bytes = stored_chunks(packed, file_keys_of(packed)).num_bytes
    (mirror,) = status(description)
    assert (mirror["present_bytes"], mirror["total_bytes"], mirror["is_owned"]) == (
        num_bytes,
        num_bytes,
        False,
    )
    again = hpctrain(["stage", description])
    assert "0.00 GB read from the shared filesystem" in again.stderr, "run again it reads nothing"
    shown = hpctrain(["stage", description, "--status"])
    assert f"{mirror['present_chunks']} of {mirror['total_chunks']} chunks" in shown.stdout
    assert hpctrain(["stage", description, "--clean"]).returncode == 0
    assert status(description) == []


def test_a_run_finds_what_was_staged(tmp_path: Path, packed: PackedSet) -> None:
    description = toy_run(tmp_path, packed.root)
    assert hpctrain(["stage", description]).returncode == 0
    with Nodes(packed, [tmp_path / "ssd"]) as nodes:
        nodes.deal()
        nodes.join()
        assert nodes.counter("shared_bytes") == [0]
        used = hpctrain(["stage", description, "--clean"])
        assert (used.returncode, "a running job uses it" in used.stderr) == (74, True)
        assert status(description)[0]["is_owned"]


def test_what_does_not_fit_is_said(tmp_path: Path, packed: PackedSet) -> None:
    places = [{"path": str(tmp_path / "ssd"), "quota_gib": 4000 / 2**30}]
    description = rewritten(toy_run(tmp_path, packed.root), staging={"dirs": places})
    done = hpctrain(["stage", description])
    assert done.returncode == 74
    assert "quota_gib" in done.stderr
    (mirror,) = status(description)
    assert 0 < mirror["present_bytes"] <= 4000


@pytest.mark.parametrize(
    ("change", "arguments", "code", "words"),
    [
        ({"staging": {}}, [], 78, "nothing to stage to"),
        ({"staging": {"dir": "$NOT_SET_HERE/x"}}, [], 78, "variable is not set"),
        ({"data": {"train": "nowhere"}}, [], 65, "nowhere"),
        ({}, ["--status", "--clean"], 64, "one of them"),
    ],
)
def test_bad_input(
    tmp_path: Path, packed: PackedSet, change: dict, arguments: list[str], code: int, words: str
) -> None:
    description = rewritten(toy_run(tmp_path, packed.root), **change)
    done = hpctrain(["stage", description, *arguments])
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert not (tmp_path / "ssd").exists()
