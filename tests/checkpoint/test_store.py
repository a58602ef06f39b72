"""The commit protocol: whole or not at all, whatever is killed, full or flipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hpctrain.checkpoint.names import CheckpointName, newest_step
from hpctrain.checkpoint.restore import restore_newest
from hpctrain.checkpoint.snapshot import Cursor, Snapshot, state_digest, take_snapshot
from hpctrain.checkpoint.store import CheckpointRefused, CheckpointStore
from hpctrain.checkpoint.writer import CheckpointWriter
from hpctrain.errors import StorageError
from hpctrain.resilience import faults
from tests.support import ROOT

FILES = ("tensors.safetensors", "state.json", "manifest.json")


def snapshot(step: int) -> Snapshot:
    torch.manual_seed(step)
    model = nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(40)).sum().backward()
    optimizer.step()
    return take_snapshot(model, optimizer, Cursor(step=step, epoch=step // 10, step_in_epoch=step % 10))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", attempt=2)


def checkpoint_name(step: int, attempt: int) -> str:
    return str(CheckpointName(step, attempt))


def names(store: CheckpointStore) -> list[str]:
    return [str(name) for name in store.committed()]


def load(store: CheckpointStore, name: str) -> Snapshot:
    store.verify(name, store.blocks(name))
    return store.load(name)


def test_what_is_committed_comes_back(store: CheckpointStore) -> None:
    wanted = snapshot(25)
    path = store.commit(wanted)
    assert path.name == "step-000000025-a0002"
    found = load(store, path.name)
    assert state_digest(found) == state_digest(wanted)
    assert found.cursor == wanted.cursor
    assert sorted(os.listdir(path)) == sorted(FILES)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "damage", ["first byte", "middle byte", "last byte", "truncated", "longer", "gone", "empty"]
)
def test_damage_anywhere_is_refused_with_the_file(store: CheckpointStore, file: str, damage: str) -> None:
    name = store.commit(snapshot(1)).name
    path = store.directory / name / file
    content = bytearray(path.read_bytes())
    if damage.endswith("byte"):
        position = {"first": 0, "middle": len(content) // 2, "last": len(content) - 1}[damage.split()[0]]
        content[position] ^= 4
    elif damage == "truncated":
        del content[-1:]
    elif damage == "longer":
        content += b" {}"
    elif damage == "empty":
        content.clear()
    path.unlink()
    if damage != "gone":
        path.write_bytes(content)
    with pytest.raises(CheckpointRefused) as error:
        load(store, name)
    assert file in str(error.value)


def test_a_manifest_of_another_version_is_refused(store: CheckpointStore) -> None:
    name = store.commit(snapshot(1)).name
    path = store.directory / name / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    with pytest.raises(CheckpointRefused, match="version 99"):
        store.blocks(name)


def test_restore_falls_back_and_says_why(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.commit(snapshot(step))
    (store.directory / checkpoint_name(3, 2) / "state.json").write_text("{}")
    refused: dict[str, str] = {}
    found = restore_newest(store, names(store), 0, 1, lambda item: [item], refused.__setitem__)
    assert found is not None
    assert found[0] == checkpoint_name(2, 2)
    assert list(refused) == [checkpoint_name(3, 2)]
    assert "state.json" in refused[checkpoint_name(3, 2)]


def test_restore_without_any_good_one(store: CheckpointStore) -> None:
    assert restore_newest(store, [], 0, 1, lambda item: [item], lambda *_: None) is None
    gone = ["step-000000009-a0001"]
    assert restore_newest(store, gone, 0, 1, lambda item: [item], lambda *_: None) is None


def test_names() -> None:
    for step, attempt in ((120, 1), (12345678901, 12345)):
        assert CheckpointName.parse(checkpoint_name(step, attempt)) == (step, attempt)
    for other in (
        ".tmp-step-000000120-a0001-7",
        "step-120-a0001",
        "latest",
        "step-000000120",
        "refused-step-000000120-a0001",
    ):
        assert CheckpointName.parse(other) is None
    assert newest_step([checkpoint_name(7, 1), "latest", checkpoint_name(30, 2)]) == 30


def commit(directory: Path, step: int, attempt: int) -> str:
    return CheckpointStore(directory, attempt).commit(snapshot(step)).name


def test_newest_first_by_step_then_attempt_and_pruned_from_the_end(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    written = [commit(directory, *pair) for pair in ((10, 1), (20, 1), (20, 2), (9, 3))]
    store = CheckpointStore(directory, 3, written)
    newest = ["step-000000020-a0002", "step-000000020-a0001", "step-000000010-a0001", "step-000000009-a0003"]
    assert names(store) == newest
    store.prune(2)
    assert names(store) == newest[:2]
    assert sorted(os.listdir(directory)) == sorted(newest[:2])


def test_pruning_counts_only_what_may_be_restored(tmp_path: Path) -> None:
    """A late write of an older attempt has a high step; it must not push out what this attempt commits."""
    directory = tmp_path / "checkpoints"
    listed = commit(directory, 40, 1)
    late = commit(directory, 1000, 1)
    mine = commit(directory, 50, 3)
    CheckpointStore(directory, 3, [listed]).prune(1)
    assert os.listdir(directory) == [mine]
    assert late != mine


def test_a_refused_checkpoint_is_set_aside_and_no_longer_counts(tmp_path: Path) -> None:
    """With keep = 1, a damaged checkpoint of a high step must not cost the next one that is committed."""
    directory = tmp_path / "checkpoints"
    damaged = commit(directory, 1000, 1)
    store = CheckpointStore(directory, 2, [damaged])
    store.set_aside(damaged)
    mine = store.commit(snapshot(50)).name
    store.prune(1)
    assert names(store) == [mine]
    assert sorted(os.listdir(directory)) == [f"refused-{damaged}", mine]


def supersede(run_dir: Path, attempt: int) -> None:
    (run_dir / "attempts" / f"a{attempt:04d}").mkdir(parents=True)
    (run_dir / "attempts" / f"a{attempt:04d}" / "start.json").write_text("{}")


def test_a_superseded_attempt_removes_and_renames_nothing(tmp_path: Path) -> None:
    """A zombie on a node that was cut off goes on to save; to it, what the newer attempt saved is a stranger's."""
    directory = tmp_path / "checkpoints"
    zombie, newer = CheckpointStore(directory, 3), CheckpointStore(directory, 4)
    supersede(tmp_path, 3)
    old = zombie.commit(snapshot(40)).name
    supersede(tmp_path, 4)
    mine = newer.commit(snapshot(30)).name
    (directory / ".tmp-step-000000035-a0004-7").mkdir()  # being written
    late = zombie.commit(snapshot(50)).name
    everything = sorted(os.listdir(directory))
    zombie.prune(1)
    zombie.sweep()
    zombie.set_aside(mine)
    assert sorted(os.listdir(directory)) == everything
    newer.prune(1)
    assert names(newer) == [mine], f"{old} and {late} are the zombie's"
    newer.sweep()
    assert os.listdir(directory) == [mine]


