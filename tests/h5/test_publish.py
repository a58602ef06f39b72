"""A packed set appears whole or not at all: kills, full disks, names already taken."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.durable import fsync_path
from hpctrain.errors import StorageError, UsageError
from hpctrain.h5 import publish
from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.h5.packed import open_packed
from hpctrain.h5.publish import _here, publishing
from hpctrain.resilience import faults

DEADLINE_S = 60
DEAD = "999999999-0123abcd"  # a process number beyond the kernel's largest
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
# Packs slowly, for ever, once the line "packing" is out.
SLOW_PACK = """
import sys, time, numpy as np
from pathlib import Path
from hpctrain.h5.pack import PackOptions, Watch, pack
from hpctrain.h5.sources import ArraySource

def slow(done, total, raw_bytes):
    if done == 30:
        print("packing", flush=True)
    time.sleep(0.02)

arrays = {"x": np.random.default_rng(0).integers(0, 256, (100_000, 1000), dtype=np.uint8)}
pack(ArraySource(arrays), Path(sys.argv[1]), PackOptions(chunk_samples=10, shard_mib=0.1), Watch(slow))
"""
FULL_DISK = """
import sys, numpy as np
from pathlib import Path
from hpctrain.errors import StorageError
from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.h5.ragged import Ragged

codec, shard_mib, samples, folder = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
rng = np.random.default_rng(0)
arrays = {"x": rng.integers(0, 256, (samples, 1024), dtype=np.uint8)}
try:
    pack_arrays(arrays, folder / "set", PackOptions(codec=codec, shard_mib=shard_mib, chunk_samples=64))
except StorageError as error:
    print(error)
