"""Facts of filesystems and memory, read from made-up /proc and /sys; and real holes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.staging import disk

GIB = 1 << 30


def made_up(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
30 1 0:30 / /scratch rw shared:7 master:1 - ext4 /dev/nvme0n1p1 rw
31 30 0:31 / /scratch rw,relatime - tmpfs none rw,size=1024k
32 1 253:0 / /mnt/with\\040space rw - xfs /dev/zram0 rw
33 1 0:33 / /ram rw - ramfs ramfs rw
"""


@pytest.mark.parametrize(
    ("number", "kind", "is_memory"),
    [(30, "ext4", False), (31, "tmpfs", True), (32, "xfs", True), (33, "ramfs", True), (99, "", False)],
)
def test_the_mount_is_found_by_its_number(tmp_path: Path, number: int, kind: str, is_memory: bool) -> None:
    made_up(tmp_path, {"fdinfo/7": f"pos:\t0\nflags:\t02\nmnt_id:\t{number}\nino:\t5\n", "mountinfo": MOUNTS})
    found = disk.mount_of(7, tmp_path)
    assert (found.kind, found.is_memory) == (kind, is_memory)


@pytest.mark.parametrize("facts", ["", "mnt_id:", "pos: 0\n"])
def test_a_kernel_that_does_not_say_means_a_disk(tmp_path: Path, facts: str) -> None:
    made_up(tmp_path, {"fdinfo/7": facts, "mountinfo": MOUNTS})
    assert disk.mount_of(7, tmp_path) == disk.Mount()
    assert disk.mount_of(8, tmp_path) == disk.Mount()


def test_this_machine(tmp_path: Path) -> None:
    descriptor = os.open("/proc", os.O_RDONLY)
    assert disk.mount_of(descriptor).kind == "proc"
    os.close(descriptor)
    assert 0 < disk.memory_available_bytes() < 1 << 50


MEMINFO = "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n"  # 16 GiB


@pytest.mark.parametrize(
    ("files", "available_gib"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/job\n"}, 16),  # nothing there: a container
        (
            {
                "proc/self/cgroup": "0::/slurm/job_1/step_0\n",
                "sys/fs/cgroup/slurm/job_1/memory.max": f"{8 * GIB}\n",
                "sys/fs/cgroup/slurm/job_1/memory.current": f"{5 * GIB}\n",
                "sys/fs/cgroup/slurm/job_1/memory.stat": f"anon 5\nactive_file 7\ninactive_file {2 * GIB}\n",
                "sys/fs/cgroup/slurm/job_1/step_0/memory.max": "max\n",
                "sys/fs/cgroup/slurm/job_1/step_0/memory.current": f"{5 * GIB}\n",
            },
            5,
        ),
        (
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:memory,cpu:/slurm/job_1\n0::/\n",
                "sys/fs/cgroup/memory/slurm/job_1/memory.limit_in_bytes": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory/slurm/job_1/memory.usage_in_bytes": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory/slurm/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/slurm/memory.usage_in_bytes": "5\n",
            },
            1,
        ),
        (
            {
                "sys/fs/cgroup/memory.max": f"{GIB}\n",
                "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
            },
            0,
        ),
        ({"proc/self/cgroup": "0::/../outside\n", "sys/fs/outside/memory.max": "1\n"}, 16),
    ],
    ids=["none", "container", "version 2", "version 1", "root, over it", "outside"],
)
def test_memory_by_the_tightest_control_group(tmp_path: Path, files: dict[str, str], available_gib) -> None:
    root = made_up(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert disk.memory_available_bytes(root) == available_gib * GIB


def test_a_hole_gives_its_blocks_back_and_keeps_the_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3 * 65536)
    with path.open("r+b") as file:
        if not disk.can_punch_holes(file.fileno()):
            pytest.skip("no holes on this filesystem")
        assert path.stat().st_size == 3 * 65536, "to ask changes nothing"
        before = path.stat().st_blocks
        disk.punch_hole(file.fileno(), 65536, 65536)
    assert path.read_bytes() == b"x" * 65536 + bytes(65536) + b"x" * 65536
    assert path.stat().st_blocks == before - 65536 // 512


def test_a_hole_in_what_is_no_open_file(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        with pytest.raises(OSError, match="Invalid argument"):
            disk.punch_hole(file.fileno(), 0, 0)
        descriptor = os.open(tmp_path / "file", os.O_RDONLY)
        with pytest.raises(OSError, match="Bad file descriptor"):
            disk.can_punch_holes(descriptor)
        os.close(descriptor)


def test_quotas_by_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        disk, "memory_available_bytes", lambda: 30
    )  # not that of the machine the test runs on
    space = disk.Space(total_bytes=1000, free_bytes=50, block_bytes=1)
    assert disk.quota_by_space(space, is_memory=False, present_bytes=0) == 40
    assert disk.quota_by_space(space, is_memory=False, present_bytes=25) == 65
    assert disk.quota_by_space(space, is_memory=True, present_bytes=0) == 15
    assert disk.quota_by_space(space, is_memory=True, present_bytes=100) == 65
    tight = disk.Space(total_bytes=1000, free_bytes=5, block_bytes=1)
    assert disk.quota_by_space(tight, is_memory=False, present_bytes=0) == 0
    assert disk.quota_by_space(tight, is_memory=True, present_bytes=0) == 5