def test_pruning_stops_when_the_attempt_is_superseded_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "checkpoints"
    written = [commit(directory, step, 3) for step in (30, 20, 10)]

    def starts_now(point: str) -> None:
        supersede(tmp_path, 4)

    monkeypatch.setattr("hpctrain.checkpoint.store.fault_point", starts_now)
    store = CheckpointStore(directory, 3)
    store.prune(1)
    assert names(store) == [written[0], written[2]]


@pytest.mark.parametrize("point", ["restore.verify", "restore.block", "restore.load"])
@pytest.mark.parametrize("fault", ["eio", "enospc"])
def test_a_file_that_cannot_be_read_now_is_no_damage(
    store: CheckpointStore, point: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared filesystem that hiccups must cost a retry, not the whole run."""
    name = store.commit(snapshot(1)).name
    monkeypatch.setenv("HPCTRAIN_FAULTS", f"{fault}@{point}")
    faults.configure(0, 2)
    try:
        with pytest.raises(StorageError, match="cannot be read"):
            restore_newest(store, [name], 0, 1, lambda item: [item], lambda *_: None)
    finally:
        monkeypatch.delenv("HPCTRAIN_FAULTS")
        faults.configure(0, 2)
    assert restore_newest(store, [name], 0, 1, lambda item: [item], lambda *_: None) is not None


def test_a_restored_state_is_apart_from_its_file(store: CheckpointStore) -> None:
    """A mapped file would give its later bytes, or SIGBUS."""
    name = store.commit(snapshot(1)).name
    found = load(store, name)
    before = state_digest(found)
    path = store.directory / name / "tensors.safetensors"
    with open(path, "r+b") as file:
        file.seek(-16, os.SEEK_END)
        file.write(b"\xff" * 16)
    assert state_digest(found) == before
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert str(path) not in maps.read()


def test_committing_twice_keeps_the_first(store: CheckpointStore) -> None:
    path = store.commit(snapshot(4))
    before = (path / "manifest.json").stat().st_mtime_ns
    assert store.commit(snapshot(4)) == path
    assert (path / "manifest.json").stat().st_mtime_ns == before


POINTS = [
    "checkpoint.write",
    "checkpoint.manifest",
    "checkpoint.rename",
    "checkpoint.committed",
    "checkpoint.prune",
]
KILLED = """
import sys
from pathlib import Path
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.resilience import faults
from tests.checkpoint.test_store import snapshot
faults.configure(0, 2)
store = CheckpointStore(Path(sys.argv[1]), 2, ["step-000000020-a0002"])
store.commit(snapshot(30))
store.prune(1)
"""


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_nothing_half_is_committed(store: CheckpointStore, point: str) -> None:
    """SIGKILL in another process at each named point: every committed name is whole, and the old one is not lost."""
    store.commit(snapshot(20))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HPCTRAIN_FAULTS": f"kill@{point}"}
    command = [sys.executable, "-c", KILLED, str(store.directory)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -9, done.stderr
    committed = names(store)
    assert committed
    for name in committed:
        load(store, name)
    published = POINTS.index(point) >= POINTS.index("checkpoint.committed")
    assert (checkpoint_name(30, 2) in committed) == published
    assert checkpoint_name(20, 2) in committed
    store.sweep()
    assert sorted(os.listdir(store.directory)) == sorted(committed)
    assert store.commit(snapshot(30)).exists(), "the same step can be saved again"


@pytest.mark.parametrize("point", ["checkpoint.write", "checkpoint.manifest", "checkpoint.rename"])
@pytest.mark.parametrize("fault", ["enospc", "eio"])
def test_no_space_leaves_nothing_and_the_older_one(
    store: CheckpointStore, point: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(snapshot(1))
    monkeypatch.setenv("HPCTRAIN_FAULTS", f"{fault}@{point}:step=2")
    faults.configure(0, 2)
    try:
        with pytest.raises(StorageError, match="step 2 not saved"):
            store.commit(snapshot(2))
    finally:
        monkeypatch.delenv("HPCTRAIN_FAULTS")
        faults.configure(0, 2)
    assert os.listdir(store.directory) == [checkpoint_name(1, 2)]


def test_a_disk_really_full(tmp_path: Path) -> None:
    """A file-size limit of the process stands in for a full disk: the kernel refuses the write in safetensors' code."""
    script = (
        "import resource, signal, sys\nfrom pathlib import Path\n"
        "from hpctrain.checkpoint.store import CheckpointStore\nfrom hpctrain.errors import StorageError\n"
        "from tests.checkpoint.test_store import snapshot\nstate = snapshot(3)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try:\n    CheckpointStore(Path(sys.argv[1]), 1).commit(state)\n"
        "except StorageError as error:\n    sys.stdout.write(f'refused {error}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "checkpoints")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.startswith("refused checkpoint of step 3"), done.stderr
    assert os.listdir(tmp_path / "checkpoints") == []


class Reports(list):
    def __call__(self, kind: str, **fields: object) -> None:
        self.append((kind, fields))


def test_the_writer_keeps_training_when_a_save_fails(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = Reports()
    writer = CheckpointWriter(store, keep=2, report=reports)
    monkeypatch.setenv("HPCTRAIN_FAULTS", "enospc@checkpoint.rename:step=2")
    faults.configure(0, 2)
    try:
        for step in (1, 2, 3, 4):
            writer.save(snapshot(step))
        writer.wait()
        with pytest.raises(StorageError):
            writer.save_now(snapshot(2))
    finally:
        monkeypatch.delenv("HPCTRAIN_FAULTS")
        faults.configure(0, 2)
    assert [(kind, fields["step"]) for kind, fields in reports] == [
        ("checkpoint", 1),
        ("checkpoint_failed", 2),
        ("checkpoint", 3),
        ("checkpoint", 4),
    ]
    assert names(store) == [checkpoint_name(4, 2), checkpoint_name(3, 2)]


def test_saving_now_does_not_save_the_same_step_twice(store: CheckpointStore) -> None:
    reports = Reports()
    writer = CheckpointWriter(store, keep=2, report=reports)
    writer.save(snapshot(5))
    writer.save_now(snapshot(5))
    assert len(reports) == 1
