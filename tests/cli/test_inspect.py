import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.cli import main
from hpctrain.cli.inspect import plain
from tests.support import hpctrain, small_set


def fields(path: Path, name: str = "field") -> Path:
    with h5py.File(path, "w") as file:
        data = np.arange(1000 * 512, dtype=np.float32).reshape(1000, 512)
        file.create_dataset(name, data=data, chunks=(500, 512), compression="gzip", shuffle=True)
    return path


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_one_table_with_every_column_and_a_line_of_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fields(tmp_path / "f.h5")
    assert run(path) == 0
    out, err = capsys.readouterr()
    heading, titles, row, advice, *rest = out.splitlines()
    assert heading.startswith(f"{path}: ")
    assert heading.endswith("1 group, 1 dataset")
    for title in (
        "dataset",
        "shape",
        "type",
        "chunk",
        "filters",
        "raw",
        "stored",
        "ratio",
        "amplif. of 1",
        "of 8",
        "read by",
    ):
        assert title in titles
    for cell in ("/field", "1000 x 512", "float32", "500 x 512", "level 4", "2.0 MiB", "500.0", "parallel"):
        assert cell in row
    assert advice.startswith("advice: /field: a chunk holds 500 samples, the lane batch is 8")
    assert "--chunk-samples 128" in advice
    assert rest == [""]
    assert err == ""


def test_as_json_for_another_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fields(tmp_path / "f.h5"), "--json", "--batch-size", 1000) == 0
    (file,) = json.loads(capsys.readouterr().out)["files"]
    (dataset,) = file["datasets"]
    assert dataset["name"] == "/field"
    assert dataset["shape"] == [1000, 512]
    assert dataset["samples_per_chunk"] == 500
    assert dataset["amplification_batch"] == pytest.approx(1)
    assert dataset["amplification_sample"] == pytest.approx(500)
    assert dataset["ratio"] > 1
    assert file["findings"] == []
    assert file["batch_size"] == 1000


def test_nothing_is_cut_where_there_is_no_terminal(tmp_path: Path) -> None:
    long = "a-name-that-goes-on-" * 15
    done = hpctrain(["inspect", fields(tmp_path / "f.h5", long)], env={"COLUMNS": "60"})
    assert done.returncode == 0, done.stderr
    assert long in done.stdout
    assert any(long in line and "parallel" in line for line in done.stdout.splitlines())


def test_everything_is_shown_before_the_end_with_65(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.h5"
    text.write_text("no HDF5")
    broken = fields(tmp_path / "broken.h5")
    with h5py.File(broken, "r+") as file:
        file["z"] = np.arange(5)
        where = file["field"].id.get_chunk_info(0).byte_offset
    with broken.open("r+b") as raw:
        raw.seek(where)
        raw.write(os.urandom(64))
    assert run(text, broken, fields(tmp_path / "good.h5")) == 65
    out, err = capsys.readouterr()
    assert f"{text}: refused" in out
    assert "damaged or unreadable:\n  /field: " in out
    assert "/z" in out
    assert f"{tmp_path / 'good.h5'}: " in out
    assert "2 of 3 files" in err


def test_a_file_that_is_not_there_is_a_mistake_in_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "none.h5") == 64
    assert "there is no such file" in capsys.readouterr().err


def test_a_limit_that_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--max-gib", "inf") == 64
    assert "give a number of GiB" in capsys.readouterr().err


def test_a_packed_set_shows_its_first_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = small_set(tmp_path / "set", 2000, 8)
    assert len(packed.shards) > 3
    assert run(tmp_path / "set") == 0
    out = capsys.readouterr().out
    assert out.count("/image") == 3
    assert "_digests" not in out
    assert f"the first 3 of {len(packed.shards)} shards were looked at" in out


def test_a_folder_that_is_no_packed_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) == 65
    assert "is not a packed set" in capsys.readouterr().err


def test_the_limit_can_be_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "large.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (1 << 20, 1 << 17), "u1", chunks=(1 << 10, 1 << 10))
    assert run(path) == 65
    assert "/x" in capsys.readouterr().out
    assert run(path, "--max-gib", 200) == 0


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert plain("a\x1b[2Jb\nc\udcff ä") == "a\\x1b[2Jb\\nc\\udcff ä"


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", "--help"])
    assert "hpctrain inspect fields.h5" in capsys.readouterr().out