print("left:", sorted(path.name for path in folder.iterdir()))
"""


def small(root: Path, value: int = 1, **options: object) -> None:
    pack_arrays({"x": np.full(10, value)}, root, PackOptions(**options))  # type: ignore[arg-type]


def value_in(root: Path) -> float | None:
    mean = open_packed(root).fields["x"].mean
    assert not isinstance(mean, tuple)
    return mean


def start_slow_pack(target: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW_PACK, str(target)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdout is not None
    assert process.stdout.readline() == "packing\n"
    return process


def test_a_killed_pack_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    target = tmp_path / "set"
    process = start_slow_pack(target)
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    assert not target.exists()
    left = list(tmp_path.iterdir())
    assert [path.name.startswith(".set.partial-") for path in left] == [True]
    assert not (left[0] / "dataset.json").exists()
    assert f".partial-{_here()}-{process.pid}-" in left[0].name
    small(target)  # the next pack of the same name cleans up
    assert list(tmp_path.iterdir()) == [target]


def test_an_interrupted_pack_cleans_up_itself(tmp_path: Path) -> None:
    process = start_slow_pack(tmp_path / "set")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_a_pack_at_work_is_left_alone(tmp_path: Path) -> None:
    process = start_slow_pack(tmp_path / "set")
    try:
        small(tmp_path / "set")
        assert len(list(tmp_path.glob(".set.partial-*"))) == 1
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)
    assert value_in(tmp_path / "set") == 1


@pytest.mark.parametrize("where", ["elsewhere.0123abcd", _here()[:-8] + "0123abcd"])
@pytest.mark.parametrize("kind", ["partial", "replaced"])
def test_leftovers_from_elsewhere_are_left_alone(tmp_path: Path, where: str, kind: str) -> None:
    """Another host, or a container whose host has the same name: the number of the process says nothing here."""
    theirs = tmp_path / f".set.{kind}-{where}-{DEAD}"
    theirs.mkdir()  # as it is just after mkdir, and just before the rename: no file says whose it is
    small(tmp_path / "set")
    assert theirs.exists()


def test_leftovers_from_elsewhere_are_removed_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / f".set.partial-elsewhere.0123abcd-{DEAD}"
    theirs.mkdir()
    monkeypatch.setattr(
        publish, "_FORGOTTEN_S", 0.0
    )  # the change time of a directory cannot be set to last week
    small(tmp_path / "set")
    assert list(tmp_path.iterdir()) == [tmp_path / "set"]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no `unshare` here to make a PID namespace with")
def test_another_pid_namespace_is_elsewhere() -> None:
    code = "from hpctrain.h5.publish import _here; print(_here())"
    rootless = [] if os.getuid() == 0 else ["--map-root-user"]
    done = subprocess.run(
        ["unshare", *rootless, "--pid", "--fork", "--mount-proc", sys.executable, "-c", code],
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no PID namespace can be made here: {done.stderr.strip()}")
    theirs, ours = done.stdout.strip(), _here()
    assert theirs.rsplit(".", 1)[0] == ours.rsplit(".", 1)[0]
    assert theirs != ours


def test_names_that_only_look_alike_are_left_alone(tmp_path: Path) -> None:
    leftover = f"partial-{_here()}-{DEAD}"
    names = (".set.partial-1", f".set2.{leftover}", f".set.{leftover}.bak", f".set.partial-x.{leftover}")
    for name in names:
        (tmp_path / name).mkdir()
    small(tmp_path / "set")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "set"])


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    small(tmp_path / "set", 1)
    with pytest.raises(
        UsageError, match="exists already; choose another name, or replace it with --overwrite"
    ):
        small(tmp_path / "set", 2)
    assert value_in(tmp_path / "set") == 1
    small(tmp_path / "set", 2, overwrite=True)
    assert value_in(tmp_path / "set") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    small(tmp_path / "set")
    assert value_in(tmp_path / "set") == 1


def test_only_packed_sets_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"holds no dataset.json, so it is not ours to replace"):
        small(tmp_path / "home", overwrite=True)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    for name in ("file", "link"):
        with pytest.raises(UsageError, match="exists and is not a directory"):
            small(tmp_path / name, overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"


def test_a_failed_overwrite_keeps_the_old_set(tmp_path: Path) -> None:
    small(tmp_path / "set", 1)
    with pytest.raises(RuntimeError, match="stop"), publishing(tmp_path / "set", "dataset.json", True):
        raise RuntimeError("stop")
    assert value_in(tmp_path / "set") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_kill_between_the_renames_of_an_overwrite_is_mended(tmp_path: Path) -> None:
    small(tmp_path / "set", 1)
    aside = tmp_path / f".set.replaced-{_here()}-{DEAD}"
    (tmp_path / "set").rename(aside)
    with pytest.raises(UsageError, match="exists already"):
        small(tmp_path / "set", 2)
    assert value_in(tmp_path / "set") == 1
    shutil.copytree(tmp_path / "set", aside)
    small(tmp_path / "set", 3, overwrite=True)
    assert value_in(tmp_path / "set") == 3
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "Input/output error")])
@pytest.mark.parametrize("renamed", [0, 1])
def test_an_interrupt_between_the_renames_of_an_overwrite_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, renamed: int
) -> None:
    small(tmp_path / "set", 1)
    rename, done = Path.rename, []

    def interrupted(path: Path, target: Path) -> Path:
        done.append(path)
        if len(done) == renamed + 1:
            raise error
        return rename(path, target)

    monkeypatch.setattr(publish, "_exchange", lambda first, second: False)  # a filesystem that cannot, as NFS
    # A signal cannot be made to arrive between two system calls.
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else StorageError):
        small(tmp_path / "set", 2, overwrite=True)
    assert value_in(tmp_path / "set") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_all_files_below_are_durable_before_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def fsync(path: Path) -> None:
        synced.append("parent" if path == tmp_path else path.name)
        fsync_path(path)

    monkeypatch.setattr(publish, "fsync_path", fsync)  # what is durable shows only when the power fails
    with publishing(tmp_path / "set", "marker") as partial:
        (partial / "train" / "deep").mkdir(parents=True)
        for name in ("marker", "train/a", "train/deep/b"):
            (partial / name).write_text("x")
        top = partial.name
    assert sorted(synced) == sorted(["b", "deep", "a", "train", "marker", top, "parent"])
    assert synced[-2:] == [top, "parent"]
    for entry, directory in (("b", "deep"), ("deep", "train"), ("a", "train")):
        assert synced.index(entry) < synced.index(directory)


def test_a_target_taken_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"), publishing(tmp_path / "set", "dataset.json"):
        small(tmp_path / "set", 7)
    assert value_in(tmp_path / "set") == 7
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_what_is_put_back_is_refused_before_the_work(tmp_path: Path) -> None:
    small(tmp_path / "set", 7)
    (tmp_path / "set").rename(tmp_path / f".set.replaced-{_here()}-{DEAD}")
    with pytest.raises(UsageError, match="exists already"), publishing(tmp_path / "set", "dataset.json"):
        pytest.fail("hours of work would be for nothing")
    assert value_in(tmp_path / "set") == 7


def test_new_parents_are_durable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(publish, "fsync_path", synced.append)  # it shows only when the power fails
    with publishing(tmp_path / "a" / "b" / "set", "marker"):
        assert {tmp_path, tmp_path / "a"} == set(synced)
    assert synced[-1] == tmp_path / "a" / "b"


def test_parents_are_made_and_files_are_no_parents(tmp_path: Path) -> None:
    small(tmp_path / "a" / "b" / "set")
    assert value_in(tmp_path / "a" / "b" / "set") == 1
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be written to"):
        small(tmp_path / "file" / "set")


def on_full_disk(disk: Path, *arguments: str) -> str:
    """Run FULL_DISK on a tmpfs of 1 MiB, in a mount namespace of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("no `unshare` here to make a small disk with")
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=1m none "$0" || exit 77; exec "$@"'
    rootless = [] if os.getuid() == 0 else ["--map-root-user"]
    command = ["unshare", *rootless, "--mount", "sh", "-c", mount, str(disk)]
    done = subprocess.run(
        [*command, sys.executable, "-W", "error", "-c", FULL_DISK, *arguments, str(disk)],
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("samples", [1010, 1015, 1018, 4000])
@pytest.mark.parametrize(("codec", "shard_mib"), [("none", "256"), ("gzip", "256"), ("gzip", "0.2")])
def test_no_space_left_while_packing(tmp_path: Path, codec: str, shard_mib: str, samples: int) -> None:
    """The disk fills up in chunks, in metadata, on closing: each time a clear error, no crash, nothing left.

    (At some of these sizes libhdf5 itself crashed while closing; see `shardfile`.)
    """
    out = on_full_disk(tmp_path / "disk", codec, shard_mib, str(samples))
    if out == "left: ['set']\n":
        assert samples == 1010  # it just fits
        return
    message, left = out.strip().rsplit("\n", 1)
    assert left == "left: []"
    assert "No space left on device" in message
    assert "the whole set needs about" in message
    assert "nothing was left behind; make room" in message


FAULTY_PACK = """
import sys, numpy as np
from pathlib import Path
from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.resilience import faults

def pack(root):
    options = PackOptions(chunk_samples=10, shard_mib=0.002, overwrite=True, clean={"duplicates": "drop"})
    pack_arrays({"x": np.arange(400.0), "y": np.arange(400)}, root, options)

if __name__ == "__main__":
    faults.configure(0, 0)
    pack(Path(sys.argv[1]))
"""


def faulty_pack(target: Path, rules: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FAULTY_PACK, str(target)],
        env={**ENVIRONMENT, "HPCTRAIN_FAULTS": rules},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def passages_of_a_pack(root: Path) -> int:
    """How often a pack passes its fault point."""
    names: dict[str, Any] = {}
    exec(FAULTY_PACK, names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCTRAIN_FAULTS", "raise@pack.write:nth=999999")
        faults.configure(0, 0)
        names["pack"](root)
        passages = faults._rules[0].passages
        patch.delenv("HPCTRAIN_FAULTS")
        faults.configure(0, 0)
    return passages


def test_a_kill_at_any_write_leaves_the_old_set_and_the_next_pack_mends_all(tmp_path: Path) -> None:
    """The last passages: both files of JSON, and the rename."""
    target = tmp_path / "set"
    small(target)
    passages = passages_of_a_pack(tmp_path / "other")
    assert passages > 50
    for nth in (1, passages // 2, passages - 1, passages):
        done = faulty_pack(target, f"kill@pack.write:nth={nth}")
        assert done.returncode == -signal.SIGKILL
        assert value_in(target) == 1
        assert len(list(tmp_path.glob(".set.*"))) == 1
    small(target, 2, overwrite=True)
    assert value_in(target) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "set"]
