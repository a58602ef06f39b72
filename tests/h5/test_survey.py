"""The survey of files made here; the real files are in test_real_files.py."""

import dataclasses
import json
import os
import sys
import time
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.h5 import survey as survey_module
from hpctrain.h5.dataset import open_dataset
from hpctrain.h5.survey import survey
from hpctrain.h5.survey_facts import FileSurvey, Finding, Limits

# A child that does to one dataset what only a bug of libhdf5 does: files that bring it about are in the test of real
# files, one for a crash; of a hang there is none.
_CHILD = """
import os, signal, sys, time
from hpctrain.h5 import survey_child
real = survey_child.open_dataset
def open_dataset(path, name, **options):
    if name.endswith("victim"):
        {deed}
    return real(path, name, **options)
survey_child.open_dataset = open_dataset
survey_child.main()
"""


def three_datasets(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        for name in ("a", "g/victim", "z"):
            file.create_dataset(name, data=np.arange(24, dtype=np.float32).reshape(6, 4), chunks=(2, 4))
    return path


def survey_with(deed: str, path: Path, monkeypatch: pytest.MonkeyPatch, **limits: float) -> FileSurvey:
    monkeypatch.setattr(survey_module, "CHILD_COMMAND", (sys.executable, "-c", _CHILD.format(deed=deed)))
    return survey(path, dataclasses.replace(Limits(), **limits))


def roads(found: FileSurvey) -> dict[str, str]:
    return {item.name: item.road for item in found.datasets}


class TestWhatItTells:
    def test_a_dataset_in_every_respect(self, tmp_path: Path) -> None:
        path = tmp_path / "one.h5"
        with h5py.File(path, "w") as file:
            data = np.zeros((10, 6), ">i2")
            file.create_dataset(
                "group/x", data=data, chunks=(4, 6), compression="gzip", compression_opts=3, shuffle=True
            )
            file["empty"] = h5py.Empty("f4")
        (empty, found) = survey(path).datasets
        assert (empty.name, empty.shape, empty.raw_bytes, empty.ratio) == ("/empty", None, 0, None)
        assert dataclasses.replace(found, stored_bytes=0, filters=()) == dataclasses.replace(
            found,
            name="/group/x",
            shape=(10, 6),
            dtype="int16 big-endian",
            itemsize=2,
            layout="chunked",
            chunk_shape=(4, 6),
            filters=(),
            filter_ids=(2, 1),
            raw_bytes=120,
            stored_bytes=0,
            road="parallel",
            reason="",
        )
        assert 0 < found.stored_bytes < 120
        assert "2 bytes" in found.filters[0]
        assert "level 3" in found.filters[1]
        assert found.ratio == pytest.approx(120 / found.stored_bytes)

    def test_links_are_named_and_not_followed(self, tmp_path: Path) -> None:
        other = tmp_path / "other.h5"
        with h5py.File(other, "w") as file:
            file["secret"] = 1
        path = tmp_path / "links.h5"
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(3)
            file["twin"] = file["x"]
            file["soft"] = h5py.SoftLink("/nowhere")
            file["far"] = h5py.ExternalLink("other.h5", "/secret")
            file["g/again/top"] = file["/"]
            file["g/t"] = np.dtype("f4")
        found = survey(path)
        assert found.sound
        assert list(roads(found)) == ["/twin"]
        assert found.num_groups == 3
        assert {(link.name, link.kind, link.target) for link in found.links} == {
            ("/x", "hard", "/twin"),
            ("/soft", "soft", "/nowhere"),
            ("/far", "external", "/secret in other.h5"),
            ("/g/again/top", "hard", "/"),
        }

    def test_names_of_any_bytes(self, tmp_path: Path) -> None:
        path = tmp_path / "names.h5"
        with h5py.File(path, "w") as file:
            for name in (b"\xff\xfe", b"\x1b[31mred", b"line\nbreak", "ein Ä".encode()):
                h5py.h5d.create(file.id, name, h5py.h5t.STD_I8LE, h5py.h5s.create_simple((2,)))
        found = survey(path)
        names = {os.fsencode(item.name) for item in found.datasets}
        assert names == {b"/\xff\xfe", b"/\x1b[31mred", b"/line\nbreak", "/ein Ä".encode()}
        json.dumps([dataclasses.asdict(item) for item in found.datasets])
        assert set(roads(found).values()) == {"parallel"}
        for item in found.datasets:
            assert open_dataset(path, item.name).read_rows(0, 2).tolist() == [0, 0]

    def test_more_bytes_than_a_number_of_libhdf5_holds(self, tmp_path: Path) -> None:
        path = tmp_path / "vast.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("x", (2**33, 2**33), "u1", chunks=(1, 1))
        found = survey(path)
        assert found.datasets[0].raw_bytes == 2**66
        assert f"claims to hold {2**66} bytes" in found.findings[0].cause

    def test_a_virtual_dataset_without_its_source(self, tmp_path: Path) -> None:
        layout = h5py.VirtualLayout((4,), "f4")
        layout[:] = h5py.VirtualSource(tmp_path / "gone.h5", "x", (4,))
        with h5py.File(tmp_path / "virtual.h5", "w") as file:
            file.create_virtual_dataset("v", layout)
        found = survey(tmp_path / "virtual.h5")
        assert [(item.layout, item.road) for item in found.datasets] == [("virtual", "none")]
        (finding,) = found.findings
        assert finding.name == "/v"
        assert "gone.h5" in finding.cause

    def test_names_that_are_asked_for_lead_through_links(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A walk does not follow links, a run that reads these names does."""
        three_datasets(tmp_path / "other.h5")
        path = three_datasets(tmp_path / "f.h5")
        with h5py.File(path, "a") as file:
            file["soft"] = h5py.SoftLink("/g/victim")
            file["far"] = h5py.ExternalLink("other.h5", "/g/victim")
            file["fine"] = h5py.ExternalLink("other.h5", "/a")
        child = _CHILD.replace('name.endswith("victim")', 'name in ("/soft", "/far")').format(
            deed="os.kill(os.getpid(), signal.SIGSEGV)"
        )
        monkeypatch.setattr(survey_module, "CHILD_COMMAND", (sys.executable, "-c", child))
        found = survey(path, Limits(max_objects=1), wanted=("soft", "/far", "fine", "/none"))
        assert [item.name for item in found.findings] == ["/soft", "/far", "/none"]
        assert "SIGSEGV" in found.findings[0].cause

    def test_progress_names_each_object(self, tmp_path: Path) -> None:
        seen: list[str] = []
        survey(three_datasets(tmp_path / "f.h5"), progress=seen.append)
        assert list(dict.fromkeys(seen)) == ["/", "/a", "/g", "/g/victim", "/z"]


class TestBounds:
    def test_objects(self, tmp_path: Path) -> None:
        path = tmp_path / "many.h5"
        with h5py.File(path, "w") as file:
            for number in range(30):
                file.create_group(f"{number:02}")
        found = survey(path, Limits(max_objects=10))
        assert found.num_groups == 10
        assert "only 10 objects" in found.cut

    def test_depth(self, tmp_path: Path) -> None:
        path = tmp_path / "deep.h5"
        with h5py.File(path, "w") as file:
            file.create_group("/".join("abcdefgh"))
        found = survey(path, Limits(max_depth=5))
        assert found.num_groups == 6
        assert "deeper than 5" in found.cut

    def test_a_dataset_beyond_the_limit_is_refused_and_described(self, tmp_path: Path) -> None:
        path = tmp_path / "big.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("big", (1 << 20, 1 << 20), "f8", chunks=(1, 1 << 10))
            file["small"] = np.arange(4)
        found = survey(path, Limits(max_bytes=1 << 30))
        assert roads(found) == {"/big": "none", "/small": "parallel"}
        assert [item.name for item in found.findings] == ["/big"]
        assert found.datasets[0].raw_bytes == 1 << 43

    def test_a_limit_that_is_raised_is_that_of_opening_too(self, tmp_path: Path) -> None:
        path = tmp_path / "vast.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("x", (5 << 20, 1 << 20), "u1", chunks=(16, 1 << 20))
        assert roads(survey(path, Limits(max_bytes=6 << 40))) == {"/x": "parallel"}

    def test_memory(self, tmp_path: Path) -> None:
        path = tmp_path / "bomb.h5"
        size = 1 << 27
        with h5py.File(path, "w") as file:
            bomb = file.create_dataset("bomb", (size,), "u1", chunks=(size,), compression="gzip")
            bomb.id.write_direct_chunk((0,), zlib.compress(bytes(size), 1))
            file["small"] = np.arange(4)
        found = survey(path, Limits(memory_bytes=1 << 26))
        assert roads(found) == {"/bomb": "none", "/small": "parallel"}
        (finding,) = found.findings
        assert finding.name == "/bomb"
        assert "memory" in finding.cause


class TestTheChild:
    def test_a_crash_names_the_object_and_the_others_are_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = three_datasets(tmp_path / "f.h5")
        found = survey_with("os.kill(os.getpid(), signal.SIGSEGV)", path, monkeypatch)
        assert found.findings == (Finding("/g/victim", "libhdf5 crashes on it (SIGSEGV)"),)
        assert roads(found) == {"/a": "parallel", "/g/victim": "none", "/z": "parallel"}
        assert not found.refused
        assert not found.cut

    def test_a_hang_ends(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started_s = time.monotonic()
        found = survey_with(
            "time.sleep(600)", three_datasets(tmp_path / "f.h5"), monkeypatch, object_timeout_s=2.5
        )
        assert time.monotonic() - started_s < 30
        assert found.findings == (Finding("/g/victim", "looking at it took longer than 2.5 s"),)
        assert roads(found)["/z"] == "parallel"

    def test_a_mistake_is_told_as_it_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found = survey_with("1 / 0", three_datasets(tmp_path / "f.h5"), monkeypatch)
        (finding,) = found.findings
        assert finding.cause == "looking at it ended with exit code 1: ZeroDivisionError: division by zero"

    @pytest.mark.parametrize(
        "nonsense",
        ["5", "[1, 2, 3]", '["at", 3]', '["dataset", {}]', '["dataset", 5]', '["group", []]', "[" * 100_000],
    )
    def test_nonsense_from_a_child(
        self, nonsense: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A crash may write anything first, and so may a filter that prints."""
        child = f"import sys; sys.stdin.read(); print({nonsense!r})"
        monkeypatch.setattr(survey_module, "CHILD_COMMAND", (sys.executable, "-c", child))
        assert "looking at it went wrong" in survey(three_datasets(tmp_path / "f.h5")).refused

    def test_a_line_without_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        child = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
        monkeypatch.setattr(survey_module, "CHILD_COMMAND", (sys.executable, "-c", child))
        found = survey(three_datasets(tmp_path / "f.h5"))
        assert "went wrong: a line of more than" in found.refused

    def test_a_child_that_does_not_listen(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What it is asked may be more than a pipe holds, after some deaths in a file of many datasets."""
        asleep = (sys.executable, "-c", "import time; time.sleep(30)")
        monkeypatch.setattr(survey_module, "CHILD_COMMAND", asleep)
        monkeypatch.setattr(survey_module, "_START_TIMEOUT_S", 0.5)
        found = survey_module._Found(skip=[(f"/{number}", "open") for number in range(10_000)])
        began_s = time.monotonic()
        limits = Limits(object_timeout_s=0.5)
        survey_module._one_child(three_datasets(tmp_path / "f.h5"), limits, 0, found, lambda name: None)
        assert "took longer than" in found.refused
        assert time.monotonic() - began_s < 20

    def test_too_many_deaths_end_the_survey(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "f.h5"
        with h5py.File(path, "w") as file:
            for number in range(5):
                file[f"{number}victim"] = number
        found = survey_with("os.abort()", path, monkeypatch, max_deaths=2)
        assert len(found.findings) == 2
        assert "given up after 2" in found.cut

    def test_one_that_does_not_start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            survey_module, "CHILD_COMMAND", (sys.executable, "-c", "raise SystemExit('no disk')")
        )
        found = survey(three_datasets(tmp_path / "f.h5"))
        assert found.refused == "looking at it ended with exit code 1: no disk"


class TestRefused:
    def test_not_hdf5(self, tmp_path: Path) -> None:
        path = tmp_path / "text.h5"
        path.write_text("no HDF5 here " * 100)
        found = survey(path)
        assert not found.sound
        assert str(path) in found.refused

    def test_a_fifo_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        assert "not a regular file" in survey(tmp_path / "fifo").refused

    def test_nothing_there(self, tmp_path: Path) -> None:
        assert "No such file" in survey(tmp_path / "none.h5").refused

    def test_truncated(self, tmp_path: Path) -> None:
        path = three_datasets(tmp_path / "f.h5")
        os.truncate(path, path.stat().st_size - 8)
        found = survey(path)
        assert "truncated" in found.refused
        assert found.datasets == ()
