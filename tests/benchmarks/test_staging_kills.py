from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import staging_kinds
from benchmarks.staging_kill_runs import Killed, kill_all
from benchmarks.staging_kills import Kind, Outcome, Trials, forked
from benchmarks.staging_sets import KIB, SetSpec, files_of, write_set, write_user_file
from hpctrain.resilience.faults import fault_point

# ---- Forked processes ------------------------------------------------------------------------------------------


def fail() -> None:
    raise ValueError("odd")


def leave() -> None:
    raise SystemExit(65)


def test_what_a_forked_process_returns_is_said() -> None:
    assert forked(lambda: "all right") == Outcome(0, 0, "all right")


def test_an_error_is_told_with_its_words() -> None:
    found = forked(fail)
    assert (found.signal, found.code) == (0, 1)
    assert "ValueError: odd" in found.words


def test_the_exit_code_of_a_command_is_told() -> None:
    assert forked(leave) == Outcome(0, 65, "")


def test_a_fault_kills_it() -> None:
    assert forked(lambda: fault_point("x.write"), "kill@x.write:nth=1").signal == signal.SIGKILL


def test_one_that_hangs_is_ended() -> None:
    begun_s = time.monotonic()
    found = forked(lambda: time.sleep(60), deadline_s=0.2)
    assert (found.code, found.words) == (-1, "did not end within 0.2 s")
    assert time.monotonic() - begun_s < 10


# ---- Trials of a program of three writes -----------------------------------------------------------------------


class Copy(Kind):
    """Writes a file in three parts; what it is after a kill depends on `is_careful`."""

    point = "copy.write"
    variants = ("new",)
    is_careful = True

    def make(self, folder: Path) -> None:
        (folder / "right").write_text("abc")

    def prepare(self, variant: str, fixture: Path, folder: Path) -> None:
        (folder / "begun").touch()

    def run(self, variant: str, fixture: Path, folder: Path) -> None:
        target = folder / ("partial" if self.is_careful else "copy")
        target.unlink(missing_ok=True)
        for letter in (fixture / "right").read_text()[:2]:
            fault_point("copy.write")
            with target.open("a") as file:
                file.write(letter)
        fault_point("copy.write")
        (folder / "copy").write_text("abc")

    def seen(self, variant: str, fixture: Path, folder: Path) -> str:
        return self.result(variant, fixture, folder) if (folder / "copy").exists() else ""

    def result(self, variant: str, fixture: Path, folder: Path) -> str:
        found = (folder / "copy").read_text()
        return "" if found == "abc" else f"it holds {found}"


class Careless(Copy):
    is_careful = False


class Unfinished(Copy):
    """Never gets beyond its first kill."""

    def run(self, variant: str, fixture: Path, folder: Path) -> None:
        if (folder / "partial").exists():
            raise SystemExit(74)
        super().run(variant, fixture, folder)


def test_a_careful_program_is_right_wherever_it_is_killed(tmp_path: Path) -> None:
    trials = Trials("copy", Copy(), tmp_path, seed=1)
    found = [trials.trial(number) for number in range(8)]
    assert {trial.problem for trial in found} == {""}
    assert {trial.passages for trial in found} == {3}
    assert {trial.nth for trial in found} == {1, 2, 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fixture"]


def test_the_same_seed_kills_at_the_same_writes(tmp_path: Path) -> None:
    drawn = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        trials = Trials("copy", Copy(), tmp_path / name, seed=5)
        drawn.append([trials.trial(number).nth for number in range(4)])
    assert drawn[0] == drawn[1]


def test_a_careless_program_is_found_out(tmp_path: Path) -> None:
    trials = Trials("copy", Careless(), tmp_path, seed=1)
    problems = [trials.trial(number).problem for number in range(8)]
    assert "after the kill: it holds a" in problems
    assert "after the kill: it holds ab" in problems


def test_one_that_cannot_be_run_again_is_found_out(tmp_path: Path) -> None:
    trials = Trials("copy", Unfinished(), tmp_path, seed=1)
    problems = {trials.trial(number).problem for number in range(8)}
    assert "run again: Outcome(signal=0, code=74, words='')" in problems


def test_a_program_that_passes_no_fault_point_is_no_trial(tmp_path: Path) -> None:
    kind = Copy()
    kind.point = "other.write"
    with pytest.raises(RuntimeError, match=r"copy, new: it passes no point other\.write, without any kill"):
        Trials("copy", kind, tmp_path, seed=1).trial(0)


# ---- The real programs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stager", "restore"])  # and pack below
def test_each_kind_is_killed_and_right(tmp_path: Path, name: str) -> None:
    trial = Trials(name, staging_kinds.KINDS[name](), tmp_path, seed=3).trial(0)
    assert trial.problem == ""
    assert 1 <= trial.nth <= trial.passages


def test_workers_share_the_kills_and_say_how_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.staging_kill_runs.KINDS", ("pack", "restore"))
    said: list[str] = []
    pack, restore = kill_all(1, 3, tmp_path, said.append)
    assert (pack.asked, pack.right, pack.reason) == (1, 1, "")
    assert (restore.asked, restore.trials) == (0, [])
    assert said == ["kills: pack: 1 of 1 right so far, seed 3"]


def test_a_worker_that_fails_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.staging_kill_runs.KINDS", ("unknown",))
    (found,) = kill_all(1, 3, tmp_path, lambda text: None)
    assert found.trials == []
    assert "it ended with 1" in found.reason
    assert "KeyError: 'unknown'" in found.reason
    assert found.judged().is_met is None


def test_shares_add_up_to_all_kills() -> None:
    assert Killed("pack", 3, 1).judged().bar.bound == 3


# ---- What is looked at -----------------------------------------------------------------------------------------

SMALL = SetSpec(num_chunks=4, chunk_bytes=64 * KIB)


def test_a_set_has_chunks_of_the_size_asked_for_and_others_where_changed(tmp_path: Path) -> None:
    from hpctrain.h5.packed import open_packed
    from hpctrain.staging.stored import file_keys_of, stored_chunks

    digests = []
    for spec in (SMALL, SMALL.changed_by(1)):
        packed = open_packed(write_set(spec, tmp_path / str(spec.changed)))
        stored = stored_chunks(packed, file_keys_of(packed))
        assert stored.sizes.tolist() == [64 * KIB] * 4
        digests.append(stored.digests)
    assert np.flatnonzero(digests[0] != digests[1]).tolist() == [0]


def test_a_user_file_holds_the_same_samples(tmp_path: Path) -> None:
    import h5py

    with h5py.File(write_user_file(SMALL, tmp_path / "x.h5")) as file:
        assert file["x"].chunks == (4, 16 * KIB)
        assert np.array_equal(file["x"][:], SMALL.samples())


def test_a_difference_in_names_or_bytes_is_seen(tmp_path: Path) -> None:
    right = write_set(SMALL, tmp_path / "right")
    assert staging_kinds.difference(tmp_path / "absent", right) == "absent is not there"
    other = Path(shutil.copytree(right, tmp_path / "other"))
    assert staging_kinds.difference(other, right) == ""
    (path,) = (item for item in files_of(other) if item.suffix == ".h5")
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    assert staging_kinds.difference(other, right) == f"other: other bytes in {path.name}"
    (other / ".hidden").touch()
    assert "has the files" in staging_kinds.difference(other, right)
