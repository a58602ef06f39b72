from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.environment import CPU_FLAGS, cpu_flags, cpu_quota, describe, filesystem, git_state

KEYS = {
    "started_utc", "command", "host", "kernel", "cpu_model", "cpu_flags", "cores_online", "cores_usable",
    "cpu_quota_cores", "memory_gib", "load_1min_before", "gpu", "python", "hpctrain", "versions", "mpi", "git_commit",
    "git_dirty", "filesystem",
}  # fmt: skip


def test_all_keys_are_there_and_are_json(tmp_path: Path) -> None:
    found = describe(tmp_path, ["python", "-m", "benchmarks", "storage", "--dir", "a b"])
    assert set(found) == KEYS
    assert json.loads(json.dumps(found)) == found
    assert found["command"] == "python -m benchmarks storage --dir 'a b'"
    assert 1 <= found["cores_usable"] <= found["cores_online"]
    assert found["versions"]["numpy"]
    assert found["filesystem"]["folder"] == str(tmp_path)
    assert found["filesystem"]["type"]


def test_flags_are_those_of_the_kernel() -> None:
    words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    assert cpu_flags() == [flag for flag in CPU_FLAGS if flag in words]


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("", None), ("what is this", None)]
)
def test_quota_of_the_control_group(tmp_path: Path, text: str, cores: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text, encoding="ascii")
    assert cpu_quota([tmp_path]) == cores


def test_the_tightest_quota_counts(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("root", "slice", "job")]
    for folder, text in zip(folders, ("max 100000", "400000 100000", "800000 100000"), strict=True):
        folder.mkdir()
        (folder / "cpu.max").write_text(text, encoding="ascii")
    assert cpu_quota(folders) == 4.0


def test_no_control_group(tmp_path: Path) -> None:
    assert cpu_quota([tmp_path / "missing"]) is None


def test_filesystem_is_that_of_the_longest_and_last_mount(tmp_path: Path) -> None:
    folder = tmp_path / "with blank"
    folder.mkdir()
    escaped = str(folder).replace(" ", "\\040")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        f"2 1 0:2 / {escaped} rw shared:1 - nfs4 server:/x rw\n"
        f"3 1 0:3 / {escaped} rw shared:1 master:2 - lustre mgs@tcp:/y rw\n"
        f"4 1 0:4 / {escaped}er rw - tmpfs none rw\n",
        encoding="ascii",
    )
    found = filesystem(folder, mounts)
    assert (found["type"], found["mount"]) == ("lustre", str(folder))
    assert filesystem(tmp_path, mounts)["type"] == "ext4"


def test_filesystem_without_a_mount_table(tmp_path: Path) -> None:
    assert filesystem(tmp_path, tmp_path / "missing")["type"] is None


def test_git_state_of_a_checkout_and_of_none(tmp_path: Path) -> None:
    assert git_state(tmp_path) == (None, None)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    commit, dirty = git_state(tmp_path)
    assert commit is not None
    assert (len(commit), dirty) == (40, False)
    (tmp_path / "new").touch()
    assert git_state(tmp_path) == (commit, True)
