from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.resilience import scratch
from hpctrain.resilience.scratch import SCRATCH_VARIABLE, enter_scratch, scratch_prefix

TOLD = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the test's in place of /dev/shm, which is shared with all of this machine."""
    found = tmp_path / "shm"
    found.mkdir()
    monkeypatch.setattr(scratch, "_PARENT", found)
    for name in TOLD:
        monkeypatch.setenv(name, "before")
    monkeypatch.setenv(SCRATCH_VARIABLE, scratch_prefix(tmp_path / "run"))
    return found


def own(memory: Path, attempt: int) -> Path:
    return memory / f"{os.environ[SCRATCH_VARIABLE]}a{attempt:04d}"


def test_prefixes_are_of_one_user_and_one_run(tmp_path: Path) -> None:
    assert re.fullmatch(rf"hpctrain-{os.getuid()}-[0-9a-f]{{12}}-", scratch_prefix(tmp_path))
    assert scratch_prefix(tmp_path) != scratch_prefix(tmp_path / "other")
    (tmp_path / "link").symlink_to(tmp_path)
    assert scratch_prefix(tmp_path / "link") == scratch_prefix(tmp_path), (
        "other nodes may see it by another path"
    )


def test_an_attempt_gets_a_private_directory_and_open_mpi_is_told(memory: Path) -> None:
    for _ in range(2):  # the second rank of the node finds it there
        enter_scratch(1)
        assert stat.S_IMODE(own(memory, 1).stat().st_mode) == 0o700
        assert [os.environ[name] for name in TOLD] == [str(own(memory, 1))] * 2


def test_the_next_attempt_removes_what_the_last_one_left(memory: Path) -> None:
    enter_scratch(1)
    (own(memory, 1) / "vader_segment.n1.0").write_bytes(b"x" * 100)
    enter_scratch(2)
    assert list(memory.iterdir()) == [own(memory, 2)]
    (own(memory, 2) / "segment").write_bytes(b"x")
    enter_scratch(2)
    assert (own(memory, 2) / "segment").exists(), "of a rank that came earlier"


def test_what_belongs_to_others_stays(memory: Path) -> None:
    foreign = [memory / f"hpctrain-{os.getuid()}-0123456789ab-a0001", memory / "sem.mp-1", memory / "psm_1"]
    for path in foreign:
        path.mkdir()
    enter_scratch(1)
    assert all(path.exists() for path in foreign)


def test_a_link_planted_under_the_name_is_not_followed(memory: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").touch()
    for attempt in (1, 2):
        own(memory, attempt).symlink_to(precious)
    enter_scratch(2)
    assert (precious / "thesis.tex").exists()
    assert [os.environ[name] for name in TOLD] == ["before"] * 2


@pytest.mark.skipif(os.getuid() != 0, reason="giving a directory away takes root: run as root")
def test_a_directory_of_another_user_is_not_used(memory: Path) -> None:
    own(memory, 1).mkdir()
    os.chown(own(memory, 1), 65534, 65534)
    enter_scratch(1)
    assert os.environ[TOLD[0]] == "before"


def test_without_the_variable_nothing_happens(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SCRATCH_VARIABLE)
    enter_scratch(1)
    assert list(memory.iterdir()) == []
    assert os.environ[TOLD[0]] == "before"


def test_all_ranks_of_a_node_may_come_at_once(memory: Path) -> None:
    own(memory, 1).mkdir()
    code = (
        "import pathlib, sys; from hpctrain.resilience import scratch;"
        "scratch._PARENT = pathlib.Path(sys.argv[1]); scratch.enter_scratch(2);"
        f"import os; print(os.environ[{TOLD[0]!r}])"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(memory)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [rank.communicate(timeout=60)[0].strip() for rank in ranks] == [str(own(memory, 2))] * 4
    assert list(memory.iterdir()) == [own(memory, 2)]
