"""A packed set appears whole or not at all: kills, full disks, names already taken."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import StorageError, UsageError
from hpctrain.h5.pack import PackOptions, pack_arrays
from hpctrain.h5.packed import open_packed
from hpctrain.h5.publish import publishing

DEADLINE_S = 60
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
# Packs slowly, for ever, once the line "packing" is out.
SLOW_PACK = """
import sys, time, numpy as np
from pathlib import Path
from hpctrain.h5.pack import PackOptions, pack
from hpctrain.h5.sources import ArraySource

def slow(done, total, raw_bytes):
    if done == 30:
        print("packing", flush=True)
    time.sleep(0.02)

arrays = {"x": np.random.default_rng(0).integers(0, 256, (100_000, 1000), dtype=np.uint8)}
pack(ArraySource(arrays), Path(sys.argv[1]), PackOptions(chunk_samples=10, shard_mib=0.1), slow)
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


def test_leftovers_of_another_host_are_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / ".set.partial-999999999-0123abcd"
    theirs.mkdir()
    (theirs / "owner.json").write_text('{"host": "elsewhere", "pid": 999999999}')
    small(tmp_path / "set")
    assert theirs.exists()


def test_names_that_only_look_alike_are_left_alone(tmp_path: Path) -> None:
    for name in (".set.partial-1", ".set2.partial-999999999-0123abcd", ".set.partial-999999999-0123abcd.bak"):
        (tmp_path / name).mkdir()
    small(tmp_path / "set")
    assert len(list(tmp_path.iterdir())) == 4


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
    (tmp_path / "set").rename(tmp_path / ".set.replaced-999999999-0123abcd")
    with pytest.raises(UsageError, match="exists already"):
        small(tmp_path / "set", 2)
    assert value_in(tmp_path / "set") == 1
    shutil.copytree(tmp_path / "set", tmp_path / ".set.replaced-999999999-0123abcd")
    small(tmp_path / "set", 3, overwrite=True)
    assert value_in(tmp_path / "set") == 3
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_target_taken_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"), publishing(tmp_path / "set", "dataset.json"):
        small(tmp_path / "set", 7)
    assert value_in(tmp_path / "set") == 7
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


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
